"""An optimizer whose step is larger the more ranks there are."""

from __future__ import annotations

from typing import Any

from common import Auto, dist, ech, loader, model, nn, torch


class Larger(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=1e-2 * dist.get_world_size())


class Scaled(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return Larger(module.parameters(), lr=1e-2), None


ech.train(Scaled(module=model(), layout="ddp"), loader(), max_epochs=1)
