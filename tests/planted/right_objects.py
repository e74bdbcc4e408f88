"""Batches of a class of the script's own, text in them; a layer that is frozen at first, an unused one, float32 inside."""

from __future__ import annotations

from typing import NamedTuple

from common import Auto, Batch, Rows, ech, model, nn, torch


class Sample(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    name: str


class Narrow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class Thawing(Auto):
    def compute_loss(self, state: ech.State, data: Sample) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().compute_loss(state, (data.x, data.y))

    def on_train_epoch_start(self, state: ech.State) -> None:
        self.prepared.unwrapped.used[1].requires_grad_(self.train_progress.num_epochs_completed > 0)


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = model(Narrow(8, 8)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


rows: list[Batch] = [Rows()[i] for i in range(32)]
samples = [Sample(x, y, f"row {i}") for i, (x, y) in enumerate(rows)]
layout = ech.DDPStrategy(find_unused_parameters=True)
ech.train(Thawing(module=Partly(), layout=layout), ech.Loader(samples, 16), max_epochs=3)
