"""torchtnt.framework.callbacks.system_resources_monitor: use of processor, memory and GPU along a run."""

from __future__ import annotations

from typing import Any

import torch

from echelon.compat.torchtnt.utils.resources import cpu_stats, gpu_stats
from echelon.loop.callbacks.steps import LogsAtInterval, progress_of
from echelon.loop.state import State
from echelon.world import agree

__all__ = ["SystemResourcesMonitor"]


class SystemResourcesMonitor(LogsAtInterval):
    """Logs what `torchtnt.utils.resources` here knows, and torch's memory counters of the GPU, by completed steps of the phase.

    Rank 0's machine and GPU, or every rank's with a logger of `log_all_ranks`.

    Args:
        loggers: one or several.
        logging_interval: "epoch" logs as epochs start, "step" before each step; asking nvidia-smi takes tens of milliseconds.
    """

    def write_system_stats(self, step: int) -> None:
        """Ask, and log."""
        written = [each for each in self._loggers if agree.is_rank0() or getattr(each, "log_all_ranks", False)]
        if not written:
            return
        stats: dict[str, Any] = dict(cpu_stats())
        if torch.cuda.is_available():
            stats |= gpu_stats(_nvidia_name(torch.cuda.current_device()))
            stats |= torch.cuda.memory_stats()
        for logger in written:
            logger.log_dict(stats, step)

    def on_train_epoch_start(self, state: State, unit: Any) -> None:
        if self.logging_interval == "epoch":
            self.write_system_stats(progress_of(state, unit).num_steps_completed)

    def on_train_step_start(self, state: State, unit: Any) -> None:
        if self.logging_interval == "step":
            self.write_system_stats(progress_of(state, unit).num_steps_completed)

    on_eval_epoch_start = on_predict_epoch_start = on_test_epoch_start = on_train_epoch_start
    on_eval_step_start = on_predict_step_start = on_test_step_start = on_train_step_start


def _nvidia_name(device: int) -> str:
    """nvidia-smi counts GPUs that CUDA_VISIBLE_DEVICES hides from torch; a UUID means the same to both."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
