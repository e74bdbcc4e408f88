"""torchtnt.framework.callbacks.garbage_collector: echelon's, whose every n-th collection of all objects comes beside the small
one.
"""

import gc
from typing import Any

from echelon.compat.torchtnt.framework.callbacks.by_phase import by_phase, steps_so_far
from echelon.loop.callbacks import monitors
from echelon.loop.state import State

__all__ = ["GarbageCollector"]


@by_phase("step_end")
class GarbageCollector(monitors.GarbageCollector):
    """As echelon's."""

    def begin(self, state: State, unit: Any) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def finish(self, state: State, unit: Any) -> None:
        if self._was_on:
            gc.enable()

    def step_end(self, state: State, unit: Any, phase: str) -> None:
        gc.collect(generation=1)
        if steps_so_far(state, unit, phase) % self._interval == 0:
            gc.collect()
        if phase == "train":
            gc.disable()  # in case something has switched it on
