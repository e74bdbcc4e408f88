"""The norm over a group in which every gradient is on one rank; and process groups that are kept alive long enough.

Process groups outlive the wrappers and optimizers that use them: until the interpreter ends, or until they are destroyed and
another group is kept.

When a gloo group is freed, its destructor joins the group's threads, and one of them may be waiting for the interpreter's lock
to free the tensors of the last collective (torch 2.13). So the group must not be freed right after a collective, as when
`destroy_process_group()` drops the last reference, nor while the interpreter shuts down, when threads no longer get the lock.
FairScale's objects hold it by reference cycles; here it is held explicitly, and freed just before the interpreter ends.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist

# Imported now, before there is a group: the default arguments of its functions would hold the default group to the very end.
# Building an optimizer imports it through torch's compiler.
import torch.distributed.nn.functional

__all__ = ["clip_owned_", "outlive"]

_LAST_WORK_S = 0.05  # time for gloo's threads to free a finished collective's tensors
_held: list[dist.ProcessGroup] = []


def outlive(group: dist.ProcessGroup | None) -> None:
    """Keep a group, by default that of all ranks, beyond `destroy_process_group()`. Those destroyed before are freed."""
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
    """Free the groups while the interpreter still works, and gloo's threads have nothing left to do."""
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

    Each gradient counts on one rank of the group, its owner, as in FairScale's wrappers and OSS.

    Args:
        parameters: their gradients are scaled, if this rank has them.
        own: the parameters whose gradients this rank counts.
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
