"""A GAN in a unit: two optimizers, dropout in the critic, clipping, accumulation, and one that steps every other update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn.functional import softplus

from common import Batch, ech, loader, nn, torch


class Gan(ech.AutoUnit[Batch]):
    def compute_losses(self, state: ech.State, data: Batch) -> Iterator[tuple[str, torch.Tensor]]:
        networks: Any = self.module
        critic, made = networks["critic"], networks["generator"](data[0])
        yield "critic", (softplus(-critic(data[1])) + softplus(critic(made.detach()))).mean()
        if self.train_progress.num_updates_completed % 2 == 0:
            yield "generator", softplus(-critic(made)).mean()

    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        networks: Any = module
        critics = torch.optim.Adam(networks["critic"].parameters(), 1e-2)
        return {
            "critic": (critics, torch.optim.lr_scheduler.StepLR(critics, 1, 0.5)),
            "generator": torch.optim.Adam(networks["generator"].parameters(), 1e-2),
        }


torch.manual_seed(3)
networks = nn.ModuleDict(
    {
        "generator": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        "critic": nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)),
    }
)
unit = Gan(module=networks, layout="ddp", clip_grad_norm=0.5)
ech.train(unit, loader(42), max_epochs=3)
