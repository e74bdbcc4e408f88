"""torchtnt.framework.callbacks.empty_cuda_cache."""

from __future__ import annotations

from typing import Any

import torch

from echelon.compat.torchtnt.framework.callbacks.by_phase import by_phase, steps_so_far
from echelon.loop.callback import Callback
from echelon.loop.callbacks.intervals import at_least
from echelon.loop.state import State

__all__ = ["EmptyCudaCache"]


@by_phase("step_end")
class EmptyCudaCache(Callback):
    """Gives unused memory of torch's allocator back to the GPU every n-th step, at the same steps on all ranks.

    Args:
        step_interval: n; within `fit`, steps of training and evaluation are counted together.
    """

    may_stop = False

    def __init__(self, step_interval: int) -> None:
        at_least(1, step_interval=step_interval)
        self._interval = step_interval

    def step_end(self, state: State, unit: Any, phase: str) -> None:
        if steps_so_far(state, unit, phase) % self._interval == 0:
            torch.cuda.empty_cache()
