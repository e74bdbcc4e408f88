"""Call something when the backward pass that is under way ends.

torch has no public way to learn of that; DistributedDataParallel and FSDP queue their last work in this one. Tested with torch
2.13; tests/parallel/test_after_backward.py notices a change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["after_backward"]


def after_backward(call: Callable[[], None]) -> None:
    """Queue `call`; from a hook of a backward pass only. It runs once, in the thread of the caller of `backward`."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
