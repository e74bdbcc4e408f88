"""A unit: its kind, its parameters and buffers by their author's names, whole and on the host; its loss as a number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from echelon.loop.auto.auto import AutoUnit
from echelon.loop.auto.optimized_unit import OptimizedUnit
from echelon.loop.own.loop_unit import LoopUnit
from echelon.parallel import shards
from echelon.parallel.experts.loads import Routers
from echelon.parallel.names import plain_buffers
from echelon.parallel.prepared import Prepared
from echelon.world.init import rank_info

__all__ = [
    "UnitKind",
    "Values",
    "as_real",
    "balance",
    "forget_loads",
    "is_replica",
    "loss_in",
    "modules_of",
    "named_values",
    "near",
    "near_values",
    "number_in",
    "owners_of",
    "parameters_of",
    "prepared_of",
    "switch_off_dropout",
    "whole",
    "whole_parameters",
    "wholes",
    "widen",
]

Values = dict[str, torch.Tensor]
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class UnitKind(StrEnum):
    LOSS = "a loss"
    LOSSES = "losses of several optimizers"  # of one unit, which the loop takes in turn
    STEP = "a step of the user's own"
    LOOP = "a loop of the user's own"
    LOOP_OF_SEVERAL = "a loop of the user's own with several optimizers"

    @classmethod
    def of(cls, unit: Any) -> Self:
        if isinstance(unit, LoopUnit):
            return cls(cls.LOOP_OF_SEVERAL if unit.has_several else cls.LOOP)
        if isinstance(unit, AutoUnit):
            return cls(cls.LOSSES if unit.has_several else cls.LOSS)
        return cls(cls.STEP)

    @property
    def is_loop(self) -> bool:
        return self in (UnitKind.LOOP, UnitKind.LOOP_OF_SEVERAL)

    @property
    def is_of_several(self) -> bool:
        """Whether a loss can come after another optimizer's step."""
        return self in (UnitKind.LOSSES, UnitKind.LOOP_OF_SEVERAL)

    @property
    def draws_by_itself(self) -> bool:
        """Whether the user's code decides what dropout draws, so that nobody can repeat it."""
        return self.is_loop or self is UnitKind.STEP

    @property
    def updates_are_ours(self) -> bool:
        """Whether echelon's Update takes its loss to the optimizer's step: of all but a step of the user's own."""
        return self is not UnitKind.STEP


def prepared_of(unit: Any) -> list[tuple[str, Prepared[Any]]]:
    """The unit's modules: the prefix of each one's parameter names, and its Prepared."""
    if isinstance(unit, OptimizedUnit):
        return [("", unit.prepared)]
    modules = unit.prepared_modules()
    return [(f"{name}." if len(modules) > 1 else "", prepared) for name, prepared in modules.items()]


def is_replica(unit: Any) -> bool:
    """Whether other ranks record the samples of this one, in all modules that are parallel. Collective."""
    if isinstance(unit, OptimizedUnit):
        return bool(unit.prepared.data.is_replica)
    parallel = [prepared for _, prepared in prepared_of(unit) if prepared.data.rank_and_size is not None]
    for prepared in parallel:  # the loop finds them for an AutoUnit only
        prepared.data.find_replicas()
    return bool(parallel) and all(prepared.data.is_replica for prepared in parallel)


def modules_of(unit: Any) -> list[tuple[str, nn.Module]]:
    """As `prepared_of`, with the modules as their author wrote them."""
    return [(prefix, prepared.unwrapped) for prefix, prepared in prepared_of(unit)]


def forget_loads(unit: Any) -> None:
    """Call it before an update, so that passes tried before do not count in the experts' loads."""
    for _, module in modules_of(unit):
        Routers(module, []).discard()


def balance(unit: Any) -> None:
    """Call it after an update of one process: it tells layers of experts, as the loop does elsewhere."""
    for _, module in modules_of(unit):
        Routers(module, []).end_window(updated=True)


def parameters_of(unit: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The unit's parameters under the names that their author gave them."""
    for prefix, prepared in prepared_of(unit):
        for name, parameter in prepared.named_parameters():
            yield prefix + name, parameter


def whole_parameters(unit: Any) -> dict[str, torch.Tensor]:
    """All parameters, gathered, on the host. Collective if anything is sharded."""
    with contextlib.ExitStack() as gathered:
        for _, prepared in prepared_of(unit):
            gathered.enter_context(prepared.gathered())
        return wholes(dict(parameters_of(unit)))


def owners_of(unit: Any) -> dict[str, torch.Tensor]:
    """For each sharded parameter, the rank of each element. Collective."""
    rank = float(rank_info().rank)
    split = {n: p.detach() for n, p in parameters_of(unit) if shards.is_split(p)}
    marked = wholes({n: torch.full_like(p, rank, dtype=torch.float32) for n, p in split.items()})
    return {n: each.to(torch.int32) for n, each in marked.items()}


def named_values(unit: Any) -> dict[str, torch.Tensor]:
    """Buffers by name."""
    return {prefix + name: b for prefix, prepared in prepared_of(unit) for name, b in plain_buffers(prepared.module)}


def switch_off_dropout(unit: Any) -> int:
    """Switch off dropout in all modules of the unit: another process cannot repeat its draws. Returns how many there were."""
    count = 0
    for _, module in modules_of(unit):
        for inner in module.modules():
            if isinstance(inner, _DROPOUTS) and inner.p > 0:
                inner.p, count = 0.0, count + 1
    return count


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, gathered if it is sharded: collective then."""
    copy = shards.whole(tensor).detach().cpu().clone()
    return copy.to_dense() if copy.is_sparse else copy


def wholes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `whole`, for many tensors: those sharded alike share one all-gather."""
    alike: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        if (axis := _split_once(tensor)) is not None:
            alike.setdefault((tensor.device_mesh, axis, tensor.dtype), []).append(name)  # type: ignore[attr-defined]
    gathered: dict[str, torch.Tensor] = {}
    for (mesh, axis, _), names in alike.items():
        gathered.update(zip(names, _gathered([tensors[n] for n in names], mesh, axis), strict=True))
    return {n: gathered[n] if n in gathered else whole(each) for n, each in tensors.items()}


def _split_once(tensor: Any) -> int | None:
    """The only axis of its mesh over which a tensor is sharded, as `torch.chunk` cuts; None if it is sharded otherwise."""
    if not shards.is_split(tensor) or tensor.device.type != tensor.device_mesh.device_type:
        return None
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(axes) != 1 or type(tensor.placements[axes[0]]).__name__ != "Shard":
        return None
    return axes[0] if type(shards.local(tensor.detach())) is torch.Tensor else None


def _gathered(tensors: Sequence[Any], mesh: Any, axis: int) -> list[torch.Tensor]:
    size, dims = mesh.size(axis), [tensor.placements[axis].dim for tensor in tensors]
    pieces = []  # of each tensor, the shapes on all ranks
    for tensor, dim in zip(tensors, dims, strict=True):
        cut = [each.shape for each in torch.empty(tensor.shape, device="meta").chunk(size, dim)]
        nothing = torch.Size(0 if d == dim % tensor.dim() else n for d, n in enumerate(tensor.shape))
        pieces.append(cut + [nothing] * (size - len(cut)))
    lengths = [sum(shape.numel() for shape in shapes) for shapes in zip(*pieces, strict=True)]
    shard = torch.cat([shards.local(tensor.detach()).reshape(-1) for tensor in tensors])
    sent = torch.cat([shard, shard.new_zeros(max(lengths) - len(shard))])
    received = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(received, sent, group=mesh.get_group(axis))
    parts = []
    for flat, shapes in zip(received, zip(*pieces, strict=True), strict=True):
        ends = flat.cpu()[: sum(shape.numel() for shape in shapes)].split([shape.numel() for shape in shapes])
        parts.append([each.view(shape) for each, shape in zip(ends, shapes, strict=True)])
    return [torch.cat(of_ranks, dim) for of_ranks, dim in zip(zip(*parts, strict=True), dims, strict=True)]


def loss_in(result: Any) -> Any:
    """The loss in what a train_step returned: the scalar itself, the first of a tuple, or under the key "loss"."""
    if isinstance(result, dict):
        return result.get("loss")
    if isinstance(result, (tuple, list)) and result:
        return result[0]
    return result


def number_in(loss: Any) -> float | None:
    """A loss as a number; None if it is not one."""
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 else None
    return float(loss) if isinstance(loss, (int, float)) else None


def widen(module: nn.Module) -> None:
    """Convert a module to float64 in place; and complex tensors to complex128, which `double` leaves as they are."""
    module.double()
    for parameter in module.parameters():
        if parameter.is_complex():
            parameter.data = parameter.data.to(torch.complex128)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_complex():
                setattr(part, name, buffer.to(torch.complex128))


def near(one: torch.Tensor, other: torch.Tensor, relative: float) -> bool:
    """Whether no element differs by more than `relative` times the largest one; nan equals nan."""
    one, other = one.double(), other.double()
    largest = float(other.nan_to_num(0.0, 0.0, 0.0).abs().max()) if other.numel() else 0.0
    return one.shape == other.shape and torch.allclose(one, other, relative, relative * largest, True)


def near_values(one: Any, other: Any) -> bool:
    """Whether numbers, or tensors of one shape, agree to a thousandth; True for all other values."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape != other.shape or near(one, other, 1e-3)
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return not numbers or abs(one - other) <= 1e-3 * abs(other)


def as_real(tensors: dict[str, Any]) -> dict[str, Any]:
    """Complex tensors as real ones of their two parts; others as they are."""
    return {n: torch.view_as_real(t) if isinstance(t, torch.Tensor) and t.is_complex() else t for n, t in tensors.items()}
