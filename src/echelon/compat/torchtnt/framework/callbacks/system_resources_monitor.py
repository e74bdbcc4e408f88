"""torchtnt.framework.callbacks.system_resources_monitor: use of processor, memory and GPU along a run."""

from __future__ import annotations

from typing import Any, Literal

import torch

from echelon.compat.torchtnt.framework.callbacks.by_phase import by_phase, progress_of
from echelon.compat.torchtnt.utils.device import collect_system_stats
from echelon.loop.callbacks.intervals import LogsAtInterval
from echelon.loop.state import State
from echelon.world import agree

__all__ = ["SystemResourcesMonitor"]


@by_phase("epoch_start", "step_start")
class SystemResourcesMonitor(LogsAtInterval):
    """Logs what `torchtnt.utils.resources` here knows, and torch's memory counters of the GPU, by completed steps of the phase.

    Rank 0's machine and GPU, or every rank's with a logger of `log_all_ranks`.

    Args:
        loggers: one or several.
        logging_interval: "epoch" logs as epochs start, "step" before each step; asking nvidia-smi takes tens of milliseconds.
    """

    @property
    def device(self) -> torch.device:
        """Whose memory is looked at: the current GPU, or the CPU."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def write_system_stats(self, logging_interval: Literal["epoch", "step"], step: int) -> None:
        """Ask, and log, if this is the interval at which it is to be logged."""
        if logging_interval != self.logging_interval:
            return
        written = [each for each in self._loggers if agree.is_rank0() or getattr(each, "log_all_ranks", False)]
        if not written:
            return
        stats = collect_system_stats(self.device)
        for logger in written:
            logger.log_dict(stats, step)

    def epoch_start(self, state: State, unit: Any, phase: str) -> None:
        self.write_system_stats("epoch", progress_of(unit, phase).num_steps_completed)

    def step_start(self, state: State, unit: Any, phase: str) -> None:
        self.write_system_stats("step", progress_of(unit, phase).num_steps_completed)
