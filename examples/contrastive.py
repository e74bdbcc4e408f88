"""Contrastive learning with two towers, as in CLIP: each row is compared with the rows of all ranks, with the right gradient.

    echelon run --ranks 2 examples/contrastive.py
    echelon run --ranks 2 examples/contrastive.py --layout fsdp
    python examples/contrastive.py --layout none         one process: the same loss, the same gradient
    echelon prove --float64 --accumulate 1 examples/contrastive.py --toy

Each object has two views, here two random maps of it with noise; the towers learn which two views belong together. Started
again, the script goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech

Pair = tuple[torch.Tensor, torch.Tensor]  # the two views: (B, 32), (B, 24)


class Towers(nn.Module):
    """Two views -> a unit vector of each, and the scale of their products (its logarithm is learned)."""

    def __init__(self, sizes: tuple[int, int] = (32, 24), width: int = 128, out: int = 16) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, out)) for size in sizes)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, *views: torch.Tensor) -> tuple[torch.Tensor, ...]:
        vectors = [F.normalize(tower(view), dim=1) for tower, view in zip(self.towers, views, strict=True)]
        return *vectors, self.log_scale.exp()


class Contrast(ech.AutoUnit[Pair]):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.found = ech.Mean()

    def compute_loss(self, state: ech.State, data: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        one, other, scale = self.module(*data)  # (b, D) each
        mine = ech.gathered_rows(one)  # the indices of this rank's rows among all rows
        to_other = scale * one @ ech.gather(other).T  # (b, rows of all ranks)
        to_one = scale * other @ ech.gather(one).T
        # Rows also get gradients from other ranks' losses: do not divide by the number of ranks, and do not detach.
        loss = (F.cross_entropy(to_other, mine) + F.cross_entropy(to_one, mine)) / 2
        return loss, to_other.argmax(1) == mine

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.0), None

    def on_eval_epoch_start(self, state: ech.State) -> None:
        self.found.reset()

    def on_eval_step_end(self, state: ech.State, data: Pair, step: int, loss: torch.Tensor, outputs: torch.Tensor) -> None:
        self.found.update(outputs.double().mean(), len(outputs))


def views(count: int) -> torch.utils.data.TensorDataset:
    generator, dtype = torch.Generator().manual_seed(0), torch.get_default_dtype()
    things = torch.randn(count, 8, generator=generator)
    seen = []
    for size in (32, 24):
        map_ = torch.randn(8, size, generator=generator) / 2
        seen.append(torch.tanh(things @ map_) + 0.1 * torch.randn(count, size, generator=generator))
    return torch.utils.data.TensorDataset(*(view.to(dtype) for view in seen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp, hsdp, zero1, zero2 or zero3")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--toy", action="store_true", help="fewer things, which are learned in seconds")
    parser.add_argument("--checkpoints", default="runs/contrastive/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same model
    count, batch = (2048, 128) if args.toy else (32768, 256)
    data = views(count + 256)
    # Every rank needs the same number of rows: a short last batch is dropped, and the 256 held-out pairs divide evenly.
    train_loader = ech.Loader(torch.utils.data.Subset(data, range(count)), batch, tail="drop")
    eval_loader = ech.Loader(torch.utils.data.Subset(data, range(count, count + 256)), 256, shuffle=False)
    unit = Contrast(module=Towers(), layout=args.layout)
    ech.train(unit, train_loader, max_epochs=args.epochs, checkpoints=args.checkpoints)

    ech.evaluate(unit, eval_loader)
    found = unit.found.compute()  # every rank calls it
    if ech.is_main():
        print(f"the right one of 256 views is found for {found:.1%} of held-out things (by chance 0.4%)")


if __name__ == "__main__":
    main()
