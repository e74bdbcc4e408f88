"""Collectives for training scripts: `gather`, `gathered_rows`, `all_mean`.

They run over the ranks that have different samples: ranks that share samples, as with tensor parallelism, count once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from echelon.common.errors import UsageError
from echelon.world import agree

__all__ = ["all_mean", "gather", "gathered_rows", "heard", "knows_its_data", "summed", "without_samples"]

N = TypeVar("N", float, torch.Tensor)

# The `Prepared` of parallel modules that still exist, the latest last: they know which ranks have different samples.
_prepared: list[weakref.ref[Any]] = []
# Called before each of these collectives: `prove` must know that a script's steps communicate with other ranks.
_listeners: list[Callable[[], None]] = []
# Not empty during a padding pass on a rank without samples: no other rank may see its rows.
_standing_in: list[bool] = []


def knows_its_data(prepared: Any) -> None:
    """Have this parallel module's axes decide over which ranks to gather, until another module is made parallel."""
    _prepared[:] = [*(kept for kept in _prepared if kept() is not None), weakref.ref(prepared)]


@contextlib.contextmanager
def without_samples() -> Iterator[None]:
    """Context of a padding pass on a rank without samples: `gather` takes no rows from it."""
    _standing_in.append(True)
    try:
        yield
    finally:
        _standing_in.pop()


@contextlib.contextmanager
def heard(listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener` whenever the script gathers or averages over ranks."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def gather(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The rows of all ranks, in rank order; the tensor itself if there is one rank. Every rank calls it.

    Gradients flow back to the ranks that the rows came from, summed over the losses of all ranks. So a mean over this rank's
    rows, each compared with all rows, trains as one process does on the whole batch. So does the same loss of all rows on every
    rank. Divide or detach nothing.

    Args:
        tensor: ranks may have different numbers of rows, also none. A rank that has only padding gives none.
        dim: the dimension along which rows are concatenated.
    Raises:
        UsageError: on all ranks: dtypes differ, or sizes other than along `dim`; a loss of gathered rows in bit-equal training.
    """
    for listener in _listeners:
        listener()
    if tensor.requires_grad and (parallel := _parallel()) is not None and parallel._order_is_fixed:
        raise UsageError(
            "gather must not be called for a loss in bit-equal training: it joins one part of the global batch of each rank, so "
            "the rows that a sample is compared with depend on the number of ranks. Leave out the bit-equal mode."
        )
    groups = _groups()
    if _standing_in and groups:
        tensor = tensor.narrow(dim, 0, 0)
    for group in reversed(groups):
        tensor = _Gathered.apply(tensor, dim, _rows(tensor, dim, group), group)  # type: ignore[no-untyped-call]
    return tensor


def gathered_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The indices of this rank's rows in `gather(tensor)`, int64. Every rank calls it."""
    groups = _groups()
    start, count = 0, 0 if _standing_in and groups else len(tensor)
    for group in reversed(groups):
        sizes = agree.gather(count, group)
        start, count = start + sum(sizes[: dist.get_rank(group)]), sum(sizes)
    rows = start + torch.arange(len(tensor), device=tensor.device)
    return rows.clamp(max=max(count - 1, 0)) if _standing_in else rows


def all_mean(value: N, weight: float = 1.0) -> N:
    """The weighted mean over all ranks of a number, or of tensors of one shape, with gradients. Every rank calls it.

    For means that a step needs at once; `ech.Mean` sums over many steps and communicates once. Pass `weight=len(batch)` if
    ranks have different numbers of samples.
    """
    for listener in _listeners:
        listener()
    groups = _groups()
    if not groups:
        return value
    kept = torch.as_tensor(value) if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
    counts = 0.0 if _standing_in else weight
    total: torch.Tensor = torch.cat([(kept * counts).reshape(-1), kept.new_tensor([counts])])
    for group in groups:
        total = summed(total, group)
    mean = (total[:-1] / total[-1]).reshape(kept.shape)
    return mean if isinstance(value, torch.Tensor) else mean.item()


def summed(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Differentiable sum over the ranks of a group. torch's own differentiable all-reduce is being retired."""
    return _Sum.apply(tensor, group)  # type: ignore[no-untyped-call,no-any-return]


def _parallel() -> Any:
    """The latest `Prepared` that knows which ranks have different samples, or None."""
    alive = [prepared for kept in reversed(_prepared) if (prepared := kept()) is not None]
    return next((prepared for prepared in alive if prepared.data.rank_and_size is not None), None)


def _groups() -> list[dist.ProcessGroup | None]:
    """Groups of the axes whose ranks have different samples, outermost first; empty for a single process."""
    if not agree.is_joined():
        return []
    parallel = _parallel()
    if parallel is None or parallel.data.rank_and_size[1] == dist.get_world_size():
        return [None]
    return list(parallel.data.groups)


def _rows(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> list[int]:
    """How many rows each rank of the group has, after a check that tensors agree in all else."""
    facts = agree.gather([list(tensor.shape), dim + tensor.dim() if dim < 0 else dim, str(tensor.dtype)], group)
    kinds = [[dim, dtype, shape[:dim], shape[dim + 1 :]] for shape, dim, dtype in facts]
    if any(each != kinds[0] for each in kinds) or not 0 <= facts[0][1] < len(facts[0][0]):
        shown = ", ".join(f"rank {i}: {dtype} of {shape}, dim={dim}" for i, (shape, dim, dtype) in enumerate(facts))
        raise UsageError(f"gather: tensors must have one type, and one shape but for dimension dim, on all ranks, got {shown}.")
    return [shape[dim] for shape, dim, _ in facts]


class _Gathered(torch.autograd.Function):
    """All ranks' rows. The backward pass sums over ranks the gradients of each rank's loss with respect to this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, sizes: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        rows = tensor.transpose(0, dim).contiguous()
        most = max(sizes)
        if rows.shape[0] < most:  # gloo and NCCL want equal sizes
            rows = torch.cat([rows, rows.new_zeros(most - rows.shape[0], *rows.shape[1:])])
        parts = [torch.empty_like(rows) for _ in sizes]
        dist.all_gather(parts, rows, group=group)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.transpose(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rank = dist.get_rank(ctx.group)
        total = summed(gradients[0], ctx.group)  # differentiable again, for gradient penalties
        return total.narrow(ctx.dim, sum(ctx.sizes[:rank]), ctx.sizes[rank]), None, None, None


class _Sum(torch.autograd.Function):
    """Sum over ranks, on every rank. Gradients are summed likewise, since each rank's loss depends on every rank's values."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group, total = group, tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(gradients[0], ctx.group), None
