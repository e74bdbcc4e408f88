"""When a run diverges, roll back to the last good checkpoint, and skip the batches that caused it."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.checkpoint import commit
from echelon.common.arguments import Given
from echelon.common.errors import CallbackError, CheckpointOptionError, DivergedError
from echelon.data.loader import Loader
from echelon.data.replayed import with_state
from echelon.loop.callback import Callback
from echelon.loop.checkpointing import restoring
from echelon.loop.checkpointing.options import RestoreOptions
from echelon.loop.unit import TrainedUnit
from echelon.world import agree

if TYPE_CHECKING:
    from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
    from echelon.loop.state import State

__all__ = ["RollBack"]

_given = Given(CallbackError)

logger = logging.getLogger(__name__)

# Standard deviation of a normal distribution in units of its median absolute deviation.
_DEVIATION_PER_MAD = 1.4826
# The spread of fewer losses says little.
_ENOUGH = 16


class RollBack(Callback):
    """Watches the loss of every update. If the loss is not finite, or far above recent losses, all ranks roll back to the newest
    checkpoint from before, and continue without the batches of that update. The skipped update is still counted, so every later
    update trains on the same samples as without the rollback. Put RollBack before the saver in the list of callbacks.

    Reading the loss makes the host wait for a GPU once per update.

    Args:
        saver: the saver whose checkpoints to restore; frequent checkpoints lose less work. If there is no checkpoint yet, one is
            saved when training begins.
        deviations: a loss is too high if it is this many standard deviations above the median of recent losses; None accepts
            every finite loss. The default, 8, is far outside the noise of a healthy run.
        history: number of recent updates.
        skip: number of updates to skip, beginning with the one that diverged; damage that shows late needs more.
        at_most: number of rollbacks allowed in a run, over all its attempts.
        watch: function that returns this rank's number to watch. By default it is an AutoUnit's loss over the global batch, and,
            if gradients are clipped, their norm, which must only be finite. Required for other units.
    Raises:
        DivergedError: on all ranks, if a further rollback would exceed `at_most`.
    """

    may_stop, meets = False, True

    def __init__(
        self,
        saver: DistributedCheckpointSaver,
        *,
        deviations: float | None = 8.0,
        history: int = 64,
        skip: int = 1,
        at_most: int = 3,
        watch: Callable[[State, Any], float] | None = None,
    ) -> None:
        _given.require(hasattr(saver, "settle") and not isinstance(saver, type), "saver", "a DistributedCheckpointSaver", saver)
        history = _given.whole("history", history, at_least=_ENOUGH)
        skip = _given.whole("skip", skip, at_least=1)
        at_most = _given.whole("at_most", at_most, at_least=1)
        if deviations is not None:
            _given.number("deviations", deviations, "above 0, or None", lambda found: found > 0)
        _given.require(watch is None or callable(watch), "watch", "a function of (state, unit), or None", watch)
        self.saver, self.deviations, self.skip, self.at_most, self.watch = saver, deviations, skip, at_most, watch
        self._losses: deque[tuple[int, float]] = deque(maxlen=history)
        self._limit, self._limit_is_good_for = math.inf, 0

    def on_train_start(self, state: State, unit: TrainedUnit) -> None:
        if self.watch is None and not hasattr(unit, "latest_update"):
            raise CheckpointOptionError(
                f"watch must be given to RollBack, because {type(unit).__name__} is not an AutoUnit: watch=lambda state, "
                "unit: ..."
            )
        if state.train_state is not None and not hasattr(with_state(state.train_state.dataloader), "load_state_dict"):
            name = type(state.train_state.dataloader).__name__
            raise CheckpointOptionError(
                f"the loader must have load_state_dict for RollBack, or be a DataLoader, got {name}. echelon.Loader has it."
            )
        self.saver.folder.take_over(unit, state)  # sets newer checkpoints aside, to which a rollback must not go
        step = unit.train_progress.num_updates_completed
        if not any(commit.step_of(path) <= step for path in commit.candidates(self.saver.dirpath)):
            self.saver.save(state, unit)

    def on_train_step_end(self, state: State, unit: TrainedUnit) -> None:
        if not unit.at_boundary:
            return
        update = unit.train_progress.num_updates_completed
        if self.watch is None:
            loss, norm = (float(value) if value is not None else 0.0 for value in unit.latest_update)  # type: ignore[attr-defined]
            if unit.grad_scaler is not None:  # type: ignore[attr-defined]
                norm = 0.0  # the scaler itself skips an update with an inf, and lowers its scale
            problem, agreed = self._problem(loss, norm), unit.agrees_on_updates  # type: ignore[attr-defined]
        else:
            loss = self.watch(state, unit)
            problem, agreed = self._problem(loss, 0.0), False
        if problem is None if agreed else not agree.any_rank(problem is not None):
            self._losses.append((update, loss))
            return
        self._go_back(state, unit, problem)

    def _problem(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        if self.deviations is not None and len(self._losses) >= _ENOUGH:
            if self._limit_is_good_for == 0:  # sorting at every update would cost too much
                values = [each for _, each in self._losses]
                middle = statistics.median(values)
                spread = statistics.median(abs(each - middle) for each in values) * _DEVIATION_PER_MAD
                self._limit = middle + self.deviations * max(spread, 1e-3 * abs(middle))
                self._limit_is_good_for = _ENOUGH
            self._limit_is_good_for -= 1
            if loss > self._limit:
                return f"the loss is {loss:.6g}, above {self._limit:.6g}"
        return None

    def _go_back(self, state: State, unit: TrainedUnit, problem: str | None) -> None:
        progress = unit.train_progress
        now = progress.num_updates_completed
        first = now - 1  # the update that has just ended; a skipped update gives no loss
        problems = "; ".join(f"rank {r}: {each}" for r, each in enumerate(agree.gather(problem)) if each)
        samples = _samples(state, unit)
        what = f"update {first}: {problems}" + (f" (samples {samples})" if samples else "")
        if len(progress.skipped) >= self.at_most:
            raise DivergedError(
                f"{what}. The run was rolled back {len(progress.skipped)} times before, and at_most is {self.at_most}. "
                "A lower learning rate or clipping may help. The checkpoints are unchanged."
            )
        skipped = [*progress.skipped, (first, first + self.skip)]
        self.saver.settle(state)
        ordered = []
        for path in commit.candidates(self.saver.dirpath):
            if commit.step_of(path) <= first:
                ordered.append(path)
            else:
                commit.on_rank0(partial(commit.set_aside, path, "diverged"))
        assert state.train_state is not None
        loader = state.train_state.dataloader
        if not restoring.restore_first(
            self.saver.dirpath, ordered, unit, loader, RestoreOptions(), fall_back=True, rolls_back=True
        ):
            raise DivergedError(f"{what}, and {self.saver.dirpath} holds no earlier checkpoint to roll back to.")
        unit.resumes_with = unit.resumes_logged = None  # training continues from the restored state at once
        progress.skipped = skipped
        state.go_on_from_progress()
        back, self._limit_is_good_for = progress.num_updates_completed, 0
        while self._losses and self._losses[-1][0] > back:
            self._losses.pop()
        state.event("rolled_back", step=now, to=back, why=problems, skipped=list(skipped[-1]), samples=samples)
        if agree.is_rank0():
            logger.warning("%s; rolled back to update %s; training skips updates %s to %s", what, back, first, skipped[-1][1] - 1)


def _samples(state: State, unit: TrainedUnit) -> list[int]:
    """Indices of the samples of the update that has just ended; at most as many as a person reads."""
    assert state.train_state is not None
    loader = state.train_state.dataloader
    if not isinstance(loader, Loader):
        return []
    start = (unit.train_progress.num_updates_completed_in_epoch - 1) * loader.global_batch
    positions = np.arange(start, min(start + min(loader.global_batch, 256), loader.samples), dtype=np.int64)
    samples: list[int] = loader.order.at(loader.epoch, positions).tolist()
    return samples
