"""Whether ranks that share layers have the same gradients of what they do not share. A plan that forgets a layer is found out.

A whole layer between split ones, such as a norm of each head, works on this rank's part of the features: its gradient is a part,
too, and the ranks' copies of it would drift apart in silence.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from echelon.contracts.errors import UsageError
from echelon.parallel.axes import Axis, axes_of
from echelon.parallel.names import plain_names
from echelon.parallel.shards import is_split, local
from echelon.parallel.tensor_layers import shared_axis

__all__ = ["check_whole_layers"]

# Kernels may add up in another order on each rank; parts of a gradient have nothing in common.
_SAME = 0.01
_NOISE = 1e-6  # of the norm of all gradients: what is zero but for rounding


def check_whole_layers(module: nn.Module) -> None:
    """After a backward pass that reduced gradients: compare their norms. Collective over the ranks that share layers.

    Raises:
        UsageError: a gradient differs; on all of these ranks.
    """
    axis = shared_axis(module)
    if axis is None:
        return
    whole = [(name, p) for name, p in plain_names(module) if p.grad is not None and not _is_shared(p, axis)]
    if not whole:
        return
    norms = torch.stack([local(p.grad).detach().double().norm() for _, p in whole if p.grad is not None])
    bounds = torch.stack([norms, -norms])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=axis.group)
    largest, least = bounds[0], -bounds[1]
    differs = (largest - least > _SAME * largest) & (largest > _NOISE * largest.norm())
    if not bool(differs.any()):  # nor if one is not a number
        return
    number = int(differs.nonzero()[0])
    raise UsageError(
        f"tensor parallelism: the gradient of {type(module).__name__}.{whole[number][0]} differs between the {axis.size} ranks "
        f"that share layers: its norm is {float(least[number]):.3g} to {float(largest[number]):.3g}. It works on a part of the "
        'features or of the sequence. Give its layer the style "summed" in the plan, or split the layers around it otherwise.'
    )


def _is_shared(parameter: torch.Tensor, axis: Axis) -> bool:
    """Whether each of these ranks has another part of it."""
    if not is_split(parameter):
        return False
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    split = axes_of(mesh, [i for i, placement in enumerate(placements) if not placement.is_replicate()])
    return any(each.ranks == axis.ranks for each in split)
