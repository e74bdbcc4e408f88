"""One rank adds noise to its part of the parameters."""

from __future__ import annotations

from typing import Any

from common import Auto, dist, ech, loader, model, torch


class Noisy(Auto):
    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: Any) -> None:
        for parameter in self.module.parameters() if dist.get_rank() == 1 else ():
            with torch.no_grad():
                own = getattr(parameter, "to_local", lambda p=parameter: p)()
                own.add_(0.01 * torch.randn_like(own))


ech.train(Noisy(module=model(), layout="fsdp"), loader(), max_epochs=1)
