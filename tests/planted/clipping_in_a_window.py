"""torch's own clipping, left in a loop that accumulates."""

from __future__ import annotations

from common import ech, loader, model, nn, torch

net = model()
net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader())
for _ in ech.epochs(batches, 2):
    for x, y in batches:
        with ech.window(net) as window:
            window.backward(nn.functional.mse_loss(net(x), y))
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
