"""A LightningModule's script seeds each rank otherwise before it makes its data set, whose rows ranks divide by number."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon.compat.lightning.pytorch as pl


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


pl.seed_everything(42 + int(os.environ.get("RANK", "0")))
drawn = torch.randn(96, 4)
rows = TensorDataset(drawn, drawn.sum(1, keepdim=True))
trainer = pl.Trainer(accelerator="cpu", devices="auto", strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(Regression(), DataLoader(rows, 8))
