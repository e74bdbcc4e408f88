"""Compiled, in bf16, with AdamW; the loss has a number that the script draws, which is to be the same one in float64."""

from __future__ import annotations

from typing import Any

from common import Auto, Batch, ech, loader, nn, torch


class Adam(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        return nn.functional.mse_loss(self.module(data[0]).float(), data[1] * scale), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.98)), None


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
scale = torch.randn(20)[-1]
ech.train(Adam(module=net, layout="ddp", precision="bf16", compile=True, clip_grad_norm=1.0), loader(), max_epochs=2)
