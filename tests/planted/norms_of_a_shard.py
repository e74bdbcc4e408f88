"""An optimizer that scales each step by norms of what its rank has of a parameter."""

from __future__ import annotations

from typing import Any

from common import Auto, ech, loader, model, nn, torch


def own(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Trusting(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                trust = own(p).norm() / (own(p.grad).norm() + 1e-6)
                own(p).sub_(own(p.grad), alpha=float(group["lr"] * trust))


class Scaled(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return Trusting(module.parameters(), lr=1e-2), None


ech.train(Scaled(module=model(), layout="fsdp"), loader(), max_epochs=1)
