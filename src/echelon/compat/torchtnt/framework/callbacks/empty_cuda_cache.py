"""torchtnt.framework.callbacks.empty_cuda_cache."""

from __future__ import annotations

from typing import Any

import torch

from echelon.loop.callback import Callback
from echelon.loop.callbacks.steps import at_least, steps_so_far
from echelon.loop.state import State

__all__ = ["EmptyCudaCache"]


class EmptyCudaCache(Callback):
    """Gives unused memory of torch's allocator back to the GPU every n-th step, at the same steps on all ranks.

    Args:
        step_interval: n; within `fit`, steps of training and evaluation are counted together.
    """

    may_stop = False

    def __init__(self, step_interval: int) -> None:
        at_least(1, step_interval=step_interval)
        self._interval = step_interval

    def on_train_step_end(self, state: State, unit: Any) -> None:
        if steps_so_far(state, unit) % self._interval == 0:
            torch.cuda.empty_cache()

    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end
