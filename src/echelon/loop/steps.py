"""The steps of one epoch: fetch a batch, take the step, run its hooks, and do what is due after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from echelon.common.errors import EchelonError, LoopError
from echelon.contracts import pulse
from echelon.contracts.pulse import Phase
from echelon.data.base import BaseLoader
from echelon.data.chain import Chain, loaders_of
from echelon.data.loader import Loader
from echelon.data.prefetch import NO_STEP, Feed, known_length
from echelon.data.replayed import Replayed, with_state
from echelon.data.stream import StreamLoader
from echelon.loop import agreements
from echelon.loop.progress import Progress
from echelon.loop.stage import Stage, timed
from echelon.loop.state import EvaluateEvery, PhaseState
from echelon.loop.unit import TrainedUnit, Unit, wants_iterator
from echelon.loop.validate import KINDS, keeps
from echelon.world import agree, clock
from echelon.world.clock import Part

__all__ = ["Batches", "Steps", "check_evaluation", "evaluation_after_epoch", "open_feed", "own_fetch"]

logger = logging.getLogger(__name__)


class Steps:
    """The steps of one epoch. The constructor looks up what every step needs.

    Args:
        agree_to_stop: called after each step that ends an accumulation window; None if the unit's own messages carry stops.
        evaluate: runs an evaluation when one is due; None outside `fit`.
    """

    def __init__(
        self, stage: Stage, agree_to_stop: Callable[[], None] | None = None, evaluate: Callable[[], None] | None = None
    ) -> None:
        state, phase = stage.state, stage.phase
        self.stage, self.agree_to_stop, self.evaluate = stage, agree_to_stop, evaluate
        self.feed = open_feed(stage)
        self.batches = Batches(self.feed, stage.phase_state, stage.progress, stage.inner)
        self.take = timed(state.timer, f"{stage.entry}.next(data_iter)", self.feed.__next__)
        meets = stage.inner.forward_is_collective or any(getattr(c, "meets_in_steps", False) is True for c in stage.callbacks)
        meets = meets or getattr(stage.phase_state.dataloader, "meets_in_steps", False)
        loader = stage.phase_state.dataloader
        unsized = False  # the loaders have no length, so the ranks must agree batch by batch
        if not state.alone and (stage.trains or meets):  # ranks with fewer batches would leave the others waiting
            remedy = "Give every rank a loader of the same length, whose sampler draws alike on all ranks; echelon.Loader does."
            length, drawn = self.feed.length, agreements.drawn_by(loader)
            agree.same_on_all(f"the {phase} steps of this epoch", " of ".join([str(length), *drawn]) if drawn else length, remedy)
            unsized = self.feed.length is None
        self._drops = isinstance(loader, StreamLoader) and loader.tail == "drop"
        fetch = own_fetch(stage, self.batches, always=unsized)
        self.fetch = partial(self._fetch_agreed, fetch) if unsized and fetch is not None else fetch
        self.cuts = None if stage.trains or state.alone else agreements.CutShort(state, together=meets)
        self.given_up = False
        self.left_out = 0  # micro-batches so far of an update that is skipped
        # Shown to whoever watches this rank: updates made, then micro-batches of the next update, or steps of an evaluation.
        self.trained, self.within = (stage.progress, Progress()) if stage.trains else (_trained(stage.unit), stage.progress)

    def run(self) -> bool:
        """Take all steps. True if the epoch came to its end, False if it was cut short."""
        stage, steps = self.stage, self.each()
        state, phase_state, name = stage.state, stage.phase_state, f"{stage.phase}_step"
        step = timed(state.timer, f"{type(stage.unit).__name__}.{name}", getattr(stage.unit, name))
        for data in steps:
            try:
                phase_state.step_output = step(state, data)
            except StopIteration as stop:
                self._check_iterates(data, stop)
                break
        return self.close()

    def each(self) -> Iterator[Any]:
        """Yield the batches. Asking for the next one says that the step on the last is done; what is due after that step then
        happens here. Call `close` at the end.
        """
        stage, fetch, take, cuts = self.stage, self.fetch, self.take, self.cuts
        state, inner, hooks, phase_state, progress = stage.state, stage.inner, stage.hooks, stage.phase_state, stage.progress
        trains, before_step = stage.trains, hooks.next_end + hooks.step_start
        evaluate, next_start, within = self.evaluate, hooks.next_start, self.within
        running, at = clock.running, pulse.at
        (fetching, stepping, _), (in_data, in_step), trained = _BEATS[trains], _PARTS[trains], self.trained
        most, per_epoch, enough = phase_state.max_updates, phase_state.updates_per_epoch, False
        meets = self.agree_to_stop is not None or evaluate is not None
        pulse.begin()
        while not enough and not (state.should_stop and (inner.at_boundary or not trains)) and (cuts is None or not cuts.asked()):
            stage.call(next_start)
            at(fetching, trained.num_updates_completed, within.num_steps_completed_in_epoch)
            if running is not None:
                running.enter(in_data)
            try:
                if fetch is not None:
                    data = fetch()
                else:
                    phase_state.step = taken = take()
                    data = taken.batch
            except StopIteration:
                # The unit's own get_next_*_batch ended the epoch, not a limit.
                self.given_up = self.feed.used < (self.feed.total or 0) and phase_state.steps_left(progress, inner) != 0
                break
            if progress.skipped and trains and progress.skips:
                self._leave_out(data, progress)
                continue
            at(stepping, trained.num_updates_completed, within.num_steps_completed_in_epoch)
            if before_step:
                stage.call(before_step)
            if running is not None:
                running.enter(in_step)
            yield data
            updated = trains and inner.has_updated
            progress.increment_step(updated=updated)
            if updated:
                within.num_steps_completed_in_epoch = 0
                # The feed does not know this limit if the unit's own step makes more updates than its window would.
                at_limit = progress.num_updates_completed == most or progress.num_updates_completed_in_epoch == per_epoch
                enough = at_limit and self.feed.used != self.feed.total
            elif trains:
                within.num_steps_completed_in_epoch += 1
            evaluates = evaluate is not None and evaluation_after_step(phase_state, progress, updated=updated)
            if running is not None:
                running.step_ended(progress.num_updates_completed)
            if meets or hooks.step_end:  # asked in each step: a user's own loop gets its hooks with its first update
                self._follow(evaluates)
            phase_state.step_output = None
            if state.rolled_back:
                break

    def _follow(self, evaluates: bool) -> None:
        """After a step: run hooks, agree on a stop, evaluate."""
        stage = self.stage
        pulse.at(_BEATS[stage.trains][2], self.trained.num_updates_completed, self.within.num_steps_completed_in_epoch)
        stage.call(stage.hooks.step_end)
        stage.phase_state.step_output = None
        if stage.state.rolled_back:
            return
        if self.agree_to_stop is not None and stage.inner.at_boundary:
            self.agree_to_stop()
        if evaluates and self.evaluate is not None:
            self.evaluate()

    def _fetch_agreed(self, fetch: Callable[[], Any]) -> Any:
        """Fetch a batch from loaders without length, and agree that all ranks have one more batch, or none has."""
        feed, phase_state, phase, drops = self.feed, self.stage.phase_state, self.stage.phase, self._drops
        try:
            data = fetch()
        except StopIteration:
            agreements.on_end(phase, feed.used, ended=True, is_last=False, drops=drops)
            raise
        before = clock.enter(Part.WAIT)
        is_last = data is not self.batches and phase_state.step.is_last  # a step that is given the iterator has not fetched yet
        with_it = agreements.on_end(phase, feed.used, ended=False, is_last=is_last, drops=drops)
        clock.enter(before)
        if with_it is not None:
            feed.end(after=feed.used if with_it else feed.used - 1)
            phase_state.step = phase_state.step._replace(is_last=True)
            if not with_it:
                raise StopIteration
        return data

    def _leave_out(self, data: Any, progress: Progress) -> None:
        """Count a step without training on its batch. An evaluation that is due after it still runs."""
        if data is self.batches:  # the step would have fetched its batch from the iterator
            next(self.batches, None)
        self.left_out += 1
        phase_state = self.stage.phase_state
        updated = phase_state.step.is_last or self.left_out >= self.stage.inner.steps_until(updates=1)
        self.left_out = 0 if updated else self.left_out
        progress.increment_step(updated=updated)
        if self.evaluate is not None and evaluation_after_step(phase_state, progress, updated=updated):
            self.evaluate()

    def _check_iterates(self, data: Any, stop: StopIteration) -> None:
        """Refuse a StopIteration from a step that was not given the iterator."""
        if data is not self.batches:
            raise EchelonError(
                f"{type(self.stage.unit).__name__}.{self.stage.phase}_step raised StopIteration, which may only come from a step "
                "that is given an iterator. Give next() a default, or catch it; or annotate the step's data as Iterator."
            ) from stop

    def close(self) -> bool:
        """After the last batch: True if the epoch came to its end, False if it was cut short."""
        phase_state, progress = self.stage.phase_state, self.stage.progress
        pulse.at(Phase.BETWEEN, self.trained.num_updates_completed, self.within.num_steps_completed_in_epoch)
        if self.cuts is not None:
            self.cuts.settle()
        self.fetch = None  # breaks a cycle with this object, which would keep the loader's workers
        ended = self.stage.state.rolled_back or self.given_up or _ended(self.stage, self.feed, progress)
        if ended:
            # An epoch that was cut short keeps its feed: a checkpoint at the end needs the position.
            phase_state.feed, phase_state.step = None, NO_STEP
        return ended


# Phases shown while a batch is fetched, in a step, and after it; by whether the stage trains.
_BEATS = {
    trains: tuple(map(int, phases))
    for trains, phases in {
        True: (Phase.DATA, Phase.STEP, Phase.AFTER),
        False: (Phase.EVAL_DATA, Phase.EVAL_STEP, Phase.EVAL_DATA),
    }.items()
}
# Parts of the clock while a batch is fetched, and when a step begins; the step then marks its own parts, if it can.
_PARTS = {True: (int(Part.DATA), int(Part.STEP)), False: (int(Part.EVAL), int(Part.EVAL))}


def _trained(unit: Any) -> Progress:
    """Training progress of a unit that is evaluated; a new one if it has none."""
    return unit.train_progress if isinstance(unit, TrainedUnit) else Progress()


def _ended(stage: Stage, feed: Feed, progress: Progress) -> bool:
    """Whether the epoch came to its end, rather than being cut short by a stop or by a limit on the whole run."""
    phase_state = stage.phase_state
    if phase_state.has_whole_epoch(progress):
        return True
    return feed.length is None and not (stage.state.should_stop or phase_state.has_all(progress))


# --- when an evaluation is due within `fit`


def evaluation_after_step(phase_state: PhaseState, progress: Progress, *, updated: bool) -> bool:
    """Note in progress that an evaluation is due after this step, so that a checkpoint at this step holds it. True if it runs
    right after the step.

    One is also due after the last step that `max_updates` or `max_steps` allows; if that step ends an epoch, it runs once the
    epoch is closed.

    Args:
        updated: the step made an update.
    """
    at_once = _is_multiple(phase_state, progress, updated=updated)
    if at_once or (
        (updated or phase_state.max_steps is not None)
        and phase_state.has_all(progress)
        and phase_state.evaluations != EvaluateEvery()
    ):
        progress.evaluation_due = True
    return at_once


def _is_multiple(phase_state: PhaseState, progress: Progress, *, updated: bool) -> bool:
    every = phase_state.evaluations
    by_updates = updated and every.updates is not None and progress.num_updates_completed % every.updates == 0
    return by_updates or (every.steps is not None and progress.num_steps_completed % every.steps == 0)


def evaluation_after_epoch(phase_state: PhaseState, progress: Progress) -> None:
    """Note in progress that an evaluation is due after the epoch just counted, before a checkpoint is written at its end."""
    epochs, done = phase_state.evaluate_every_n_epochs, progress.num_epochs_completed
    is_due = (epochs and done % epochs == 0) or (phase_state.evaluations.at_end and done == phase_state.max_epochs)
    if is_due and not _is_multiple(phase_state, progress, updated=True):
        progress.evaluation_due = True


# --- how an epoch's batches reach the unit: where the loader resumes, how many batches it may give, and who fetches them


class Batches(Iterator[Any]):
    """The batches of a feed for the unit's code, which may take several per step. The phase's `step` has the latest position."""

    def __init__(self, feed: Feed, phase_state: PhaseState, progress: Progress, unit: Unit) -> None:
        self._feed, self._here, self._progress, self._unit = feed, phase_state, progress, unit

    def __next__(self) -> Any:
        step = self._feed.__next__()
        if not step.is_last and self._here.steps_left(self._progress, self._unit) == 1:
            step = step._replace(is_last=True)
        self._here.step = step
        return step.batch

    def itself(self) -> Batches:
        """The data of a step that fetches its own batches."""
        return self

    def within_limits(self, fetch: Callable[[], Any]) -> Any:
        """Call `fetch` if the run's limits allow one more step."""
        if self._here.steps_left(self._progress, self._unit) == 0:
            raise StopIteration
        return fetch()


def own_fetch(stage: Stage, batches: Batches, *, always: bool) -> Callable[[], Any] | None:
    """The call that gets a step's data if the unit fetches by itself: by its own get_next method, or in a step that iterates.

    Args:
        always: for other units, return a call for the next of `batches` instead of None.
    """
    if wants_iterator(getattr(stage.unit, f"{stage.phase}_step", None)):
        return partial(batches.within_limits, batches.itself)
    fetch: Callable[[], Any] = batches.__next__
    if _fetches(stage):
        own = partial(getattr(stage.unit, f"get_next_{stage.phase}_batch"), stage.state, batches)
        fetch = partial(batches.within_limits, own)
    elif not always:
        return None
    return timed(stage.state.timer, f"{stage.entry}.next(data_iter)", fetch)


def _fetches(stage: Stage) -> bool:
    """Whether the unit overrides the method that fetches a step's data."""
    return not keeps(stage.unit, f"get_next_{stage.phase}_batch", KINDS[stage.phase])


def open_feed(stage: Stage) -> Feed:
    """Make the iterator of the coming epoch, which continues where progress stands. Runs the hooks around iterator creation."""
    phase_state, progress, inner = stage.phase_state, stage.progress, stage.inner
    own = wants_iterator(getattr(stage.unit, f"{stage.phase}_step", None)) or _fetches(stage)
    limit = None if own else phase_state.steps_left(progress, inner)  # a step that fetches by itself may take several batches
    _seek(phase_state.dataloader, progress)
    for part in loaders_of(phase_state.dataloader):
        if isinstance(part, Loader):
            _check_tail(stage, part)
        elif isinstance(part, StreamLoader):
            part.pads = _weighs_padding(stage)
    loader, resumed = _resumed(stage)
    stage.call(stage.hooks.iter_start)
    move, stream = inner.placement(stage.phase)
    timer, name = stage.state.timer, f"{type(stage.unit).__name__}.{stage.entry}"
    read: Callable[..., Any] = next
    if move is not None:
        move = timed(timer, f"{name}.move_data_to_device", partial(move, stage.state))
        read = timed(timer, f"{name}.next(data_iter)", next)
    make = timed(timer, f"{stage.entry}.iter(dataloader)", Feed)
    phase_state.step = NO_STEP
    phase_state.feed = feed = make(loader, limit=limit, move=move, stream=stream, resumed=resumed, read=read)
    stage.call(stage.hooks.iter_end)
    return feed


def _seek(loader: Any, progress: Progress) -> None:
    """Set the loader's epoch and, if it can seek, its position in the epoch."""
    for each in loaders_of(loader):
        for part in (each, getattr(each, "sampler", None), getattr(each, "batch_sampler", None)):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(progress.num_epochs_completed)
        if each is not loader and isinstance(each, BaseLoader):
            each.seek(0)
    if isinstance(loader, BaseLoader):
        # The unit's progress decides where an epoch continues: the loader may have been read from, or stopped early.
        progress.num_steps_completed_in_epoch = loader.seek(progress.num_steps_completed_in_epoch)


def _resumed(stage: Stage) -> tuple[Any, int]:
    """What to iterate over, and how many batches of the epoch its own state has already passed."""
    given, done = stage.phase_state.dataloader, stage.progress.num_steps_completed_in_epoch
    if not stage.trains or isinstance(given, BaseLoader):
        return given, 0
    loader = with_state(given)
    if done == 0:
        return loader, 0
    if not isinstance(loader, Replayed) and hasattr(loader, "load_state_dict"):
        return loader, done
    if known_length(given) == done:
        return (), 0  # the epoch was complete when it was saved
    if isinstance(loader, Replayed):
        kept = any(state is loader.loader.dataset for state in stage.unit.app_state().values())  # and so at its own position
        if not kept and loader.goes_on(done):
            return loader, done
    logger.warning(
        "training resumes after step %s of an epoch, but the position of the %s is not known: it starts over, unless its dataset "
        "goes on by itself. echelon.Loader resumes",
        done,
        type(given).__name__,
    )
    return loader, 0


def check_evaluation(stage: Stage) -> None:
    """When `fit` begins, refuse an evaluation loader that would be refused only after an epoch of training.

    Raises:
        UsageError: on all ranks: they cannot divide the loader.
    """
    phase_state = stage.phase_state
    if phase_state.evaluations == EvaluateEvery():
        return
    loader, rank_and_size = phase_state.dataloader, stage.inner.data_rank_and_size
    if isinstance(loader, (BaseLoader, Chain)) and rank_and_size is not None:
        loader.set_data_rank(*rank_and_size)
    for part in loaders_of(loader):
        if isinstance(part, BaseLoader):
            _ = part.dp  # raises if the ranks cannot divide it
        if isinstance(part, Loader):
            _check_tail(stage, part)


def _weighs_padding(stage: Stage) -> bool:
    inner = stage.inner
    return bool(inner.weighs_padding or (inner.weighs_padding_in_evaluation and not stage.trains))


def _check_tail(stage: Stage, loader: Loader) -> None:
    if _weighs_padding(stage):
        return
    if loader.pads or (stage.trains and loader.is_uneven):
        raise LoopError(
            f"the last global batch ({loader.samples % loader.global_batch} samples) cannot be divided evenly among "
            f"{loader.dp[1]} ranks, and only AutoUnit weighs shares by their size. Use Loader(..., tail='drop'), or "
            "DataLoader(..., drop_last=True)."
        )
