"""A teacher that learns after each update, a weight of the loss that grows with the calls, lists that only collect, and noise."""

from __future__ import annotations

import copy
from typing import Any

from common import Auto, Batch, ech, loader, model, nn, torch


class Taught(Auto):
    def __init__(self) -> None:
        module = model(nn.Dropout(0.1))
        super().__init__(module=module, layout="ddp")
        self.teacher = copy.deepcopy(module).requires_grad_(False).eval()
        self.calls, self.losses = 0, []  # type: ignore[var-annotated]

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        self.calls += 1
        out = self.module(data[0] + 0.1 * torch.randn_like(data[0]))
        taught = nn.functional.mse_loss(out, self.teacher(data[0]))
        loss = nn.functional.mse_loss(out, data[1]) + min(1.0, self.calls / 10) * taught
        self.losses.append(loss.item())
        return loss, None

    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: Any) -> None:
        with torch.no_grad():
            for mean, parameter in zip(self.teacher.parameters(), self.module.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)


ech.train(Taught(), loader(), max_epochs=1)
