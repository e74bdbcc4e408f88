"""Parameters with noise, to see what theirs hide: what is multiplied by zero, as new gates, projections and positions are."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator

import torch
from torch import nn

from echelon.parallel.shards import is_fully_sharded, local

__all__ = ["AS_IS", "LEVELS", "perturbed"]

# How far from their values. GENTLE leaves each what it computes, about; STRONG gives those that are zero the size that learned
# positions have beside tokens, and leaves the others alone.
AS_IS, GENTLE, STRONG = LEVELS = (0, 1, 2)


@contextlib.contextmanager
def perturbed(module: nn.Module, level: int, *, in_forward: bool = False) -> Iterator[None]:
    """Within it parameters have noise, the same on ranks that hold the same; afterwards they are as before, to the bit.

    Parameters that are sharded are changed where they lie, without traffic.

    Args:
        level: one of LEVELS.
        in_forward: it is entered in the module's own forward, whose parameters are gathered then and stay so.
    """
    if level == AS_IS:
        yield
        return
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []
    sharded = [part for part in module.modules() if is_fully_sharded(part) and not (in_forward and part is module)]
    try:
        for name, parameter in module.named_parameters():
            if not parameter.is_floating_point() or parameter.is_meta:
                continue
            # Without a version of its own: a graph that holds the parameter must not hear of what is taken back.
            values = local(parameter.detach()).data
            if not values.numel() or (level == STRONG and bool(values.any())):
                continue
            saved.append((values, values.to("cpu", copy=True)))  # not where parameters fill the memory
            _add(values, parameter, f"{level} {name}", _spread(parameter, level))
        yield
    finally:
        for values, before in saved:
            values.copy_(before)
        for part in sharded:  # what was gathered meanwhile has the noise
            part.reshard()  # type: ignore[operator]


def _add(values: torch.Tensor, parameter: torch.Tensor, name: str, spread: float) -> None:
    generator = torch.Generator(values.device).manual_seed(zlib.crc32(f"{name} {_place(parameter)}".encode()))
    noise = torch.empty(values.shape, dtype=torch.float32, device=values.device).normal_(std=spread, generator=generator)
    values.add_(noise.to(values.dtype))


def _spread(parameter: torch.Tensor, level: int) -> float:
    if level == STRONG:
        return 1.0
    return 0.3 if parameter.dim() < 2 else 0.5 / math.sqrt(max(1, parameter.shape[-1]))


def _place(parameter: torch.Tensor) -> list[tuple[str, int]]:
    """Which shard this rank has: along the dimensions of a mesh that replicate it, ranks have the same."""
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
    where = None if mesh is None else mesh.get_coordinate()
    if where is None:
        return []
    return [(str(each), at) for each, at in zip(placements, where, strict=True) if not each.is_replicate()]
