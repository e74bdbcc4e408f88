"""Dropout, clipping, a schedule, an epoch whose last batch is short: all as it should be."""

from __future__ import annotations

from common import Auto, ech, loader, model, nn, torch


class Scheduled(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        optimizer, _ = super().configure_optimizers_and_lr_scheduler(module)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


unit = Scheduled(module=model(nn.Dropout(0.2)), layout="fsdp", clip_grad_norm=0.5, step_lr_interval="step")
ech.train(unit, loader(42), max_epochs=3)
