"""Copies of tensors in host memory, so that a thread can write them while training continues.

Whatever the program does next may change them, and by ways that leave no trace: through `.data`, a numpy view, a storage. So
nothing is left to be copied later. Tensors in host memory are copied when `copy` returns. A GPU's are copied by its current
stream, in which whatever changes them comes afterwards: the program need not wait for these, only whoever reads the copies.

Another thread of the program can still write while this one copies. What it changes by torch's operations is noticed by torch's
count of changes in place, `Tensor._version`, and copied again. There is no public name for that count. Used with torch 2.13; a
test in tests/checkpoint/test_checkpoint_async.py notices a change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from echelon.common.errors import CheckpointError

__all__ = ["copy", "versions"]

logger = logging.getLogger(__name__)

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

# A thread that averages weights, say, is busy for a part of a step: the second copy is whole as a rule.
_TRIES = 5


def copy(pairs: Pairs) -> Callable[[], None]:
    """Copy each second tensor into the first, as they are now.

    Returns:
        what waits, in any thread, until all copies are there.
    Raises (the call of what is returned, so that ranks meet the error together):
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
    """How often each was changed in place so far; those made in inference mode are not counted, and give 0."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _refuse() -> None:
    raise CheckpointError(
        f"another thread changed the state during all {_TRIES} attempts to copy it. Pause it while a checkpoint is taken: "
        "wait for it in on_train_step_end of a callback before the saver, or in the state_dict of what it changes."
    )
