"""Every rank adds noise of its own to the parameters after each step."""

from __future__ import annotations

from typing import Any

from common import Auto, ech, loader, model, nn, torch


class Langevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))


class Sampled(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return Langevin(module.parameters(), lr=0.1), None


ech.train(Sampled(module=model(), layout="ddp"), loader(), max_epochs=1)
