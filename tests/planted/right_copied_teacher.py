"""A teacher that is copied from the model as the optimizer is made, and follows it after each step."""

from __future__ import annotations

import copy
from typing import Any

from common import Auto, Batch, ech, loader, model, nn, torch


class Taught(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        out, taught = self.module(data[0]), self.teacher(data[0]).detach()
        return nn.functional.mse_loss(out, data[1]) + nn.functional.mse_loss(out, taught), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        self.teacher = copy.deepcopy(module).requires_grad_(False)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

        @torch.no_grad()
        def follow(*_: Any) -> None:
            for slow, fast in zip(self.teacher.parameters(), module.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

        optimizer.register_step_post_hook(follow)
        return optimizer, None


ech.train(Taught(module=model(), layout="ddp"), loader(), max_epochs=3)
