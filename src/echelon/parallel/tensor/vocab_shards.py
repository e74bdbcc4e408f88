"""A weight with a row for each word, whichever way it is split over ranks: by words, which stays so, or as `fully_shard` splits.

A DTensor does not say why it is split. One that `fully_shard` made is gathered for the time of a forward and backward pass, by
its module; one that tensor parallelism made stays where it is, and every rank works on its words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import TensorParallelError
from echelon.parallel.shards import is_fully_sharded, is_split

__all__ = ["WordShard", "liger", "split_words", "unit_of"]

Operands = tuple["WordShard", torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class WordShard:
    """Which words this rank has.

    Args:
        words: of all ranks.
        first: the first of this rank's.
        group: the ranks that have the others.
        size: their number, with this one; 1 if it has all words.
    """

    words: int
    first: int = 0
    group: dist.ProcessGroup | None = None
    size: int = 1


def liger(rows: torch.Tensor, shard: WordShard) -> Callable[..., torch.Tensor]:
    """Liger's function for the same loss.

    Raises:
        UsageError: it is not installed, or cannot work on these rows.
    """
    if shard.size > 1 or rows.device.type != "cuda":
        where = f"a {rows.device.type}" if shard.size == 1 else f"words that are split over {shard.size} ranks"
        raise TensorParallelError(f"kernel must be 'torch' for {where}, got 'liger'. Leave it out.")
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise TensorParallelError(
            f"kernel='liger' needs liger-kernel, which cannot be imported ({error}). Install it, or leave out kernel."
        ) from error
    function: Callable[..., torch.Tensor] = liger_fused_linear_cross_entropy
    return function


@contextmanager
def split_words(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[Operands]:
    """The operands of a loss as plain tensors, weight and bias with the rows of this rank's words. Collective."""
    unit = unit_of(weight) if is_split(weight) else None
    if unit is not None and torch.is_grad_enabled() and not hidden.requires_grad:
        # A frozen body: no gradient reaches the hooks by which `fully_shard` reduces those of a unit.
        weight, bias, unit = _averaged(weight), _averaged(bias), None
    try:
        if unit is not None:
            names = {id(p): n for n, p in unit.named_parameters()}
            unit.unshard()  # type: ignore[operator]
            weight, bias = _now(unit, names, weight), _now(unit, names, bias)
        shard, weight, bias = _words_of(weight, bias)
        yield shard, _whole(hidden), weight, _whole(target), bias
    finally:
        if unit is not None and not torch.is_grad_enabled():  # with gradients, the backward pass does it
            unit.reshard()  # type: ignore[operator]


def _words_of(weight: torch.Tensor, bias: Any) -> tuple[WordShard, torch.Tensor, torch.Tensor | None]:
    words = len(weight)
    if not is_split(weight):
        return WordShard(words), weight, _whole(bias)
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = weight.device_mesh, list(weight.placements)  # type: ignore[attr-defined]
    axes = [i for i, placement in enumerate(placements) if placement == Shard(0) and mesh.size(i) > 1]
    if len(axes) > 1:
        raise TensorParallelError(f"weight must be split over one axis of ranks at most, got {placements} over {mesh}.")
    kept = [Shard(0) if i in axes else Replicate() for i in range(mesh.ndim)]
    # Every rank computes the whole gradient of its words: nothing is left to be summed.
    weight = weight.redistribute(placements=kept).to_local(grad_placements=kept)  # type: ignore[attr-defined]
    if not axes:
        return WordShard(words), weight, _whole(bias)
    group, rank, size = mesh.get_group(axes[0]), mesh.get_local_rank(axes[0]), mesh.size(axes[0])
    first = min(words, rank * -(-words // size))  # as torch.chunk divides
    if bias is not None:
        if is_split(bias):
            bias = bias.redistribute(placements=kept).to_local(grad_placements=kept)
        else:
            bias = _SameOnAll.apply(bias, group)[first : first + len(weight)]  # type: ignore[no-untyped-call]
    return WordShard(words, first, group, size), weight, bias


def _whole(tensor: Any) -> Any:
    if tensor is None or not is_split(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    whole = [Replicate()] * tensor.device_mesh.ndim
    return tensor.redistribute(placements=whole).to_local(grad_placements=whole)


class _SameOnAll(torch.autograd.Function):
    """A tensor that is whole on all ranks of a group, each of which uses a part: gradients are those of all parts."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


# --- what `fully_shard` has split


def _averaged(parameter: Any) -> Any:
    """A shard gathered by itself: gradients are averaged over the ranks as `fully_shard` does, in each backward pass."""
    if parameter is None or not is_split(parameter):
        return parameter
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh, placements = parameter.device_mesh, parameter.placements
    if any(placement not in (Shard(0), Replicate()) for placement in placements):
        raise TensorParallelError(
            f"hidden has no gradient, and the weight is split over {mesh.mesh_dim_names} in a way that only fully_shard reduces, "
            f"{placements}. Train a layer before it, too."
        )
    whole = parameter.redistribute(placements=[Replicate()] * mesh.ndim)
    return whole.to_local(grad_placements=[Partial("avg")] * mesh.ndim)


def _now(unit: nn.Module, names: dict[int, str], parameter: Any) -> Any:
    """What has taken the place of a sharded parameter."""
    name = names.get(id(parameter))
    return parameter if name is None else unit.get_parameter(name)


def unit_of(parameter: torch.Tensor) -> nn.Module | None:
    """The innermost module given to `fully_shard` with this parameter among its shards; None if it is no such shard.

    torch has no public way from a parameter to its module, nor a list of sharded modules. `_module_state_mapping` has them as
    its keys (torch 2.11 to 2.13; tests/parallel/test_linear_cross_entropy.py notices a change).
    """
    from torch.distributed._composable_state import _module_state_mapping

    found = [m for m in list(_module_state_mapping) if is_fully_sharded(m) and any(p is parameter for p in m.parameters())]
    return min(found, key=lambda module: sum(1 for _ in module.modules()), default=None)
