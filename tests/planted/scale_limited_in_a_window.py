"""A parameter that is limited after the step, in every batch: in the middle of an update, too."""

from __future__ import annotations

from common import ech, loader, model, nn, torch

net = model()
scale = nn.Parameter(torch.tensor(3.0))
net.register_parameter("scale", scale)
net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader())
for _ in ech.epochs(batches, 2):
    for x, y in batches:
        with ech.window(net) as window:
            window.backward(nn.functional.mse_loss(net(x) * scale, y))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            scale.clamp_(0.0, 2.0)
