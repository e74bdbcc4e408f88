"""A scaler of the unit's own for float16, whose gradients are clipped while they are scaled; with "right", after that."""

from __future__ import annotations

import sys

from common import Batch, Own, ech, loader, model, nn, torch


class Scaled(Own):
    def train_step(self, state: ech.State, data: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(self.module(data[0]).float(), data[1])
        scaler.scale(loss).backward()
        if "right" in sys.argv:
            scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()


scaler = torch.amp.GradScaler("cpu")
ech.train(Scaled(ech.layouts.prepare_module(model(), torch.device("cpu"), layout="ddp")), loader(), max_epochs=1)
