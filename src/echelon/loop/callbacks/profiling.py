"""torch's profilers along a run."""

from __future__ import annotations

from typing import Any, Protocol

from echelon.loop.callback import Callback
from echelon.loop.callbacks.whole_run import WholeRun
from echelon.loop.state import State
from echelon.loop.unit import Unit

__all__ = ["MemorySnapshot", "PyTorchProfiler", "Steps"]


class Steps(Protocol):
    """Something that is told of each step."""

    def step(self) -> Any: ...


class PyTorchProfiler(WholeRun):
    """Starts a `torch.profiler.profile` with the run, tells it of each step, and stops it at the end, an exception included.

    Args:
        profiler: every rank's own; give its trace handler a folder, in which ranks write files of their own.
    """

    may_stop = False

    def __init__(self, profiler: Any) -> None:
        self.profiler = profiler

    def begin(self, state: State, unit: Unit) -> None:
        self.profiler.start()

    def finish(self, state: State, unit: Unit) -> None:
        self.profiler.stop()

    def on_train_step_end(self, state: State, unit: Any) -> None:
        self.profiler.step()

    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end


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
