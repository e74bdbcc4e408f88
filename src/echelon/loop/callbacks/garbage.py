"""When the interpreter collects garbage along a run."""

from __future__ import annotations

import gc
from typing import Any

from echelon.common.errors import CallbackError
from echelon.common.numbers import whole
from echelon.loop.callbacks.intervals import steps_so_far
from echelon.loop.callbacks.whole_run import WholeRun
from echelon.loop.state import State
from echelon.loop.unit import Unit

__all__ = ["GarbageCollector"]


class GarbageCollector(WholeRun):
    """Collects garbage at the same steps on all ranks, instead of whenever each has made enough: ranks that pause at different
    times wait for one another.

    Young objects after every step, all objects every n-th. The collector is as it was before when the run ends, however it ends.

    Args:
        step_interval: n; within `fit`, steps of training and evaluation are counted together.
    """

    may_stop = False

    def __init__(self, step_interval: int) -> None:
        self._interval = whole("step_interval", step_interval, at_least=1, kind=CallbackError)
        self._was_on = True

    def begin(self, state: State, unit: Unit) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def finish(self, state: State, unit: Unit) -> None:
        if self._was_on:
            gc.enable()

    def on_train_step_end(self, state: State, unit: Any) -> None:
        gc.collect(2 if steps_so_far(state, unit) % self._interval == 0 else 1)

    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end
