"""torchtnt.framework.callbacks.garbage_collector: echelon's, whose every n-th collection of all objects comes beside the small
one.
"""

import gc
from typing import Any

from echelon.loop.callbacks import garbage
from echelon.loop.callbacks.steps import steps_so_far
from echelon.loop.state import State

__all__ = ["GarbageCollector"]


class GarbageCollector(garbage.GarbageCollector):
    """As echelon's."""

    def begin(self, state: State, unit: Any) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def finish(self, state: State, unit: Any) -> None:
        if self._was_on:
            gc.enable()

    def on_train_step_end(self, state: State, unit: Any) -> None:
        gc.collect(generation=1)
        if steps_so_far(state, unit) % self._interval == 0:
            gc.collect()
        gc.disable()  # in case something has switched it on

    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end
