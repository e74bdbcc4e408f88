"""Settings and chores of the process around a run: garbage, caches, number formats, helper processes."""

from __future__ import annotations

import gc
import logging
import sys
from typing import Any

import torch

from echelon.contracts.errors import UsageError
from echelon.loop.callback import Callback
from echelon.loop.callbacks.steps import at_least, steps_so_far
from echelon.loop.callbacks.whole_run import WholeRun
from echelon.loop.state import State
from echelon.loop.unit import Unit

__all__ = ["EmptyCudaCache", "EnableTensorFloat32", "GarbageCollector", "TorchCompile"]

logger = logging.getLogger(__name__)


class GarbageCollector(WholeRun):
    """Collects garbage at the same steps on all ranks, instead of whenever each has made enough: ranks that pause at different
    times wait for one another.

    Young objects after every step, all objects every n-th. The collector is as it was before when the run ends, however it ends.

    Args:
        step_interval: n; within `fit`, steps of training and evaluation are counted together.
    """

    may_stop = False

    def __init__(self, step_interval: int) -> None:
        at_least(1, step_interval=step_interval)
        self._interval = step_interval
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


class EnableTensorFloat32(WholeRun):
    """Lets GPUs compute products of float32 matrices, and convolutions, in TensorFloat-32 during a run: several times faster,
    with 10 bits of mantissa instead of 23. What was set before is set again when the run ends, however it ends.

    Args:
        float32_matmul_precision: "highest", "high" or "medium", see `torch.set_float32_matmul_precision`.
    """

    may_stop = False

    def __init__(self, float32_matmul_precision: str = "high") -> None:
        if float32_matmul_precision not in ("highest", "high", "medium"):
            raise UsageError(f"float32_matmul_precision {float32_matmul_precision!r}: 'highest', 'high' or 'medium'.")
        self._precision = float32_matmul_precision
        self._before = ("highest", True)

    def begin(self, state: State, unit: Unit) -> None:
        self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        _set_float32(self._precision, True)

    def finish(self, state: State, unit: Unit) -> None:
        _set_float32(*self._before)


def _set_float32(matmul: str, convolutions: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = convolutions


class TorchCompile(Callback):
    """Ends the processes that compile for torch.compile once everything is compiled: they hold memory of the host.

    Args:
        step_shutdown_compile_workers: after this training step.
    """

    may_stop = False

    def __init__(self, step_shutdown_compile_workers: int) -> None:
        at_least(1, step_shutdown_compile_workers=step_shutdown_compile_workers)
        self._step = step_shutdown_compile_workers

    def on_train_step_end(self, state: State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == self._step:
            # torch has no public name for it. What was never loaded has started nothing.
            compiler = sys.modules.get("torch._inductor.async_compile")
            shutdown = getattr(compiler, "shutdown_compile_workers", None)
            if shutdown is not None:
                shutdown()
            elif compiler is not None:
                logger.warning("this torch cannot end its compile workers: they stay")
