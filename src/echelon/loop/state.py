"""State: the object that the loops hand to every unit and callback, and the one place to ask for a stop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

from echelon.common.errors import LoopError, require
from echelon.common.numbers import whole
from echelon.data.generators import state_between_epochs
from echelon.data.prefetch import NO_STEP, Feed, Step, restored_state
from echelon.loop.progress import Progress
from echelon.loop.records.logged import Logged

if TYPE_CHECKING:
    from echelon.loop.records.record import Recorder
    from echelon.observe.sinks.progress import Notes

__all__ = ["COUNTS", "ActivePhase", "EntryPoint", "PhaseState", "State", "TimerProtocol", "step_under_way"]


# The limits of a phase, and the count of its progress that each limits.
COUNTS = {
    "max_epochs": "num_epochs_completed",
    "max_updates": "num_updates_completed",
    "updates_per_epoch": "num_updates_completed_in_epoch",
    "max_steps": "num_steps_completed",
    "max_steps_per_epoch": "num_steps_completed_in_epoch",
}


class EntryPoint(Enum):
    """Which function the user called."""

    FIT = auto()
    TRAIN = auto()
    EVALUATE = auto()
    PREDICT = auto()
    TEST = auto()


class ActivePhase(Enum):
    """Which phase runs now: within `fit`, training and evaluation alternate."""

    TRAIN = auto()
    EVALUATE = auto()
    PREDICT = auto()
    TEST = auto()

    def into_phase(self) -> str:
        """Name of the function that runs this phase: "train", "evaluate", "predict", "test"."""
        return self.name.lower()

    def __str__(self) -> str:
        """Name in hooks and progress: "train", "eval", "predict", "test"."""
        return "eval" if self is ActivePhase.EVALUATE else self.name.lower()


class TimerProtocol(Protocol):
    """A `timer`: measures named stages."""

    def time(self, action_name: str) -> AbstractContextManager[Any]: ...


@dataclass
class EvaluateEvery:
    """Intervals between evaluations, in updates, steps and epochs of training; None is never.

    Args:
        at_end: also evaluate after the last epoch.
    """

    updates: int | None = None
    steps: int | None = None
    epochs: int | None = None
    at_end: bool = False


class _EveryN:
    """The attribute `evaluate_every_n_NAME` of a PhaseState. Its value is in `evaluations`, which two phases may share."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._of = name, name.removeprefix("evaluate_every_n_")

    def __get__(self, phase_state: Any, owner: type | None = None) -> Any:
        return self if phase_state is None else getattr(phase_state.evaluations, self._of)

    def __set__(self, phase_state: Any, value: float | None) -> None:
        setattr(phase_state.evaluations, self._of, _limit(self._name, value, at_least=1))


class PhaseState:
    """One phase's loader and limits. Only the loop writes it, except that a callback may change `evaluate_every_n_*`.

    Attributes:
        max_updates, updates_per_epoch: limits of training, in updates.
        max_steps, max_steps_per_epoch: limits in steps, that is micro-batches; in training only for TorchTNT's programs.
        evaluate_every_n_updates, evaluate_every_n_steps, evaluate_every_n_epochs: intervals between evaluations in training;
            within `fit` the same in both phases' states.
        step_output: the return value of the step, until the end of `on_*_step_end`.
        step: the current or latest batch: whether it is the epoch's last, whether it is padding.
        feed: the loop's iterator over the current epoch.
    """

    evaluate_every_n_updates, evaluate_every_n_steps, evaluate_every_n_epochs = _EveryN(), _EveryN(), _EveryN()

    def __init__(
        self,
        *,
        dataloader: Iterable[Any],
        max_epochs: float | None = None,
        max_updates: float | None = None,
        updates_per_epoch: float | None = None,
        max_steps: float | None = None,
        max_steps_per_epoch: float | None = None,
        evaluate_every_n_updates: float | None = None,
        evaluate_every_n_steps: float | None = None,
        evaluate_every_n_epochs: float | None = None,
    ) -> None:
        self.dataloader = dataloader
        # math.inf as a limit asks for a run without an end.
        limits = (max_epochs, max_updates, max_steps)
        self.endless = any(isinstance(limit, float) and limit == math.inf for limit in limits)
        self.max_epochs = _limit("max_epochs", max_epochs)
        self.max_updates, self.max_steps = _limit("max_updates", max_updates), _limit("max_steps", max_steps)
        self.updates_per_epoch = _limit("updates_per_epoch", updates_per_epoch)
        self.max_steps_per_epoch = _limit("max_steps_per_epoch", max_steps_per_epoch)
        self.evaluations = EvaluateEvery()
        self.evaluate_every_n_updates = evaluate_every_n_updates
        self.evaluate_every_n_steps = evaluate_every_n_steps
        self.evaluate_every_n_epochs = evaluate_every_n_epochs
        self.step_output: Any = None
        self.step: Step[Any] = NO_STEP
        self.feed: Feed | None = None

    def ends_epoch(self, progress: Progress) -> bool:
        """Whether the epoch ends with the current step, which is counted already, and is not cut short by a limit."""
        if self.feed is None:
            return False
        if self.has_whole_epoch(progress):
            return True
        return self.step.is_last and self.feed.length is None and not self.has_all(progress)

    def has_whole_epoch(self, progress: Progress) -> bool:
        """Whether the loader's length, or a limit on an epoch, is reached."""
        if min(self._left(progress, "updates_per_epoch", "max_steps_per_epoch"), default=1) <= 0:
            return True
        return self.feed is not None and self.feed.length is not None and self.feed.used >= self.feed.length

    @property
    def has_limit(self) -> bool:
        """Whether there is a limit on the whole run."""
        return not self.max_epochs is self.max_updates is self.max_steps is None

    def has_all(self, progress: Progress) -> bool:
        """Whether a limit on the updates, or steps, of the whole run is reached."""
        return min(self._left(progress, "max_updates", "max_steps"), default=1) <= 0

    def _left(self, progress: Progress, *limits: str) -> list[int]:
        """For each of these limits that is set, how much is left."""
        return [most - getattr(progress, COUNTS[name]) for name in limits if (most := getattr(self, name)) is not None]

    def steps_left(self, progress: Progress, unit: Any) -> int | None:
        """Number of steps that the limits leave for this epoch; None is no limit. It may be more steps than the epoch has, if the
        epoch ends within an update.
        """
        steps = self._left(progress, "max_steps_per_epoch", "max_steps")
        updates = self._left(progress, "updates_per_epoch", "max_updates")
        if updates:
            steps.append(unit.steps_until(updates=max(0, min(updates))))
        return max(0, min(steps)) if steps else None

    def loader_state(self, progress: Progress) -> dict[str, Any] | None:
        """The loader's state after the steps taken so far; None for a loader without one. Between epochs, the state of the
        loader's own generator, from which the next order is drawn. Every rank calls it.
        """
        if self.feed is not None:
            return self.feed.loader_state()
        if progress.num_steps_completed_in_epoch:  # restored within an epoch, and nothing read since
            return restored_state(self.dataloader)
        return state_between_epochs(self.dataloader)

    def total_updates(self, size: int) -> int | None:
        """Number of updates of the complete run, if lengths and limits tell.

        Args:
            size: micro-batches per update; an epoch's last update may have fewer.
        """
        per_epoch = [self.updates_per_epoch] if self.updates_per_epoch is not None else []
        if self.max_steps_per_epoch is not None:
            per_epoch.append(-(-self.max_steps_per_epoch // size))
        with contextlib.suppress(TypeError):
            per_epoch.append(-(-len(self.dataloader) // size))  # type: ignore[arg-type]
        bounds = [self.max_updates] if self.max_updates is not None else []
        if self.max_steps is not None:
            bounds.append(-(-self.max_steps // size))
        if self.max_epochs is not None and per_epoch:
            bounds.append(self.max_epochs * min(per_epoch))
        return min(bounds, default=None)

    def is_complete(self, progress: Progress) -> bool:
        """Whether a limit on the whole run is reached."""
        return min(self._left(progress, "max_epochs", "max_updates", "max_steps"), default=1) <= 0

    def limit_of(self, progress: Progress) -> str:
        """The limit that is reached, as "name=value"."""
        reached = (n for n in ("max_epochs", "max_updates", "max_steps") if min(self._left(progress, n), default=1) <= 0)
        return next((f"{name}={getattr(self, name)}" for name in reached), "")


def step_under_way(phase_state: PhaseState | None) -> Step[Any]:
    """The current batch's Step; outside a loop, or if the state is a mock, one that is neither the last nor padding."""
    return phase_state.step if isinstance(phase_state, PhaseState) else NO_STEP


def _limit(name: str, value: Any, *, at_least: int = 0) -> int | None:
    if value is None or (isinstance(value, float) and value == math.inf):
        return None
    return whole(name, value, at_least=at_least, or_none="for no limit" if at_least == 0 else "for never", kind=LoopError)


class State:
    """Handed to every hook and step. Users only read it, and call its methods `stop` and `log`."""

    def __init__(
        self,
        *,
        entry_point: EntryPoint,
        timer: TimerProtocol | None = None,
        train_state: PhaseState | None = None,
        eval_state: PhaseState | None = None,
        predict_state: PhaseState | None = None,
        test_state: PhaseState | None = None,
    ) -> None:
        can_time = not isinstance(timer, type) and callable(getattr(timer, "time", None))
        require(timer is None or can_time, "timer", "an object whose time(name) gives a context, or None", timer, kind=LoopError)
        self.entry_point, self.timer = entry_point, timer
        self.train_state, self.eval_state = train_state, eval_state
        self.predict_state, self.test_state = predict_state, test_state
        self.active_phase = ActivePhase.TRAIN if entry_point is EntryPoint.FIT else ActivePhase[entry_point.name]
        self.recorder: Recorder | None = None
        self.notes: Notes | None = None
        self.logged = Logged()
        # During the hooks of an epoch's end: reduces the numbers logged so far. Collective.
        self.settle_logged: Callable[[], None] | None = None
        self.alone = True  # this process has not joined others; the loop sets it
        self.stop_requested = False  # by this rank
        self.stopped_by_script = False  # on this rank, not by a signal: the run ends and does not resume later
        self.should_stop = False  # the same on all ranks: the loop will stop
        self.rolled_back = False  # the same on all ranks: a callback restored an older state, from which the loop continues

    def log(self, name: str, value: Any, weight: Any = None, *, reduce: str = "mean") -> None:
        """Log a number of your own. Reduced over all ranks, it appears in metrics.jsonl, the report and the trackers.

        A number logged in a training step is reduced over all micro-batches of the update; in an evaluation, over the whole
        evaluation, with `eval_` before its name. A number logged after an update, as in `on_train_step_end`, counts for the next
        update. A `TrainUnit`'s numbers are reduced over an epoch. Every rank must log the same names in the same steps.

        Args:
            name: the number's name; names of a run's own numbers, such as "loss", are taken.
            value: a number, or a tensor with one element, for which nothing waits. Or a metric with `compute()` and `reset()`
                that reduces over the ranks itself, as torchmetrics' do: it is computed and reset at the epoch's end.
            weight: weight of the value in the mean. None is the weight of the micro-batch in the loss; outside a micro-batch, or
                without an AutoUnit, it is 1. A value of weight 0 does not count. If the micro-batch has no weight in the loss,
                such as padding, the value does not count either, whatever its weight.
            reduce: "mean", "sum", "min" or "max".
        Raises:
            UsageError: the name is taken, or the value is not a single number.
            RanksDisagreeError: later, on all ranks: they have logged different names. Says which.
        """
        self.logged.add(str(self.active_phase), name, value, weight, reduce)

    def event(self, event: str, **fields: Any) -> None:
        """Report a single event to the run's sinks, on rank 0."""
        if self.recorder is not None:
            self.recorder.event(event, **fields)
        elif self.notes is not None:
            self.notes.event({"event": event, **fields})

    def stop(self) -> None:
        """Stop after the current step, on all ranks: any rank may ask, and the ranks agree before the next step.

        With accumulation, the current update is finished first.
        """
        self.stopped_by_script = True
        self.stop_for_signal()

    def stop_for_signal(self) -> None:
        """Like `stop`, for a run that is to be resumed later. Only sets flags."""
        self.stop_requested = True
        if self.alone:
            self.should_stop = True

    def go_on_from_progress(self) -> None:
        """Called by a callback that has restored unit and loader on all ranks: the loop continues from there."""
        self.rolled_back = True

    def agree_to_stop(self) -> None:
        """Called by the loop once every rank knows that one has asked for a stop."""
        self.should_stop = True

    def active_phase_state(self) -> PhaseState | None:
        phase_state: PhaseState | None = getattr(self, f"{self.active_phase}_state")
        return phase_state
