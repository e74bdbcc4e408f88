"""What the planted scripts share: least squares on fixed rows, a model with repeated blocks, two kinds of unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel  # noqa: F401
from torch.utils.data import DataLoader, TensorDataset  # noqa: F401

import echelon as ech

Batch = tuple[torch.Tensor, torch.Tensor]


class Rows(torch.utils.data.Dataset[Batch]):
    def __init__(self, samples: int = 96) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, 4, generator=generator)
        noise = 0.1 * torch.randn(samples, 1, generator=generator)
        self.y = self.x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Batch:
        return self.x[i], self.y[i]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def model(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), block(), block(), *extra, nn.Linear(8, 1))


class Auto(ech.AutoUnit[Batch]):
    """AutoUnit: echelon makes the module parallel."""

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        return nn.functional.mse_loss(self.module(data[0]), data[1]), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.AdamW(module.parameters(), lr=1e-2), None


class Own(ech.TrainUnit[Batch]):
    """A step of one's own, around a module that the script made parallel by hand, or not at all."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def reduce(self) -> None:
        """What happens to the gradients between backward and step."""

    def train_step(self, state: ech.State, data: Batch) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.module(data[0]), data[1])
        loss.backward()
        self.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Averaging(Own):
    """Data parallelism by hand, done right."""

    def reduce(self) -> None:
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def loader(samples: int = 96, **options: Any) -> ech.Loader:
    return ech.Loader(Rows(samples), 16, **options)


def own_loop(
    net: Any,
    batches: Any,
    loss: Callable[[Any, Any], torch.Tensor] = lambda net, data: F.mse_loss(net(data[0]), data[1]),
    *,
    optimizer: Any = None,
    clip: float | None = None,
    weigh: Callable[[Any], Any] = lambda data: None,
) -> None:
    """A loop of one's own as short as it gets: SGD on the loss of the net and a batch."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, batches = ech.prepare(net, optimizer, batches, layout="ddp")
    for _ in ech.epochs(batches, 1):
        for data in batches:
            with ech.window(net, weight=weigh(data)) as window:
                window.backward(loss(net, data))
                if clip is not None:
                    window.clip_grad_norm_(clip)
                optimizer.step()
                optimizer.zero_grad()


device = ech.init_from_env()
