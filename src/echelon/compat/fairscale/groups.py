"""A norm over a group in which every gradient lives on one rank; and groups that live long enough.

Process groups outlive the wrappers and optimizers that use them, until the interpreter ends or another one takes over.

When gloo's group is freed, its destructor joins the group's threads, and one of them may be waiting for the interpreter's lock,
to free the tensors of the last collective (torch 2.13). So the group must be freed neither right after a collective, as when
`destroy_process_group()` drops the last reference, nor when the interpreter is being taken down, when threads get the lock no
more. FairScale's objects hold it by cycles; here it is held, and let go of just before the interpreter ends.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist

# Now, before there is a group: its functions' default arguments would hold the default group to the very end. Building an
# optimizer imports it, by way of torch's compiler.
import torch.distributed.nn.functional

__all__ = ["clip_owned_", "outlive"]

_LAST_WORK_S = 0.05  # in which gloo's threads let go of a finished collective's tensors
_held: list[dist.ProcessGroup] = []


def outlive(group: dist.ProcessGroup | None) -> None:
    """Hold a group, by default that of all ranks, beyond `destroy_process_group()`; those destroyed long ago are let go."""
    group = group if group is not None else dist.group.WORLD
    if group is None or any(each is group for each in _held):
        return
    _held[:] = [each for each in _held if _is_in_use(each)]
    _held.append(group)
    atexit.unregister(_let_go)
    atexit.register(_let_go)


def _is_in_use(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_rank(group)
    except ValueError:
        return False
    return True


def _let_go() -> None:
    """While the interpreter is whole, and gloo's threads have nothing left to do."""
    time.sleep(_LAST_WORK_S)
    _held.clear()


def clip_owned_(
    parameters: Iterable[torch.Tensor],
    own: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale all gradients so that the norm of all together is at most `max_norm`; returns the norm before. Collective.

    Every parameter's gradient counts on one rank of the group, its owner, as FairScale's wrappers and OSS have it.

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
