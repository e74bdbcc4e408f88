"""Process groups outlive the wrappers and optimizers that use them, until the interpreter ends or another one takes over.

When gloo's group is freed, its destructor joins the group's threads, and one of them may be waiting for the interpreter's lock,
to free the tensors of the last collective (torch 2.13). So the group must be freed neither right after a collective, as when
`destroy_process_group()` drops the last reference, nor when the interpreter is being taken down, when threads get the lock no
more. FairScale's objects hold it by cycles; here it is held, and let go of just before the interpreter ends.
"""

from __future__ import annotations

import atexit
import time

import torch.distributed as dist

# Now, before there is a group: its functions' default arguments would hold the default group to the very end. Building an
# optimizer imports it, by way of torch's compiler.
import torch.distributed.nn.functional  # noqa: F401

__all__ = ["outlive"]

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
