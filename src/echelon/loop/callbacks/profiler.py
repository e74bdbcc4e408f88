"""torch's profiler along a run."""

from __future__ import annotations

from typing import Any

from echelon.common.errors import CallbackError, require
from echelon.loop.callbacks.whole_run import WholeRun
from echelon.loop.state import State
from echelon.loop.unit import Unit

__all__ = ["PyTorchProfiler"]


class PyTorchProfiler(WholeRun):
    """Starts a `torch.profiler.profile` with the run, tells it of each step, and stops it at the end, an exception included.

    Args:
        profiler: every rank's own; give its trace handler a folder, in which ranks write files of their own.
    """

    may_stop = False

    def __init__(self, profiler: Any) -> None:
        can_step = callable(getattr(profiler, "step", None)) and not isinstance(profiler, type)
        require(can_step, "profiler", "a torch.profiler.profile(...)", profiler, kind=CallbackError)
        self.profiler = profiler

    def begin(self, state: State, unit: Unit) -> None:
        self.profiler.start()

    def finish(self, state: State, unit: Unit) -> None:
        self.profiler.stop()

    def on_train_step_end(self, state: State, unit: Any) -> None:
        self.profiler.step()

    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end
