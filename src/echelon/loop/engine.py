"""One call of an entry point: its epochs, the evaluations between them, and how it ends.

`loop/run.py` has the outline and the public functions; `steps` has the steps of an epoch and where their batches come from.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from echelon.common.errors import LoopError
from echelon.contracts.rank import RankInfo
from echelon.contracts.stopping import REQUEUE
from echelon.data.base import BaseLoader
from echelon.data.chain import Chain
from echelon.loop import agreements
from echelon.loop.agreements import warn_of_same_samples
from echelon.loop.auto.optimizer_checks import check_tracked
from echelon.loop.callback import Callback
from echelon.loop.checkpointing.frozen import look_at_built
from echelon.loop.modes import in_mode
from echelon.loop.replicas import check_ranks
from echelon.loop.reporting import profiling
from echelon.loop.reporting.reporting import Reporting
from echelon.loop.stage import Hooks, Stage
from echelon.loop.state import ActivePhase, EntryPoint, State
from echelon.loop.steps import Steps, check_evaluation, evaluation_after_epoch
from echelon.loop.unit import TrainedUnit
from echelon.loop.validate import callbacks_of, check_unit, has_hook, inner_of, no_end, tell_of_unsaved_state
from echelon.parallel.guards.guard import Guard, explain
from echelon.world import agree, clock, rng, stop
from echelon.world.clock import Part
from echelon.world.handshake import check_same_setup
from echelon.world.init import World

__all__ = ["Run"]

logger = logging.getLogger(__name__)

# Hooks of a training step, from which a callback may ask for a stop.
_STEP_HOOKS = [f"on_train_{name}" for name in ("get_next_batch_start", "get_next_batch_end", "step_start", "step_end")]


class Run:
    """One call of an entry point."""

    def __init__(self, state: State, unit: Any, callbacks: list[Callback] | None, phases: list[str]) -> None:
        self._check(state, unit, phases)
        self.state, self.unit, self.callbacks = state, unit, callbacks_of(callbacks)
        if "train" in phases:
            self.callbacks += profiling.asked_for()
        self._inner = inner_of(unit)
        self._stages = {
            phase: Stage(phase, state, unit, self._inner, self.callbacks, Hooks(phase, unit, self.callbacks, state.timer))
            for phase in phases
        }
        self._reporting = Reporting(state, unit, self.callbacks, getattr(self._inner, "weight_unit", "samples"))
        state.alone = not agree.is_joined()
        if state.alone and (launched := RankInfo().world_size) > World.current(torch.device("cpu")).size:
            logger.warning(
                "%s ranks were launched, but this process has not joined them and runs alone: call echelon.init_from_env()",
                launched,
            )
        self._agree_after_step: Callable[[], None] | None = None
        self._guards: list[Guard] = []  # of all trained modules

    def _check(self, state: State, unit: Any, phases: list[str]) -> None:
        for phase in phases:
            check_unit(unit, phase, state.entry_point.name.lower(), getattr(state, f"{phase}_state").dataloader)

    # --- the whole run

    def train(self) -> None:
        """Train from where the unit's progress stands until a limit is reached or the ranks agree to stop."""
        state, stage = self.state, self._stages["train"]
        phase_state, progress = stage.phase_state, stage.progress
        if not phase_state.has_limit and not phase_state.endless:
            raise no_end(state.entry_point.name.lower())
        with self._training(), torch.enable_grad(), in_mode(self._inner, "train"), self._explained():
            self._begin_training(stage)
            self._inner.resumes_with = None
            self._evaluate_if_due()  # the restored checkpoint may have been saved before an evaluation
            while not state.should_stop and not phase_state.is_complete(progress):
                whole = self._open_epoch(stage).run()
                if not self._epoch_ended(stage, whole=whole):  # a stop or a limit on the whole run cut it short
                    break
            leaves = self._end_training(stage)
        self._let_go()
        if leaves:
            raise SystemExit(REQUEUE)

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        """Context of training: handles stop signals, and reports errors to sinks and callbacks."""
        with stop.listening(self.state.stop_for_signal), self._reporting.running():
            yield

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Context in which errors of torch in a step of the user's own are explained. An AutoUnit explains those of its own."""
        try:
            yield
        except RuntimeError as error:
            modules = self._inner.prepared_modules().values() if self._inner.steps_by_itself else ()
            explain((guard for module in modules for guard in module.guards), error)
            raise

    def _begin_training(self, stage: Stage) -> None:
        state, phase_state, progress = self.state, stage.phase_state, stage.progress
        check_same_setup()
        if stop.asked() is not None:  # a signal came before this loop began
            state.stop_for_signal()
        agreements.on_limits(phase_state, progress, self.callbacks, getattr(self._inner, "window", None))
        self._begin(stage)
        if state.eval_state is not None:
            check_evaluation(self._stages["eval"])
        self._guards = check_tracked(self._inner)
        tell_of_unsaved_state(self.callbacks, self.unit)
        self._tell_of_epoch()
        self._agree_on_agreeing()
        self._agree_to_stop()
        self._take_up_streams()
        self._take_up_logged(stage)
        of_window = self._inner.steps_until(updates=2) - self._inner.steps_until(updates=1)  # a window may be open
        total = phase_state.total_updates(of_window)
        self._reporting.training_begins(total, progress.num_updates_completed, reached=phase_state.limit_of(progress))

    def _take_up_streams(self) -> None:
        """Load the RNG states of a restored unit, whatever the script has drawn since it was saved."""
        if (streams := self._inner.resumes_with) is not None:
            rng.load_states(streams)

    def _take_up_logged(self, stage: Stage) -> None:
        """Go on with what a restored unit had logged. Of an epoch that had ended when it was saved, that is settled now."""
        if (logged := self._inner.resumes_logged) is None:
            return
        self._inner.resumes_logged = None
        self.state.logged.load_state_dict(logged, self._inner.tracked_metrics())
        if stage.progress.num_steps_completed_in_epoch == 0:
            self._settle_logged(stage)

    def _let_go(self) -> None:
        for each in self._stages.values():  # ends the loaders' workers now, without waiting for the garbage collector
            each.phase_state.feed = None

    def _end_training(self, stage: Stage) -> bool:
        """End training. True if the process should exit with code 75 and be started again."""
        state = self.state
        if state.recorder is not None:
            state.recorder.flush()
        state.stopped_by_script = state.should_stop and agree.any_rank(state.stopped_by_script)
        self._inner.phase_ended(state, "train")
        check_ranks(self._inner)
        stage.call(stage.hooks.end)
        self.state.event("train_end", step=stage.progress.num_updates_completed)
        return self._leaves(stage)

    def _leaves(self, stage: Stage) -> bool:
        """Whether a signal on any rank stopped this run before it was complete or its own script ended it."""
        heard = agree.first_not_none(stop.asked())
        if heard is None:
            return False
        stop.asked_elsewhere(heard)
        complete = stage.phase_state.is_complete(stage.progress) and not (
            self.state.eval_state is not None and stage.progress.evaluation_due
        )
        if self.state.stopped_by_script or complete:
            return False
        stop.leaving()
        step, saved = stage.progress.num_updates_completed, any(getattr(c, "saves", False) is True for c in self.callbacks)
        # The latest checkpoint of a callback that saves on its own schedule.
        older = None if saved else next((str(p) for c in self.callbacks if (p := getattr(c, "latest_saved", None))), None)
        self.state.event("stopped", step=step, signal=heard, saved=saved, **({"latest": older} if older else {}))
        but = "" if saved else f", last saved as {older}" if older else ", nothing saved: there is no DistributedCheckpointSaver"
        logger.warning("%s: stopped after update %s%s; exit code %s asks to be started again", heard, step, but, REQUEUE)
        return True

    def once(self, phase: str) -> None:
        """One epoch of a phase other than training."""
        stop.leave_if_asked()
        with stop.listening(), self._reporting.running(), clock.during(Part.EVAL):
            if self._inner.meets_at_end(phase):  # else a rank that evaluates alone would pair with another collective
                agree.unless_same(f"the beginning of the {phase} epoch", 0)
            self._evaluate(self._stages[phase])

    def _begin(self, stage: Stage) -> None:
        self._inner.phase_started(self.state, stage.phase)
        if stage.trains:
            look_at_built(self._inner)
        loader = stage.phase_state.dataloader
        # Ranks that compute the same samples together, as with tensor parallelism, must get the same batches. The user divides
        # loaders of other libraries.
        if isinstance(loader, (BaseLoader, Chain)) and (rank_and_size := self._inner.data_rank_and_size) is not None:
            loader.set_data_rank(*rank_and_size)
        if stage.trains and not self.state.alone:
            warn_of_same_samples(loader, self._inner)
        stage.call(stage.hooks.start)

    # --- an epoch of training

    def _open_epoch(self, stage: Stage) -> Steps:
        if stage.progress.num_steps_completed_in_epoch == 0:
            stage.call(stage.hooks.epoch_start)
            self._agree_to_stop()  # epoch_start hooks may have asked for a stop, frozen or unfrozen parameters
            if stage.progress.num_epochs_completed:
                self._tell_of_epoch()
        evaluates = self.state.eval_state is not None
        return Steps(stage, self._agree_after_step, self._evaluate_if_due if evaluates else None)

    def _epoch_ended(self, stage: Stage, *, whole: bool) -> bool:
        """After the epoch's last step; False if the run ends here."""
        state = self.state
        if state.rolled_back:
            state.rolled_back = False
            self._evaluate_if_due()  # the older state may have been saved before an evaluation
            return True
        if not whole:
            if state.eval_state is not None and stage.progress.evaluation_due:  # a limit ended the training
                self._agree_to_stop()
                self._evaluate_if_due()
            else:
                self._settle_doubts()  # the last step may have left some
            return False
        self._close_epoch(stage)
        self._agree_to_stop()
        self._evaluate_if_due()
        return True

    def _close_epoch(self, stage: Stage) -> None:
        progress, within_fit = stage.progress, self.state.entry_point is EntryPoint.FIT
        if progress.num_steps_completed_in_epoch == 0:
            _tell_of_nothing(stage)
        progress.increment_epoch()
        self._inner.epoch_closed(self.state, stage.phase)
        if within_fit and stage.trains:
            evaluation_after_epoch(stage.phase_state, progress)
        elif within_fit:
            self.unit.train_progress.evaluation_due = False
        self.state.settle_logged = partial(self._settle_logged, stage)
        stage.call(stage.hooks.epoch_end)
        self.state.settle_logged = None
        self._settle_logged(stage)
        self._inner.numbers_settled(self.state, stage.phase)

    def _settle_logged(self, stage: Stage) -> None:
        """Reduce and record the numbers that were logged in this epoch and are not recorded yet."""
        state, phase = self.state, stage.phase
        together = stage.trains or state.entry_point is EntryPoint.FIT or self._inner.meets_at_end(phase)
        numbers = state.logged.end_phase(phase, together=together)
        progress = self.unit.train_progress if isinstance(self.unit, TrainedUnit) else stage.progress
        if phase == "eval":
            state.logged.evaluated_at = progress.num_steps_completed
        if state.recorder is not None and numbers:
            prefix = "" if stage.trains else f"{phase}_"
            state.recorder.numbers(progress.num_updates_completed, {prefix + name: value for name, value in numbers.items()})

    # --- an evaluation, a prediction, a test

    def _evaluate_if_due(self) -> None:
        """Within `fit`, run an evaluation that is due or was cut short, unless the run is about to end."""
        state = self.state
        if state.eval_state is None or not self.unit.train_progress.evaluation_due:
            return
        if not state.should_stop:
            state.active_phase = ActivePhase.EVALUATE
            before = clock.enter(Part.EVAL)
            self._evaluate(self._stages["eval"])
            clock.enter(before)
            state.active_phase = ActivePhase.TRAIN
            if state.recorder is not None:
                state.recorder.pause_clock()
        self._agree_to_stop()

    def _evaluate(self, stage: Stage) -> None:
        phase, within_fit = stage.phase, self.state.entry_point is EntryPoint.FIT
        # Sharded parameters that were used under inference_mode can never be trained again.
        plain = within_fit or self._inner.forward_is_collective or phase != "predict"
        with torch.no_grad() if plain else torch.inference_mode(), in_mode(self._inner, "eval"):
            self.state.event("eval_start", phase=phase, within_fit=within_fit)
            drawn = rng.states() if within_fit else None
            self._begin(stage)
            with self._inner.evaluating():
                whole = self._evaluation_epoch(stage)
            # Training draws the same numbers as without an evaluation; an evaluation that was cut short will draw the same again.
            if drawn is not None:
                rng.put_back(drawn)
            stage.call(stage.hooks.end)
            whole = whole and phase == "eval"
            loss = getattr(self.unit, "eval_loss", None) if whole and getattr(self.unit, "has_eval_loss", True) else None
            step = self.unit.train_progress.num_updates_completed if isinstance(self.unit, TrainedUnit) else None
            eval_loss = loss if isinstance(loss, float) else None
            logged = self.state.logged.latest.get("eval", {}) if whole else {}
            numbers = {"eval_loss": eval_loss, "logged": logged}
            self.state.event("eval_end", phase=phase, within_fit=within_fit, step=step, **numbers)

    def _evaluation_epoch(self, stage: Stage) -> bool:
        """One pass over the loader; False if it was cut short."""
        stage.progress.num_steps_completed_in_epoch = 0  # an interrupted evaluation starts over
        stage.call(stage.hooks.epoch_start)
        whole = Steps(stage).run()
        within_fit = self.state.entry_point is EntryPoint.FIT
        if within_fit or self._inner.meets_at_end(stage.phase):
            whole = not agree.any_rank(not whole)  # ranks leave an evaluation without collectives one by one
        if not whole:
            self.state.logged.discard(stage.phase)
        if within_fit and not whole:
            stage.progress.abandon_epoch()
        if whole:
            self._close_epoch(stage)
        return whole

    # --- what ranks agree on

    def _agree_on_agreeing(self) -> None:
        """Choose once how ranks learn of a stop. If a step hook may ask for one, they agree after every step. Else the messages
        of the unit's windows tell it; or, if the unit sends none, a message that is read one step later.
        """
        if self.state.alone:
            return
        stoppers = any(getattr(c, "may_stop", True) and any(has_hook(c, hook) for hook in _STEP_HOOKS) for c in self.callbacks)
        sends = self._inner.agrees_to_stop
        if agree.any_rank(stoppers or (not sends and getattr(self.unit, "may_stop", True))):
            self._agree_after_step = self._agree_to_stop
        elif agree.any_rank(not sends):
            self._agree_after_step = partial(self._agree_later, agree.AnyRanksLater())

    @clock.during(Part.WAIT)
    def _agree_later(self, any_ranks: agree.AnyRanksLater) -> None:
        self._act_upon(*any_ranks(*self._flags()))

    @clock.during(Part.WAIT)
    def _agree_to_stop(self) -> None:
        if not self.state.alone:
            self._act_upon(*agree.any_ranks(self._flags()))

    def _flags(self) -> list[bool]:
        """This rank's stop request, and which guards are in doubt."""
        return [self.state.stop_requested, *[each.in_doubt for each in self._guards]]

    def _tell_of_epoch(self) -> None:
        for each in self._guards:
            each.begin_epoch(self._inner.prepared_modules(), self._inner.tracked_optimizers())

    def _settle_doubts(self) -> None:
        self._compare(*agree.any_ranks([each.in_doubt for each in self._guards]))

    def _compare(self, *doubts: bool) -> None:
        for each, doubt in zip(self._guards, doubts, strict=True):
            if doubt:
                each.compare()

    def _act_upon(self, stop: bool, *doubts: bool) -> None:
        self._compare(*doubts)
        if stop:
            self.state.agree_to_stop()


def _tell_of_nothing(stage: Stage) -> None:
    """Warn of an epoch without a batch.

    Raises:
        UsageError: training has no max_epochs, so without batches it would never end.
    """
    if stage.trains and stage.phase_state.max_epochs is None:
        raise LoopError("the loader gave no batch, and without max_epochs training would never end. Is it a used-up iterator?")
    logger.warning("No steps completed during %s epoch! The loader gave no batch. Is it a used-up iterator?", stage.entry)
