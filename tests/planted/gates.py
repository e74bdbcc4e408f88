"""Gates behind batch norm over numbers with a large mean: float32 has few digits left, and rounding opens and closes gates."""

from __future__ import annotations

from typing import Any

from common import Auto, Batch, Rows, ech, nn, torch


class Far(Rows):
    def __getitem__(self, i: int) -> Batch:
        return self.x[i] + 3000, self.y[i]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), *layers, nn.Linear(64, 1))


class Gated(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.SGD(module.parameters(), lr=0.01), None


def train(unit: type[Gated] = Gated) -> None:
    ech.train(unit(module=net(), layout=ech.DDPStrategy(sync_batchnorm=True)), ech.Loader(Far(), 16), max_epochs=3)
