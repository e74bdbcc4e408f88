"""The unit that the parts train, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench.gpu.llama import SIZES, Llama, Size
from torch import nn

import echelon as ech

__all__ = ["Batches", "Fit", "adamw", "settle", "tiny"]

Batch = tuple[torch.Tensor, torch.Tensor]


class Fit(ech.AutoUnit[Batch]):
    """Next-token prediction with AdamW."""

    weight_unit = "tokens"

    def __init__(self, *, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(**options)
        self.lr = lr

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        return self.module(*data), None

    def weight(self, data: Batch) -> int:
        return data[1].numel()

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return adamw(module, self.lr), None


def adamw(module: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Fused AdamW, as is usual on a GPU."""
    return torch.optim.AdamW(module.parameters(), lr=lr, fused=True)


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32) -> Llama:
    torch.manual_seed(seed)
    return Llama(SIZES["tiny"]).to(dtype)


class Batches:
    """`count` batches of random tokens, in pinned memory if there is a GPU.

    Args:
        before: called with a batch's number before the batch is given out, after the previous step.
    """

    def __init__(self, size: Size, rows: int, count: int, *, pinned: bool, before: Callable[[int], None] | None = None) -> None:
        self._count, self._before = count, before
        generator = torch.Generator().manual_seed(0)
        shape = (rows, size.context + 1)
        drawn = [torch.randint(0, size.vocabulary, shape, generator=generator) for _ in range(min(4, count))]
        # Contiguous, since torch would make a pageable copy of a view.
        kept = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in drawn]
        self._kept = [(one.pin_memory(), other.pin_memory()) for one, other in kept] if pinned else kept

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        for i in range(self._count):
            if self._before is not None:
                self._before(i)
            yield self._kept[i % len(self._kept)]


def settle(device: torch.device) -> None:
    """Wait until the device has done all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
