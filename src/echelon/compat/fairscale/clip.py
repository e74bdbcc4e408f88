"""Clipping where every parameter's gradient lives on one rank, as FairScale's wrappers and OSS have it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

__all__ = ["clip_owned_"]


def clip_owned_(
    parameters: Iterable[torch.Tensor],
    own: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale all gradients so that the norm of all together is at most `max_norm`; returns the norm before. Collective.

    Every parameter's gradient counts on one rank of the group, its owner.

    Args:
        parameters: whose gradients are scaled, where this rank has them.
        own: those that this rank counts.
    """
    parameters = list(parameters)
    device, dtype = parameters[0].device, parameters[0].dtype
    gradients = [p.grad for p in own if p.grad is not None]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    norm = torch.nn.utils.get_total_norm(gradients, norm_type).to(device, torch.float64) if gradients else zero
    largest = float(norm_type) == math.inf
    # In float64: the power of a large float32 norm would overflow.
    total = norm if largest else norm**norm_type
    dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    total = (total if largest else total ** (1.0 / norm_type)).to(dtype)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
