"""torchtnt.framework.callbacks.memory_snapshot."""

from __future__ import annotations

from typing import Any, Protocol

from echelon.loop.callback import Callback
from echelon.loop.state import State

__all__ = ["MemorySnapshot"]


class Steps(Protocol):
    """Something that is told of each step."""

    def step(self) -> Any: ...


class MemorySnapshot(Callback):
    """Tells a profiler of a GPU's memory of each step; it writes down what is allocated when its step has come.

    Args:
        memory_snapshot_profiler: anything with `step()`.
    """

    may_stop = False

    def __init__(self, *, memory_snapshot_profiler: Steps) -> None:
        self.memory_snapshot_profiler = memory_snapshot_profiler

    def on_train_step_end(self, state: State, unit: Any) -> None:
        self.memory_snapshot_profiler.step()

    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end
