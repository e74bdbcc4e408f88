"""A loop adds noise of each rank's own to the parameters, after the step."""

from __future__ import annotations

from common import Rows, ech, model, nn, torch

network = model()
optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
trained, optimizer, batches = ech.prepare(network, optimizer, ech.Loader(Rows(), 16), layout="ddp")
for rows, wanted in batches:
    with ech.window(trained) as window:
        window.backward(nn.functional.mse_loss(trained(rows), wanted))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
