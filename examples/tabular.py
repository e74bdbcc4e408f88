"""Predict from a table: embedded categories, early stopping by a metric that is exact on any number of ranks.

    echelon run --ranks 2 examples/tabular.py
    python examples/tabular.py --layout none             one process, no launcher
    echelon run --ranks 2 examples/tabular.py --layout fsdp

The area under the ROC curve is no mean over batches: it is computed from the scores of all held-out rows at once. Each row counts
once, though two ranks cannot share the rows evenly. Started again, the script goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import echelon as ech

LEVELS = (12, 40)  # of the two categorical columns
NUMBERS = 6
Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # categories (B, 2), numbers (B, 6), labels (B,)


def make_table(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Insurance claims: whether one is made depends on both categories, on three numbers, and on chance."""
    rng = np.random.default_rng(0)
    categories = np.stack([rng.integers(levels, size=rows) for levels in LEVELS], 1)
    numbers = rng.normal(size=(rows, NUMBERS))
    effects = [rng.normal(size=levels) for levels in LEVELS]
    logits = effects[0][categories[:, 0]] + effects[1][categories[:, 1]] + 1.5 * numbers[:, 0] * numbers[:, 1] - numbers[:, 2]
    return categories, numbers, rng.random(rows) < 1 / (1 + np.exp(-logits))


def dataset(table: tuple[np.ndarray, ...], rows: slice) -> torch.utils.data.TensorDataset:
    categories, numbers, labels = (column[rows] for column in table)
    dtype = torch.get_default_dtype()
    return torch.utils.data.TensorDataset(
        torch.tensor(categories), torch.tensor(numbers, dtype=dtype), torch.tensor(labels, dtype=dtype)
    )


class TableNet(nn.Module):
    """Each category has an embedding; embeddings and numbers go through an MLP. -> logits (B,)"""

    def __init__(self, width: int = 64, embedding: int = 8) -> None:
        super().__init__()
        self.categories = nn.ModuleList(nn.Embedding(levels, embedding) for levels in LEVELS)
        first = nn.Linear(len(LEVELS) * embedding + NUMBERS, width)
        self.mlp = nn.Sequential(first, nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        vectors = [table(categories[:, i]) for i, table in enumerate(self.categories)]
        return self.mlp(torch.cat([*vectors, numbers], 1)).squeeze(1)


class Claims(ech.AutoUnit[Row]):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.auc = float("nan")

    def compute_loss(self, state: ech.State, data: Row) -> tuple[torch.Tensor, torch.Tensor]:
        categories, numbers, labels = data
        logits = self.module(categories, numbers)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels), logits

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=1e-2), None

    def on_eval_step_end(self, state: ech.State, data: Row, step: int, loss: torch.Tensor, outputs: torch.Tensor) -> None:
        self.seen.append((outputs, data[2]))  # padding does not come here

    def on_eval_epoch_end(self, state: ech.State) -> None:
        scores, labels = (torch.cat(parts) for parts in zip(*self.seen, strict=True))
        self.auc = float(roc_auc_score(ech.gather(labels).cpu(), ech.gather(scores).cpu()))
        self.seen.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp, hsdp, zero1 or zero2")
    parser.add_argument("--epochs", type=int, default=30, help="at most")
    parser.add_argument("--toy", action="store_true", help="a table that is learned in seconds")
    parser.add_argument("--checkpoints", default="runs/tabular/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same model
    rows, held_out = (4096, 1001) if args.toy else (65536, 8191)
    table = make_table(rows + held_out)
    train_loader = ech.Loader(dataset(table, slice(rows)), global_batch=256)
    eval_loader = ech.Loader(dataset(table, slice(rows, None)), global_batch=512, shuffle=False)
    unit = Claims(module=TableNet(), layout=args.layout)

    checkpoints = ech.Checkpoints(args.checkpoints, keep=1, best="auc")  # after each evaluation; the best one stays, too
    stopping = ech.EarlyStopping("auc", mode="max", patience=3, min_delta=1e-3)
    ech.train(unit, train_loader, max_epochs=args.epochs, eval=eval_loader, checkpoints=checkpoints, callbacks=[stopping])

    epochs = unit.train_progress.num_epochs_completed
    ech.DistributedCheckpointSaver.restore_from_best(args.checkpoints, unit, "auc", "max")
    ech.evaluate(unit, eval_loader)
    if ech.is_main():
        print(f"AUC {unit.auc:.4f} over {held_out} held-out rows, the best of {epochs} epochs")


if __name__ == "__main__":
    main()
