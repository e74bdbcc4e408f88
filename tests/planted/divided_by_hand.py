"""A loop that divides the loss by its micro-batches, as other libraries want it."""

from __future__ import annotations

from common import Rows, ech, model, nn, torch

network = model()
loader = torch.utils.data.DataLoader(Rows(), 16)
network, optimizer, loader = ech.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1), loader, accumulate=3)
for _ in ech.epochs(loader, 3):
    for x, y in loader:
        with ech.window(network) as window:
            window.backward(nn.functional.mse_loss(network(x), y) / 3)
            optimizer.step()
            optimizer.zero_grad()
