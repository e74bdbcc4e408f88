"""What a callback does around a whole run, whatever phases it has and however it ends."""

from __future__ import annotations

from typing import Any

from echelon.loop.callback import Callback
from echelon.loop.state import EntryPoint, State
from echelon.loop.unit import Unit

__all__ = ["WholeRun"]


class WholeRun(Callback):
    """Calls `begin` as the entry point starts, and `finish` as it ends: by its end, an exception or a Ctrl-C.

    An evaluation within `fit` is part of the run around it.
    """

    _running = False

    def begin(self, state: State, unit: Unit) -> None: ...

    def finish(self, state: State, unit: Unit) -> None:
        """Called once for each `begin`. No collective here: another rank's run may end by an exception that this one has not."""

    def on_train_start(self, state: State, unit: Any) -> None:
        self._running = True
        self.begin(state, unit)

    def on_train_end(self, state: State, unit: Any) -> None:
        if self._running:
            self._running = False
            self.finish(state, unit)

    on_predict_start = on_test_start = on_train_start
    on_predict_end = on_test_end = on_train_end

    def on_eval_start(self, state: State, unit: Any) -> None:
        if state.entry_point is not EntryPoint.FIT:
            self.on_train_start(state, unit)

    def on_eval_end(self, state: State, unit: Any) -> None:
        if state.entry_point is not EntryPoint.FIT:
            self.on_train_end(state, unit)

    def on_exception(self, state: State, unit: Unit, exc: BaseException) -> None:
        self.on_train_end(state, unit)
