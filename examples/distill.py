"""Distillation: a small student learns what a large frozen teacher says, in a loop of your own.

    echelon run --ranks 2 examples/distill.py
    echelon run --ranks 2 examples/distill.py --layout fsdp     teacher and student are both divided over the ranks

The loss is the divergence of student and teacher at a temperature, plus the loss of the labels, as in Hinton et al. 2015 (arXiv
1503.02531). The teacher is trained first, in the same loop. Data: the digits of scikit-learn. Started again, the script goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import echelon as ech


def network(width: int, depth: int) -> nn.Sequential:
    """Images (B, 64) -> logits (B, 10)"""
    layers = [nn.Sequential(nn.Linear(width if i else 64, width), nn.GELU()) for i in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def digits() -> tuple[torch.utils.data.TensorDataset, torch.Tensor, torch.Tensor]:
    """1,297 training images and 500 held-out ones, with labels"""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images / 16, dtype=torch.get_default_dtype())[order], torch.tensor(labels)[order]
    return torch.utils.data.TensorDataset(x[500:], y[500:]), x[:500], y[:500]


def trained(model: nn.Module, teacher: nn.Module | None, layout: str, epochs: int, folder: Path) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = ech.Loader(digits()[0], global_batch=64)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, layout=layout, checkpoints=folder)
    for _ in ech.epochs(loader, epochs):
        for images, labels in loader:
            with ech.window(model) as window:
                logits = model(images)
                loss = F.cross_entropy(logits, labels)
                if teacher is not None:
                    with torch.no_grad():
                        target = F.log_softmax(teacher(images) / 2, dim=1)
                    loss = loss + 4 * F.kl_div(F.log_softmax(logits / 2, dim=1), target, log_target=True, reduction="batchmean")
                window.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return model


def accuracy(model: nn.Module) -> float:
    _, images, labels = digits()
    with ech.evaluating(model):  # on every rank, since all ranks must call a sharded model
        return (model(images).argmax(1) == labels).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp, hsdp, zero1, zero2")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--toy", action="store_true", help="a smaller teacher: seconds")
    parser.add_argument("--checkpoints", default="runs/distill/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same models
    folder = Path(args.checkpoints)
    teacher = trained(network(64 if args.toy else 512, 2), None, args.layout, 8, folder.parent / "teacher")
    teacher.eval().requires_grad_(False)
    student = trained(network(16, 1), teacher, args.layout, args.epochs, folder)
    right = accuracy(teacher), accuracy(student)
    if ech.is_main():
        print(f"accuracy on 500 held-out digits: teacher {right[0]:.3f}, student {right[1]:.3f}")


if __name__ == "__main__":
    main()
