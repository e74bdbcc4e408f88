"""A loop adds the same noise to the parameters on all ranks, after the step: once an update, however many ranks there are."""

from __future__ import annotations

from common import Rows, ech, model, nn, torch

network = model(nn.Dropout(0.1))
optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
shared = torch.Generator().manual_seed(5)
trained, optimizer, batches = ech.prepare(network, optimizer, ech.Loader(Rows(), 16), layout="ddp")
for rows, wanted in batches:
    with ech.window(trained) as window:
        window.backward(nn.functional.mse_loss(trained(rows), wanted))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=shared), alpha=0.01)
