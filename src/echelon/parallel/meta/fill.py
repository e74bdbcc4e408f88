"""The values of tensors without any, computed and put in place: each large one on one rank, or on the device.

Computing a value takes as long as in a plain build. So large ones are divided over the ranks: each computes every so many-th and
sends it to the others, which keep their parts of it. What `on_meta(on_device=True)` recorded each rank computes on its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError, UsageError
from echelon.parallel.meta.tape import Value
from echelon.parallel.shards import local
from echelon.world import agree

__all__ = ["Origin", "fill", "fill_in"]

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
