"""Activation checkpointing that does not keep the RNG state, around dropout, in a loop of one's own."""

from __future__ import annotations

from torch.utils.checkpoint import checkpoint

from common import ech, loader, nn, torch


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(4, 16), nn.Linear(16, 1)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(checkpoint(self.middle, self.begin(x), use_reentrant=False, preserve_rng_state=False))


torch.manual_seed(3)
model = Recomputed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = ech.prepare(model, optimizer, loader())
for _ in ech.epochs(batches, 1):
    for x, y in batches:
        with ech.window(model) as window:
            window.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
