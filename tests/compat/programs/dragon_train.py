"""Train with a Loader in a CollectiveGroup, on Dragon's runtime or on ranks of this machine: docs/dragon.md."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import echelon as ech


class Line(ech.AutoUnit):
    """Fits a plane to noisy points."""

    def compute_loss(self, state: ech.State, data: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = data
        out = self.module(x)
        return nn.functional.mse_loss(out, y), out

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), None


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 4, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(512, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]], dtype=torch.float64) + noise)


def train(epochs: int) -> dict[str, list[float]]:
    """What every rank does. Returns the trained parameters."""
    ech.init_from_env()
    info = ech.RankInfo()
    torch.manual_seed(0)
    unit = Line(module=nn.Linear(4, 1, dtype=torch.float64), layout="ddp" if info.world_size > 1 else None)
    ech.train(unit, ech.Loader(points(), global_batch=64), max_epochs=epochs)
    print(f"rank {info.my_rank} of {info.world_size} has trained {unit.train_progress.num_steps_completed} steps", flush=True)
    return {name.removeprefix("module."): p.flatten().tolist() for name, p in unit.module.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    group = ech.launching.CollectiveGroup(
        train, (arguments.epochs,), policies=ech.launching.System().cpu_policies(arguments.ranks)
    )
    group.init()
    group.start()
    try:
        group.join()
    finally:
        group.close()
    assert group.values is not None
    print(f"trained: {group.values[0]}")


if __name__ == "__main__":
    main()
