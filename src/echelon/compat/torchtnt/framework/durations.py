"""How long the latest steps and waits of a phase took, in its state's `iteration_timer`."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from echelon.loop.callback import Callback
from echelon.loop.state import State

__all__ = ["Durations"]


class Series(deque[float]):
    """The latest durations, oldest first. Slices are lists."""

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at] if isinstance(at, slice) else super().__getitem__(at)


class IterationTimer:
    """Durations of the latest iterations in seconds, by name. Bounded, so that a long run does not grow."""

    def __init__(self, keep: int = 5000) -> None:
        self.recorded_durations: dict[str, Any] = defaultdict(partial(Series, maxlen=keep))

    @contextlib.contextmanager
    def time(self, action_name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.recorded_durations[action_name].append(time.perf_counter() - start)

    def reset(self) -> None:
        self.recorded_durations.clear()


class Durations(Callback):
    """Records durations. It is a run's first callback, so that others find the timer in the state."""

    may_stop = False
    _since = 0.0

    def on_train_start(self, state: State, unit: Any) -> None:
        here: Any = state.active_phase_state()
        if getattr(here, "iteration_timer", None) is None:
            here.iteration_timer = IterationTimer()

    def on_train_get_next_batch_start(self, state: State, unit: Any) -> None:
        self._since = time.perf_counter()

    def on_train_step_start(self, state: State, unit: Any) -> None:
        self._note(state, "data_wait_time")

    def on_train_step_end(self, state: State, unit: Any) -> None:
        self._note(state, f"{state.active_phase}_iteration_time")

    on_eval_start = on_predict_start = on_train_start
    on_eval_get_next_batch_start = on_predict_get_next_batch_start = on_train_get_next_batch_start
    on_eval_step_start = on_predict_step_start = on_train_step_start
    on_eval_step_end = on_predict_step_end = on_train_step_end

    def _note(self, state: State, name: str) -> None:
        now = time.perf_counter()
        here: Any = state.active_phase_state()
        here.iteration_timer.recorded_durations[name].append(now - self._since)
        self._since = now
