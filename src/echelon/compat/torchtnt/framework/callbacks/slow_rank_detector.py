"""torchtnt.framework.callbacks.slow_rank_detector: which rank is slow."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from echelon.common.errors import UsageError, require
from echelon.loop.callback import Callback
from echelon.loop.callbacks.intervals import at_least
from echelon.loop.state import State
from echelon.observe.loggers.logger import MetricLogger
from echelon.world import agree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SlowRankDetector"]

_log = logging.getLogger(__name__)


class SlowRankDetector(Callback):
    """Compares how long each rank took for the steps since the last check, and rank 0 says which took longest.

    Each measures with its own clock from the end of one check, where all are together, until it arrives at the next. Waiting for
    one another in the collectives of a step counts like work, so under data parallelism what comes after the last of them
    tells the ranks apart.

    Args:
        check_every_n_steps, check_every_n_epochs: of training; None is never. One of them is needed.
        pg: compare the ranks of this group only.
        logger: is given "Difference between fastest/slowest rank (seconds)", by number of steps.
        device: for the message within `pg`; by default the CPU, for NCCL this rank's GPU.
    """

    may_stop = False

    def __init__(
        self,
        *,
        check_every_n_steps: int | None = 100,
        check_every_n_epochs: int | None = 1,
        pg: ProcessGroup | None = None,
        logger: MetricLogger | None = None,
        device: torch.device | None = None,
    ) -> None:
        if check_every_n_steps is None and check_every_n_epochs is None:
            raise UsageError("At least one of check_every_n_steps or check_every_n_epochs must be specified.")
        for name, every in (("check_every_n_steps", check_every_n_steps), ("check_every_n_epochs", check_every_n_epochs)):
            if every is not None and every <= 0:
                raise UsageError(f"{name} must be a positive integer. Value passed is {every}")
        at_least(1, check_every_n_steps=check_every_n_steps, check_every_n_epochs=check_every_n_epochs)
        require(isinstance(pg, dist.ProcessGroup | None), "pg", "a ProcessGroup or None", pg)
        require(logger is None or callable(getattr(logger, "log", None)), "logger", "a logger or None", logger)
        require(isinstance(device, torch.device | None), "device", "a torch.device or None", device)
        self._every_steps, self._every_epochs = check_every_n_steps, check_every_n_epochs
        self._group, self._logger, self._device = pg, logger, device
        self._since, self._checked = time.perf_counter(), -1

    def on_train_start(self, state: State, unit: Any) -> None:
        self._checked = unit.train_progress.num_steps_completed
        agree.any_rank(False)  # ranks are built at different times; from here they begin together
        self._since = time.perf_counter()

    def on_train_step_end(self, state: State, unit: Any) -> None:
        if self._every_steps and unit.train_progress.num_steps_completed % self._every_steps == 0:
            self._check(unit)

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        if self._every_epochs and unit.train_progress.num_epochs_completed % self._every_epochs == 0:
            self._check(unit)

    def _check(self, unit: Any) -> None:
        progress = unit.train_progress
        step = progress.num_steps_completed
        if step == self._checked:  # an epoch's last step was checked already
            return
        durations = self._gather(time.perf_counter() - self._since)
        self._since, self._checked = time.perf_counter(), step
        if not durations or (len(durations) > 1 and dist.get_rank(self._group) != 0):
            return
        fast, slow = min(durations, key=durations.__getitem__), max(durations, key=durations.__getitem__)
        difference = durations[slow] - durations[fast]
        _log.info(
            "Time difference between fastest rank (%s: %s sec) and slowest rank (%s: %s sec) is %s seconds after %s epochs and "
            "%s steps.",
            *(fast, durations[fast], slow, durations[slow], difference, progress.num_epochs_completed, step),
        )
        if self._logger is not None:
            self._logger.log("Difference between fastest/slowest rank (seconds)", difference, step)

    def _gather(self, seconds: float) -> dict[int, float]:
        """By rank of the whole world."""
        if self._group is None:
            return dict(enumerate(agree.gather(seconds)))
        if dist.get_rank(self._group) < 0:
            return {}
        members = dist.get_process_group_ranks(self._group)
        backend = dist.get_backend(self._group)
        device = self._device or torch.device("cuda" if backend == "nccl" else "cpu")
        mine = torch.tensor([seconds], dtype=torch.float64, device=device)
        parts = [torch.empty_like(mine) for _ in members]
        dist.all_gather(parts, mine, group=self._group)
        return {rank: float(part) for rank, part in zip(members, parts, strict=True)}
