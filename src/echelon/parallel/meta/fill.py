"""The values of tensors without any, computed and put in place: each large one on one rank, or on the device; or left for later.

Computing a value takes as long as in a plain build. So large ones are divided over the ranks: each computes every so many-th and
sends it to the others, which keep their parts of it. What `on_meta(on_device=True)` recorded each rank computes on its device.

Of a model that is about to be restored (`on_meta(restores=True)`) nothing is computed. Its tensors are marked by a nan that no
arithmetic gives, all bits set. What still has the mark when a restore has ended, when training begins, or in the first forward
pass, is computed then: a checkpoint that is not there, fails or lacks a tensor leaves nothing without a value.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.common.errors import LayoutError, UsageError
from echelon.parallel.meta.tape import Tape, Value
from echelon.parallel.shards import local
from echelon.world import agree

__all__ = ["Origin", "check_left", "fill", "fill_in", "fill_rest", "leave", "waits"]

logger = logging.getLogger(__name__)

# Smaller values are computed by every rank: sending one takes as long.
SENT_BYTES = 1 << 20


@dataclass
class Origin:
    """A tensor without values, under all the names that it has."""

    names: list[str]
    value: Value
    holder: nn.Module | None = None  # of a tensor that is a plain attribute, or lies within one

    def computed(self, device: torch.device | None = None) -> torch.Tensor:
        """
        Raises:
            UsageError: nothing gives a value to a part of it.
        """
        value = self.value.compute(device)
        if self.value.may_be_unset and value.is_floating_point() and bool(value.isnan().any()):
            raise LayoutError(
                f"{self.names[0]} {tuple(value.shape)} was made by torch.empty, or before on_meta began, and a part of it is "
                "given no value, or nan. In a plain build it would be whatever lies in memory. Initialise all of it."
            )
        return value

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.value.size).numel() * self.value.dtype.itemsize


def fill(origins: Sequence[Origin], targets: dict[str, torch.Tensor], device: torch.device, *, same_on_all: bool) -> None:
    """Give the targets, by name, their values. Collective if `same_on_all`.

    Args:
        device: where this rank computes.
    """
    together = same_on_all and agree.is_joined() and dist.get_world_size() > 1
    divided = [o for o in origins if together and not o.value.tape.on_device and o.size_bytes >= SENT_BYTES]
    for origin in origins:
        if origin not in divided and origin.names[0] in targets:  # of a pipeline's other stages, this rank has none
            fill_in(targets[origin.names[0]], origin.computed(device))
    _fill_divided(divided, targets, device)


def _fill_divided(origins: list[Origin], targets: dict[str, torch.Tensor], device: torch.device) -> None:
    """Each value is computed by one rank. Collective.

    Raises:
        UsageError: on all ranks, for what one of them cannot compute.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if origins else (0, 1)
    origins = sorted(origins, key=lambda origin: -origin.size_bytes)  # so that ranks compute about as much at a time
    for start in range(0, len(origins), size):
        turn = origins[start : start + size]
        mine, problem = None, None
        if rank < len(turn):
            try:
                mine = turn[rank].computed().contiguous()
            except UsageError as error:
                problem = str(error)
        agree.raise_on_all(problem)
        for owner, origin in enumerate(turn):
            if owner == rank:
                assert mine is not None
                value, mine = mine.to(device), None
            else:
                value = torch.empty(origin.value.size, dtype=origin.value.dtype, device=device)
            dist.broadcast(value.view(torch.uint8) if value.dtype is torch.bool else value, src=owner)
            if origin.names[0] in targets:
                fill_in(targets[origin.names[0]], value)
            del value  # before the next one's memory is taken


def fill_in(target: torch.Tensor, value: torch.Tensor) -> None:
    mesh = getattr(target, "device_mesh", None)
    if mesh is None or getattr(value, "device_mesh", None) is not None:
        target.copy_(value)
        return
    from torch.distributed.tensor import DTensor, Replicate

    # Each rank has the whole value and keeps its part: no communication.
    whole = DTensor.from_local(value.to(target.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    local(target).copy_(local(whole.redistribute(mesh, target.placements)))  # type: ignore[attr-defined]


# --- a restore follows

_waiting: WeakKeyDictionary[nn.Module, tuple[list[Origin], torch.device, RemovableHandle]] = WeakKeyDictionary()


def waits(origin: Origin) -> bool:
    """Whether it may be left for a restore: it can be marked."""
    return origin.value.tape.restores and origin.value.dtype.is_floating_point


@torch.no_grad()
def leave(module: nn.Module, origins: list[Origin], targets: dict[str, torch.Tensor], device: torch.device) -> None:
    """Mark what a restore is to fill."""
    if not origins:
        return
    for origin in origins:
        _bits(targets[origin.names[0]]).fill_(-1)
    before_forward = module.register_forward_pre_hook(torch.compiler.disable(lambda root, args: fill_rest(root)), prepend=True)
    _waiting[module] = origins, device, before_forward


def check_left(module: nn.Module, left: Collection[str]) -> None:
    """
    Args:
        left: names of what a restore gives no value.
    Raises:
        UsageError: one of these is computed from a tensor that the restore does give a value, other than the one it had.
    """
    for part in list(module.modules()) if len(_waiting) else ():
        origins = _waiting[part][0] if part in _waiting else []
        rest = [origin for origin in origins if set(origin.names) & set(left)]
        given: dict[tuple[Tape, int], str] = {}
        for origin in origins if rest else ():
            if origin not in rest:
                given |= dict.fromkeys(origin.value.needs(), origin.names[0])
        for origin in rest:
            value = origin.value
            source = next((given[each] for each in value.needs() - {(value.tape, value.storage)} if each in given), None)
            if source is not None:
                raise LayoutError(
                    f"{origin.names[0]} is computed from the values of {source} when the model is built, and the file gives that "
                    "one others afterwards. Build the model with its weights (from_pretrained), without on_meta."
                )


@torch.no_grad()
def fill_rest(module: nn.Module, expected: Collection[str] = ()) -> None:
    """Compute what still has no value in the module, or in one inside it. Per rank: what generators drew is agreed on before.

    Args:
        expected: names of which nothing need be said.
    """
    for part in list(module.modules()) if len(_waiting) else ():
        if part not in _waiting:
            continue
        origins, device, before_forward = _waiting.pop(part)
        before_forward.remove()
        targets = {n: t for named in (part.named_parameters, part.named_buffers) for n, t in named(remove_duplicate=False)}
        rest = [origin for origin in origins if bool((_bits(targets[origin.names[0]]) == -1).any())]
        told = [origin.names[0] for origin in rest if not set(origin.names) & set(expected)]
        if told and len(rest) < len(origins):
            names = ", ".join(told[:3])
            more = f" and {len(told) - 3} more" if len(told) > 3 else ""
            logger.warning("not restored, so these have the values of their initialisation: %s%s", names, more)
        fill(rest, targets, device, same_on_all=False)


def _bits(tensor: Any) -> torch.Tensor:
    """This rank's part, as whole numbers of the same size."""
    part: torch.Tensor = local(tensor.detach())
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return part.view(kinds[part.element_size()])
