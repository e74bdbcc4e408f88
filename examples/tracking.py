"""Numbers of your own: in Weights & Biases or MLflow, watched for an early end, and the best checkpoint kept by one of them.

    echelon run --ranks 2 examples/tracking.py                      in the run's metrics.jsonl, report and `echelon top`
    echelon run --ranks 2 --track wandb examples/tracking.py        also there; or mlflow, trackio, tensorboard, csv

What `state.log` is given is a mean over all samples of all ranks. Data: the digits of scikit-learn. Started again, the script
goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import echelon as ech

Batch = tuple[torch.Tensor, torch.Tensor]  # images (B, 1, 8, 8), labels (B,)


class Classify(ech.AutoUnit[Batch]):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = data
        logits = self.module(images)
        state.log("accuracy", (logits.argmax(1) == labels).double().mean())  # in evaluations "eval_accuracy"
        return F.cross_entropy(logits, labels), logits

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400, eta_min=1e-4)


def digits() -> tuple[torch.utils.data.TensorDataset, torch.utils.data.TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images / 16, dtype=torch.get_default_dtype())[order].view(-1, 1, 8, 8)
    y = torch.tensor(labels)[order]
    return torch.utils.data.TensorDataset(x[512:], y[512:]), torch.utils.data.TensorDataset(x[:512], y[:512])


def network(width: int) -> nn.Sequential:
    first = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GELU(), nn.MaxPool2d(2))
    return nn.Sequential(first, nn.Conv2d(width, 2 * width, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * width, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp, hsdp, zero1, zero2")
    parser.add_argument("--epochs", type=int, default=20, help="at most")
    parser.add_argument("--toy", action="store_true", help="a narrow network: seconds")
    parser.add_argument("--checkpoints", default="runs/tracking/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same model
    train_data, held_out = digits()
    unit = Classify(module=network(8 if args.toy else 32), layout=args.layout, clip_grad_norm=1.0)
    ech.train(
        unit,
        ech.Loader(train_data, global_batch=64),
        max_epochs=args.epochs,
        eval=ech.Loader(held_out, global_batch=256, shuffle=False),
        checkpoints=ech.Checkpoints(args.checkpoints, best=("eval_accuracy", "max")),
        callbacks=[ech.EarlyStopping("eval_accuracy", mode="max", patience=5, phase="eval")],
    )
    if ech.is_main():
        print(f"held-out loss {unit.eval_loss:.3f} after {unit.train_progress.num_epochs_completed} epochs")


if __name__ == "__main__":
    main()
