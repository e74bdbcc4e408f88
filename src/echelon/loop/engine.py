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
from echelon.data.multi_loader import MultiDataLoader, loaders_of
from echelon.data.place import Placed
from echelon.data.prefetch import NO_STEP, Feed, known_length
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

    def _begin(self, phase: str) -> None:
        self._inner.phase_started(self.state, phase)
        self._place_loader(phase)
        self._call(self.hooks[phase].start)

    def _place_loader(self, phase: str) -> None:
        """Ranks that compute the same samples together, as with tensor parallelism, must be given the same."""
        loader = getattr(self.state, f"{phase}_state").dataloader
        place = self._inner.data_place
        if isinstance(loader, (Placed, MultiDataLoader)) and place is not None:
            loader.place(*place)

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

    def _warn_of_nothing(self, phase: str) -> None:
        here = self.state.active_phase_state()
        if phase == "train" and here is not None and here.max_epochs is None:
            raise UsageError(
                "the loader gave no batch, and without max_epochs training would go on for ever. Is it a used-up iterator?"
            )
        logger.warning("the loader of this %s epoch gave no batch. Is it a used-up iterator?", phase)

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


@contextlib.contextmanager
def _mode(inner: Unit, mode: str) -> Iterator[None]:
    """Modules in train or eval mode, and put back as they were, each submodule by itself, whatever happens."""
    roots = inner.tracked_modules().values()
    before = [(m, m.training) for root in roots for m in root.modules()]
    for root in roots:
        root.train(mode == "train")
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
