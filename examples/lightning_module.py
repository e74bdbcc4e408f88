"""A LightningModule and its callbacks as they are: the import line is the only one that changed.

    echelon run --ranks 2 examples/lightning_module.py
    python examples/lightning_module.py --devices 2             starts its ranks by itself, as in Lightning

Data: the digits of scikit-learn. Started again, the script goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon.compat.lightning.pytorch as pl  # was: import lightning.pytorch as pl


class Digits(pl.LightningModule):
    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        right = (self(images).argmax(1) == labels).float().mean()
        self.log("val_accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def digits() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images / 16, dtype=torch.get_default_dtype())[order], torch.tensor(labels)[order]
    return TensorDataset(x[512:], y[512:]), TensorDataset(x[:512], y[:512])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="auto", help="how many ranks to start, where none were launched")
    parser.add_argument("--layout", default="ddp", help="ddp, fsdp, ...: the Trainer's strategy")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--toy", action="store_true", help="is small as it is")
    parser.add_argument("--checkpoints", default="runs/lightning_module/checkpoints")
    args = parser.parse_args()

    pl.seed_everything(0)
    train_data, held_out = digits()
    best = pl.callbacks.ModelCheckpoint(dirpath=args.checkpoints, monitor="val_accuracy", mode="max", save_last=True)
    trainer = pl.Trainer(
        accelerator="auto",
        devices=int(args.devices) if args.devices != "auto" else "auto",
        strategy=args.layout,
        max_epochs=args.epochs,
        callbacks=[best, pl.callbacks.EarlyStopping("val_accuracy", mode="max", patience=4)],
        gradient_clip_val=1.0,
    )
    # The batch size is that of each rank, as in Lightning; the Trainer gives each rank different samples.
    trainer.fit(Digits(), DataLoader(train_data, 32, shuffle=True), DataLoader(held_out, 64), ckpt_path="last")
    if trainer.is_global_zero:
        print(f"validation accuracy {float(best.best_model_score):.3f}, the best of {trainer.current_epoch} epochs")


if __name__ == "__main__":
    main()
