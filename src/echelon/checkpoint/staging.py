"""Copies of tensors in host memory, so that a thread can write them while training continues.

The program may change tensors without a trace: through `.data`, a numpy view, a storage. So no copy is put off. Tensors in host
memory are copied when `copy` returns. A GPU's tensors are copied on its current stream, where later changes queue behind the
copies: the program need not wait, only a reader of the copies must.

Another thread of the program can still write during the copies. torch counts the in-place changes that its operations make, in
`Tensor._version`; if the count has changed, all is copied again. There is no public name for that count. Used with torch 2.13; a
test in tests/checkpoint/test_checkpoint_async.py notices if torch changes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from echelon.common.errors import CheckpointError

__all__ = ["copy", "versions"]

logger = logging.getLogger(__name__)

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

# A thread that averages weights, for example, is busy for a part of a step, so the second copy usually succeeds.
_TRIES = 5


def copy(pairs: Pairs) -> Callable[[], None]:
    """Copy the second tensor of each pair into the first.

    Returns:
        a function that waits, in any thread, until all copies are done.
    Raises (from the returned function, so that all ranks learn of the error together):
        CheckpointError: another thread changed a tensor during each of several tries.
    """
    living = [tensor for _, tensor in pairs]
    for again in range(_TRIES):
        if again == 1:
            logger.warning("another thread changed the state while it was copied for a checkpoint; copying it again")
        before = versions(living)
        for buffer, tensor in pairs:
            buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if versions(living) == before:
            break
    else:
        return _refuse
    copied = [torch.cuda.current_stream(device).record_event() for device in {t.device for t in living if t.is_cuda}]

    def wait() -> None:
        for event in copied:
            event.synchronize()

    return wait


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each tensor was changed in place so far; 0 for tensors made in inference mode, which have no count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _refuse() -> None:
    raise CheckpointError(
        f"another thread changed the state during all {_TRIES} attempts to copy it. Pause that thread while a checkpoint is "
        "taken: wait for it in on_train_step_end of a callback before the saver, or in the state_dict of the changed object."
    )
