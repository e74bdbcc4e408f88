"""Small models, data and units that the tests share, and the reference: plain PyTorch that imports nothing of echelon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Two repeated blocks between an input and an output layer, so that block-wise sharding has something to find."""

    tp_plan: ClassVar[dict[str, str]] = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Dropout(dropout)) for _ in range(2)
        )
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 4) -> (B, 1)
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def net(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options).to(dtype)


def seeded(make: Callable[..., nn.Module], seed: int = 0, **options: Any) -> Any:
    """A module in float64 with the numbers of a seed."""
    torch.manual_seed(seed)
    return make(**options).double()


def batch(rows: int, seed: int, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator, dtype=dtype), torch.randn(rows, 1, generator=generator, dtype=dtype)


def plain_training(
    windows: Sequence[Sequence[Batch]],
    *,
    clip: float | None = None,
    clip_value: float | None = None,
    optimizer: str | Callable[[Any], torch.optim.Optimizer] = "SGD",
    lr: float = 0.1,
    module: nn.Module | None = None,
    loss_of: Callable[..., torch.Tensor] = lambda module, x, y: nn.functional.mse_loss(module(x), y),
    after: Callable[[Any, int], object] = lambda module, updates: None,
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """One process: each window is one optimizer update on the mean over all its rows.

    Args:
        optimizer: its name, or what makes it of the parameters; the name's `lr`.
        after: called behind each update, with their number.
    Returns:
        parameters by name, losses and gradient norms (before clipping) by update.
    """
    module = net() if module is None else module
    if callable(optimizer):
        opt = optimizer(module.parameters())
    else:
        kind = getattr(torch.optim, optimizer)
        opt = kind(module.parameters(), lr=lr, **({"momentum": 0.9} if optimizer == "SGD" else {}))
    losses, norms = [], []
    for window in windows:
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        loss = loss_of(module, x, y)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), clip if clip is not None else float("inf"))))
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(module.parameters(), clip_value)
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
        after(module, len(losses))
    return {n: p.detach().clone() for n, p in module.named_parameters()}, losses, norms


def whole(module: Any) -> dict[str, torch.Tensor]:
    """The parameters of a module, or of a Prepared, gathered, under the names that its author gave them. Collective."""
    return {
        n.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for n, p in module.named_parameters()
    }


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys(), f"different parameters: {sorted(a.keys() ^ b.keys())}"
    return max(float((a[k] - b[k]).abs().max()) for k in a if a[k].numel())


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return bool(a == b)
