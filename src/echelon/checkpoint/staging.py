"""Copies of living tensors into host memory, some of them beside the loop.

A tensor that was changed while it was copied is noticed by torch's count of changes in place, `Tensor._version`. There is no
public name for that count. Used with torch 2.13; a test in tests/test_checkpoint_async.py notices a change.
"""

from __future__ import annotations

import torch

from echelon.contracts.errors import CheckpointError

__all__ = ["Later", "copy"]

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def copy(pairs: Pairs) -> None:
    """Copy each second tensor into the first, and wait until all is there."""
    for buffer, tensor in pairs:
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
    if any(tensor.is_cuda for _, tensor in pairs):
        torch.cuda.current_stream().synchronize()


class Later:
    """Copies that are made by a call, in another thread, of the tensors as they are now.

    Raises (the call):
        CheckpointError: a tensor was changed meanwhile by something else than an optimizer's step.
    """

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._versions = [tensor._version for _, tensor in pairs]
        self._stream = None
        if any(tensor.is_cuda for _, tensor in pairs):
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def __call__(self) -> None:
        with torch.cuda.stream(self._stream):
            copy(self._pairs)
        if [tensor._version for _, tensor in self._pairs] != self._versions:
            raise CheckpointError(
                "parameters were changed by something else than an optimizer's step while they were copied. "
                "Save with async_checkpoint=False, or change them in a callback's on_train_step_end before the saver's."
            )
        self._pairs = []
