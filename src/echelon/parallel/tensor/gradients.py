"""Whether ranks that share layers have the same gradients of what they do not share. A plan that forgets a layer is found out.

A whole layer between split ones, such as a norm of each head, works on this rank's part of the features: its gradient is a part,
too, and the ranks' copies of it would drift apart in silence.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import TensorParallelError
from echelon.parallel.axes import Axis, axes_of
from echelon.parallel.names import class_name, plain_names
from echelon.parallel.shards import is_split, local
from echelon.parallel.tensor.layers import shared_axis, split_outputs
from echelon.world import agree

__all__ = ["check_same_loss", "check_whole_layers"]

# Kernels may add up in another order on each rank; parts of a gradient have nothing in common.
_SAME = 0.01
_SAME_LOSS = {torch.float32: 1e-4, torch.float64: 1e-4}  # of other types 0.02, which is a few roundings
_NOISE = 1e-6  # of the norm of all gradients: what is zero but for rounding


def check_same_loss(module: nn.Module, loss: torch.Tensor) -> None:
    """Compare the losses of ranks that share layers. Where one is of a part of the outputs, gradients may yet agree. Collective.

    Raises:
        UsageError: they differ; on all of these ranks.
    """
    axis, parts = shared_axis(module), split_outputs(module)
    if axis is None or not parts or not agree.is_joined():
        return
    value = loss.detach().double()
    bounds = torch.stack([value, -value])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=axis.group)
    largest, least = float(bounds[0]), -float(bounds[1])
    if not largest - least > _SAME_LOSS.get(loss.dtype, 0.02) * max(abs(largest), abs(least)):  # nor if one is not a number
        return
    raise TensorParallelError(
        f"tensor parallelism: the loss of the first update differs between the {axis.size} ranks that share layers: it is "
        f"{least:.6g} to {largest:.6g}. Each computes it from its part of the outputs of a layer that is 'colwise' in the plan, "
        f"such as {class_name(module)}.{parts[-1]}. What takes these must be 'rowwise'; or give the layer the style "
        "'colwise_gather'."
    )


def check_whole_layers(module: nn.Module) -> None:
    """After a backward pass that reduced gradients: compare their norms. Collective over the ranks that share layers.

    Raises:
        UsageError: a gradient differs; on all of these ranks.
    """
    axis = shared_axis(module)
    if axis is None:
        return
    # By the module's form alone, which is the same on these ranks: which of them have a gradient need not be.
    whole = [(name, p) for name, p in plain_names(module) if not _is_shared(p, axis)]
    if not whole:
        return
    norms = torch.stack([_norm(p) for _, p in whole])
    bounds = torch.stack([norms, -norms])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=axis.group)
    largest, least = bounds[0], -bounds[1]
    differs = (largest - least > _SAME * largest) & (largest > _NOISE * largest.norm())
    if not bool(differs.any()):  # nor if one is not a number
        return
    number = int(differs.nonzero()[0])
    raise TensorParallelError(
        f"tensor parallelism: the gradient of {class_name(module)}.{whole[number][0]} differs between the {axis.size} ranks "
        f"that share layers: its norm is {float(least[number]):.3g} to {float(largest[number]):.3g}. It works on a part of the "
        'features or of the sequence. Give its layer the style "summed" in the plan, or split the layers around it otherwise.'
    )


def _norm(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    norm: torch.Tensor = local(parameter.grad).detach().double().norm()
    return norm


def _is_shared(parameter: torch.Tensor, axis: Axis) -> bool:
    """Whether each of these ranks has another part of it."""
    if not is_split(parameter):
        return False
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    split = axes_of(mesh, [i for i, placement in enumerate(placements) if not placement.is_replicate()])
    return any(each.ranks == axis.ranks for each in split)
