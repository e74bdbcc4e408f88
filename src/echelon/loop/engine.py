"""One call of an entry point: the loop that serves all phases, its hooks, and what the ranks agree on meanwhile.

`loop/run.py` has the story and the public functions.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from echelon.contracts import pulse
from echelon.contracts.errors import EchelonError, UsageError
from echelon.contracts.pulse import Phase
from echelon.contracts.rank import RankInfo
from echelon.contracts.redact import redacted
from echelon.contracts.stopping import REQUEUE
from echelon.data.loader import Loader
from echelon.data.place import Combined, Placed, loaders_of
from echelon.data.prefetch import Feed, known_length
from echelon.data.workers import explain
from echelon.loop import agreements
from echelon.loop.accept import KINDS, callbacks_of, check_unit, inner_of, is_real, keeps, overrides
from echelon.loop.callback import Callback
from echelon.loop.hooks import Hook, Hooks
from echelon.loop.optimizer_checks import check_tracked
from echelon.loop.progress import Progress
from echelon.loop.record import Recorder
from echelon.loop.state import ActivePhase, EntryPoint, PhaseState, State, TimerProtocol
from echelon.loop.unit import TrainUnit, wants_iterator
from echelon.observe.sinks.folder import default_sinks
from echelon.world import agree, stop

__all__ = ["Run"]

logger = logging.getLogger(__name__)

# Hooks of a training step, from which a callback may ask for a stop.
_STEP_HOOKS = [f"on_train_{name}" for name in ("get_next_batch_start", "get_next_batch_end", "step_start", "step_end")]


class Run:
    """One call of an entry point."""

    def __init__(self, state: State, unit: Any, callbacks: list[Callback] | None, phases: list[str]) -> None:
        entry = state.entry_point.name.lower()
        for phase in phases:
            check_unit(unit, phase, entry, getattr(state, f"{phase}_state").dataloader)
        self.state, self.unit, self.callbacks = state, unit, callbacks_of(callbacks)
        self._inner = inner_of(unit)
        self.hooks = {phase: Hooks(phase, unit, self.callbacks, state.timer) for phase in phases}
        state.alone = not agree.is_joined()
        if state.alone and (launched := RankInfo().world_size) > 1:
            logger.warning(
                "%s ranks were launched, but this process has not joined them and runs alone: call echelon.init_from_env()",
                launched,
            )
        self._agree_each_step = False

    # --- the whole run

    def train(self) -> None:
        state, progress, phase = self.state, self.unit.train_progress, self.state.train_state
        assert phase is not None
        if phase.max_epochs is None and phase.max_steps is None and not phase.endless:
            raise UsageError(
                f"{state.entry_point.name.lower()}() needs max_epochs or max_steps: without both it would never end. Give "
                "max_epochs=math.inf for a run that ends when something calls state.stop()."
            )
        with stop.listening(state.stop_for_signal), self._running(), torch.enable_grad(), self._mode("train"):
            if stop.asked() is not None:  # before this loop began
                state.stop_for_signal()
            agreements.on_limits(phase, progress)
            self._begin("train")
            check_tracked(self._inner)
            self._agree_on_agreeing()
            self._agree_to_stop()
            self._event("train_start", total_steps=self._total_steps(), step=progress.num_steps_completed)
            self._make_up_for_evaluation()
            while not self._done(phase, progress):
                if not self._epoch("train"):
                    break
            if state.recorder is not None:
                state.recorder.flush()
            by_script = state.stopped_by_script = state.should_stop and agree.any_rank(state.stopped_by_script)
            self._inner.phase_ended(state, "train")
            self._call(self.hooks["train"].end)
            self._event("train_end", step=progress.num_steps_completed)
            leaves = self._leaves(phase, progress, by_script)
        if leaves:
            raise SystemExit(REQUEUE)

    def _leaves(self, phase: PhaseState, progress: Progress, by_script: bool) -> bool:
        """Whether this run was asked to stop by a signal, on any rank, before it was complete or ended by its own script."""
        heard = next((signal for signal in agree.gather(stop.asked()) if signal is not None), None)
        if heard is None:
            return False
        stop.asked_elsewhere(heard)
        if by_script or self._complete(phase, progress):
            return False
        stop.leaving()
        step, saved = progress.num_steps_completed, any(getattr(c, "saves", False) is True for c in self.callbacks)
        self._event("stopped", step=step, signal=heard, saved=saved)
        but = "" if saved else ", nothing saved: there is no DistributedCheckpointSaver"
        logger.warning("%s: stopped after step %s%s; exit code %s asks to be started again", heard, step, but, REQUEUE)
        return True

    def once(self, phase: str) -> None:
        """One epoch of a phase other than training."""
        stop.leave_if_asked()
        with stop.listening(), self._running():
            self._evaluation(phase)

    def _evaluation(self, phase: str) -> None:
        within_fit = self.state.entry_point is EntryPoint.FIT
        # Sharded parameters that were touched under inference_mode can never be trained again.
        plain = within_fit or self._inner.forward_is_collective or phase != "predict"
        with torch.no_grad() if plain else torch.inference_mode(), self._mode("eval"):
            self._event("eval_start", phase=phase, within_fit=within_fit)
            self._begin(phase)
            with self._inner.evaluating():
                whole = self._epoch(phase)
            self._call(self.hooks[phase].end)
            loss = getattr(self.unit, "eval_loss", None) if phase == "eval" and whole else None
            step = self.unit.train_progress.num_steps_completed if isinstance(self.unit, TrainUnit) else None
            self._event(
                "eval_end", phase=phase, within_fit=within_fit, step=step, eval_loss=loss if isinstance(loss, float) else None
            )

    def _evaluate_within_fit(self) -> None:
        if not self.unit.train_progress.evaluation_due or self.state.should_stop:
            return  # both intervals ended here, or the run is about to end
        self.state.active_phase = ActivePhase.EVALUATE
        self._evaluation("eval")
        self.state.active_phase = ActivePhase.TRAIN
        if self.state.recorder is not None:
            self.state.recorder.pause_clock()

    def _make_up_for_evaluation(self) -> None:
        """An evaluation that the state which was restored was saved before."""
        if self.state.eval_state is not None and self.unit.train_progress.evaluation_due:
            self._evaluate_within_fit()
            self._agree_to_stop()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Sinks around the run, and `on_exception` for whatever ends it, a Ctrl-C included."""
        state, rank = self.state, dist.get_rank() if agree.is_joined() else 0
        sinks = default_sinks() if rank == 0 else []
        if sinks:
            state.recorder = Recorder(sinks, getattr(self._inner, "weight_unit", "samples"))
        try:
            yield
        except BaseException as error:
            # A loader's worker may die at any moment of a step.
            named = explain(error)
            self._tell(named or error)
            if named is not None:
                raise named from error
            raise
        self._close_sinks()
        pulse.leave()

    def _tell(self, error: BaseException) -> None:
        """Everyone who wants to know of the error. What fails meanwhile is logged and hides neither the error nor the rest."""
        leaves = isinstance(error, SystemExit) and error.code == REQUEUE and stop.asked() is not None
        told: list[Callable[[], None]] = [
            lambda: (
                self._event("stopped", signal=stop.asked(), saved=False)
                if leaves
                else self._event("exception", kind=type(error).__name__, message=redacted(str(error)))
            ),
            lambda: self.unit.on_exception(self.state, error),
            *(partial(c.on_exception, self.state, self.unit, error) for c in self.callbacks if overrides(c, "on_exception")),
            self._close_sinks,
        ]
        for tell in told:
            try:
                tell()
            except Exception:
                logger.exception("while %s was being reported", type(error).__name__)

    def _close_sinks(self) -> None:
        recorder, self.state.recorder = self.state.recorder, None
        if recorder is not None:
            recorder.close()

    @contextlib.contextmanager
    def _mode(self, mode: str) -> Iterator[None]:
        """Modules in train or eval mode, and put back as they were, each submodule by itself, whatever happens."""
        modules = [m for root in self._inner.tracked_modules().values() for m in root.modules()]
        before = [(m, m.training) for m in modules]
        for root in self._inner.tracked_modules().values():
            root.train(mode == "train")
        try:
            yield
        finally:
            for module, training in before:
                module.training = training

    def _begin(self, phase: str) -> None:
        self._inner.phase_started(self.state, phase)
        self._place_loader(phase)
        self._call(self.hooks[phase].start)

    def _place_loader(self, phase: str) -> None:
        """Ranks that compute the same samples together, as with tensor parallelism, must be given the same."""
        loader = getattr(self.state, f"{phase}_state").dataloader
        place = self._inner.data_place
        if isinstance(loader, (Placed, Combined)) and place is not None:
            loader.place(*place)

    def _call(self, hooks: tuple[Hook, ...]) -> None:
        for hook in hooks:
            hook(self.state, self.unit)

    def _event(self, event: str, **fields: Any) -> None:
        if self.state.recorder is not None:
            self.state.recorder.event(event, **fields)

    # --- one epoch

    def _epoch(self, phase: str) -> bool:
        """Run one epoch; False if a stop or max_steps cut it short."""
        state, hooks = self.state, self.hooks[phase]
        progress: Progress = getattr(self.unit, f"{phase}_progress")
        within_fit = state.entry_point is EntryPoint.FIT
        if phase != "train":
            progress.num_steps_completed_in_epoch = 0  # an evaluation that was interrupted begins anew
        if progress.num_steps_completed_in_epoch == 0:
            self._call(hooks.epoch_start)
        whole = self._steps(phase, progress)
        if self.state.went_back:
            self.state.went_back = False
            self._make_up_for_evaluation()  # the older state may be from before one
            return True
        if within_fit and phase == "eval":
            whole = not agree.any_rank(not whole)  # without collectives in it, ranks leave an evaluation one by one
            if not whole:
                progress.abandon_epoch()
        if not whole:
            if within_fit and phase == "train" and progress.evaluation_due:  # max_steps ended the training
                self._agree_to_stop()
                self._evaluate_within_fit()
                self._agree_to_stop()
            return False
        if progress.num_steps_completed_in_epoch == 0:
            self._warn_of_nothing(phase)
        progress.increment_epoch()
        self._inner.epoch_closed(state, phase)
        if within_fit:
            if phase == "eval":
                self.unit.train_progress.evaluation_due = False
            elif self._evaluates_after_epoch(progress):
                progress.evaluation_due = True  # before a checkpoint is written at the epoch's end
        self._call(hooks.epoch_end)
        if phase == "train":
            self._agree_to_stop()
            if within_fit and progress.evaluation_due:
                self._evaluate_within_fit()
                self._agree_to_stop()
        return True

    def _marks_due(self, here: PhaseState, progress: Progress) -> bool:
        """Note an evaluation that belongs after this step, before a checkpoint is written at it; True if it comes at once.

        The last step of all that `max_steps` allows is evaluated, too: where it ends an epoch, once that is closed.
        """
        steps, done = here.evaluate_every_n_steps, progress.num_steps_completed
        at_once = steps is not None and done % steps == 0
        if at_once or (done == here.max_steps and (steps or here.evaluate_every_n_epochs)):
            progress.evaluation_due = True
        return at_once

    def _evaluates_after_epoch(self, progress: Progress) -> bool:
        here = self.state.train_state
        assert here is not None
        epochs, steps = here.evaluate_every_n_epochs, here.evaluate_every_n_steps
        just_evaluated = steps and progress.num_steps_completed % steps == 0
        return bool(epochs and progress.num_epochs_completed % epochs == 0 and not just_evaluated)

    def _warn_of_nothing(self, phase: str) -> None:
        here = self.state.active_phase_state()
        if phase == "train" and here is not None and here.max_epochs is None:
            raise UsageError(
                "the loader gave no batch, and without max_epochs training would go on for ever. Is it a used-up iterator?"
            )
        logger.warning("the loader of this %s epoch gave no batch. Is it a used-up iterator?", phase)

    def _steps(self, phase: str, progress: Progress) -> bool:
        """The steps of one epoch; True if it came to its end."""
        unit, inner, state, hooks = self.unit, self._inner, self.state, self.hooks[phase]
        here = state.active_phase_state()
        assert here is not None
        feed = self._feed(phase, here, progress)
        step, fetch = self._step_and_fetch(phase, feed)
        before_step = hooks.next_end + hooks.step_start
        waits, durations = here.iteration_timer.series("data_wait_time"), here.iteration_timer.series(f"{phase}_iteration_time")
        clock = time.perf_counter
        beat = self._beat(phase, progress)
        fetching, stepping = (Phase.DATA, Phase.STEP) if phase == "train" else (Phase.EVAL_DATA, Phase.EVAL_STEP)
        in_step = self._inner.forward_is_collective or any(getattr(c, "meets_in_steps", False) is True for c in self.callbacks)
        in_step = in_step or getattr(here.dataloader, "meets_in_steps", False)
        agrees = not state.alone and (phase == "train" or in_step)
        per_step_agreement = phase == "train" and self._agree_each_step
        may_evaluate = phase == "train" and state.eval_state is not None
        unsized = agreements.on_lengths(phase, feed, self.unit) if agrees else False
        given_up = False
        cuts = agreements.cuts_evaluation(state, together=in_step) if phase == "eval" else None
        while not (state.should_stop and (inner.at_boundary or phase != "train")) and (cuts is None or not cuts.asked()):
            for hook in hooks.next_start:
                hook(state, unit)
            beat(fetching)
            start = clock()
            try:
                batch = fetch()
            except StopIteration:
                if unsized:
                    agreements.on_end(phase, feed.used, ended=True)
                given_up = feed.used < (feed.total or 0)  # by a get_next_*_batch of the unit's own: its epoch ends here
                break
            if unsized:
                agreements.on_end(phase, feed.used, ended=False)
            if progress.skipped and phase == "train" and progress.skips:
                self._skip(progress, feed, batch)
                if may_evaluate and self._marks_due(here, progress):
                    self._evaluate_within_fit()
                    self._agree_to_stop()
                continue
            fetched = clock()
            beat(stepping)
            waits.append(fetched - start)
            for hook in before_step:
                hook(state, unit)
            try:
                here.step_output = step(state, batch)
            except StopIteration:
                if batch is not feed:
                    raise EchelonError(
                        f"{type(unit).__name__}.{phase}_step raised StopIteration; annotate its data as Iterator."
                    ) from None
                break
            progress.num_steps_completed += 1
            progress.num_steps_completed_in_epoch += 1
            evaluates = may_evaluate and self._marks_due(here, progress)
            durations.append(clock() - fetched)
            beat(Phase.AFTER if phase == "train" else fetching)
            for hook in hooks.step_end:
                hook(state, unit)
            here.step_output = None
            if state.went_back:
                break
            if per_step_agreement and inner.at_boundary:
                self._agree_to_stop()
            if evaluates:
                self._evaluate_within_fit()
                self._agree_to_stop()
        beat(Phase.BETWEEN)
        if cuts is not None:
            cuts.settle()
        ended = state.went_back or given_up or self._ended(here, feed, progress)
        if ended:
            here.feed = None  # an epoch that was cut short keeps it: a checkpoint at the end wants its position
        return ended

    def _beat(self, phase: str, progress: Progress) -> Callable[[int], None]:
        """Tells whoever watches this rank where it is: called a few times a step, for a fraction of a microsecond."""
        pulse.begin()
        at = pulse.at
        if phase == "train":
            return lambda place: at(place, progress.num_steps_completed)
        trained = self.unit.train_progress.num_steps_completed if isinstance(self.unit, TrainUnit) else 0
        return lambda place: at(place, trained, progress.num_steps_completed_in_epoch)

    def _skip(self, progress: Progress, feed: Feed, batch: Any) -> None:
        """Count a step without training on its batch."""
        if batch is feed:  # a step that fetches for itself
            next(feed, None)
        progress.increment_step()

    def _step_and_fetch(self, phase: str, feed: Feed) -> tuple[Callable[[State, Any], Any], Callable[[], Any]]:
        """The unit's step, timed if the user asked for it, and the call that gets a batch for it."""
        unit, state, method = self.unit, self.state, f"get_next_{phase}_batch"
        step: Callable[[State, Any], Any] = getattr(unit, f"{phase}_step")
        fetch: Callable[[], Any] = feed.__next__
        if wants_iterator(step):
            fetch = partial(_itself, feed)
        elif is_real(unit) and not keeps(unit, method, KINDS[phase]):
            fetch = partial(getattr(unit, method), state, feed)
        if state.timer is None:
            return step, fetch
        own = fetch.func is _itself if isinstance(fetch, partial) else False  # a step that waits for its own batches
        step = _timed(state.timer, f"{type(unit).__name__}.{phase}_step", step)
        return step, fetch if own else _timed(state.timer, f"{phase}.next(data_iter)", fetch)

    def _ended(self, here: PhaseState, feed: Feed, progress: Progress) -> bool:
        """Whether the epoch came to its end, rather than being cut short by a stop or by max_steps."""
        if here.max_steps_per_epoch is not None and progress.num_steps_completed_in_epoch >= here.max_steps_per_epoch:
            return True
        if feed.length is not None:
            return feed.used >= feed.length
        return not (self.state.should_stop or (here.max_steps is not None and progress.num_steps_completed >= here.max_steps))

    def _feed(self, phase: str, here: PhaseState, progress: Progress) -> Feed:
        hooks, loader = self.hooks[phase], here.dataloader
        limits = []
        if here.max_steps_per_epoch is not None:
            limits.append(here.max_steps_per_epoch - progress.num_steps_completed_in_epoch)
        if here.max_steps is not None:
            limits.append(here.max_steps - progress.num_steps_completed)
        for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(progress.num_epochs_completed)
        if isinstance(loader, Placed):
            # The unit's progress says where an epoch goes on; a loader that was looked into or stopped early does not.
            progress.num_steps_completed_in_epoch = loader.seek(progress.num_steps_completed_in_epoch)
        for part in loaders_of(loader):
            if isinstance(part, Loader):
                self._check_tail(phase, part)
        goes_on = phase == "train" and progress.num_steps_completed_in_epoch > 0 and not isinstance(loader, Placed)
        by_its_state = goes_on and hasattr(loader, "load_state_dict")
        if goes_on and not by_its_state and known_length(loader) == progress.num_steps_completed_in_epoch:
            loader = ()  # the epoch was whole when it was saved
        elif goes_on and not by_its_state:
            logger.warning(
                "training goes on after step %s of an epoch, but %s has no state: it begins anew. echelon.Loader goes on.",
                progress.num_steps_completed_in_epoch,
                type(loader).__name__,
            )
        goes_on_after = progress.num_steps_completed_in_epoch if by_its_state else 0
        self._call(hooks.iter_start)
        move, stream = self._inner.placement(phase)
        if move is not None:
            state, to_device = self.state, move

            def move(batch: Any, non_blocking: bool) -> Any:
                return to_device(state, batch, non_blocking)

        limit, parts = max(0, min(limits)) if limits else None, self._inner.parts_of_step(phase)
        timer = self.state.timer
        make: Callable[..., Feed] = Feed if timer is None else _timed(timer, f"{phase}.iter(dataloader)", Feed)
        here.feed = feed = make(loader, limit=limit, move=move, stream=stream, parts=parts, resumed=goes_on_after)
        self._call(hooks.iter_end)
        return feed

    def _check_tail(self, phase: str, loader: Loader) -> None:
        if not self._inner.weighs_padding and (loader.pads or (phase == "train" and loader.is_uneven)):
            raise UsageError(
                f"the last global batch ({loader.order.length % loader.global_batch} samples) cannot be shared evenly by "
                f"{loader.dp[1]} ranks, and only AutoUnit weighs shares by their size. Use Loader(..., tail='drop')."
            )

    # --- what ranks agree on

    def _agree_on_agreeing(self) -> None:
        """Find out once whether a stop can come from a hook; only then do the ranks agree after every step."""
        state = self.state
        if not state.alone:
            stoppers = any(
                getattr(c, "may_stop", True) and any(overrides(c, hook) for hook in _STEP_HOOKS) for c in self.callbacks
            )
            self._agree_each_step = agree.any_rank(stoppers or not self._inner.agrees_to_stop)

    def _agree_to_stop(self) -> None:
        state = self.state
        if not state.alone and agree.any_rank(state.stop_requested):
            state.agree_to_stop()

    # --- limits

    def _done(self, phase: PhaseState, progress: Progress) -> bool:
        return self.state.should_stop or phase.is_complete(progress)

    def _complete(self, phase: PhaseState, progress: Progress) -> bool:
        """Whether nothing is left to do, an evaluation included that belongs to the last step."""
        return phase.is_complete(progress) and not (self.state.eval_state is not None and progress.evaluation_due)

    def _total_steps(self) -> int | None:
        """Steps when the run is complete, as far as lengths tell."""
        phase = self.state.train_state
        assert phase is not None
        bounds = [phase.max_steps] if phase.max_steps is not None else []
        try:
            per_epoch: int | None = len(phase.dataloader)  # type: ignore[arg-type]
        except TypeError:
            per_epoch = None
        if phase.max_steps_per_epoch is not None:
            per_epoch = phase.max_steps_per_epoch if per_epoch is None else min(per_epoch, phase.max_steps_per_epoch)
        if phase.max_epochs is not None and per_epoch is not None:
            bounds.append(phase.max_epochs * per_epoch)
        return min(bounds, default=None)


def _timed(timer: TimerProtocol, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        with timer.time(name):
            return call(*args, **kwargs)

    return timed


def _itself(feed: Feed) -> Feed:
    return feed
