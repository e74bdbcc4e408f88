"""torchtnt.framework.callbacks.torch_compile."""

from __future__ import annotations

import logging
import sys
from typing import Any

from echelon.loop.callback import Callback
from echelon.loop.callbacks.intervals import at_least
from echelon.loop.state import State

__all__ = ["TorchCompile"]

logger = logging.getLogger(__name__)


def shutdown_compile_workers() -> None:
    # torch has no public name for it. What was never loaded has started nothing.
    compiler = sys.modules.get("torch._inductor.async_compile")
    shutdown = getattr(compiler, "shutdown_compile_workers", None)
    if shutdown is not None:
        shutdown()
    elif compiler is not None:
        logger.warning("this torch cannot end its compile workers: they stay")


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
            shutdown_compile_workers()
