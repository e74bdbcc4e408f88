"""A module's and its callbacks' hooks, called from echelon's loop in Lightning's order.

Unlike in echelon's loop, an epoch's evaluation comes before `on_train_epoch_end`, so that this hook sees its numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from echelon.compat.lightning.pytorch.automatic import AutomaticUnit
from echelon.compat.lightning.pytorch.manual import ManualUnit
from echelon.loop.callback import Callback
from echelon.loop.state import EntryPoint, State
from echelon.world import agree
from echelon.world.device import copy_data_to_device

__all__ = ["Hooking"]

logger = logging.getLogger(__name__)


def _starts(phase: str) -> Any:
    return lambda self, state, unit: self._start(phase, state)


def _calls(hook: str) -> Any:
    """A hook of the loop that only calls this hook of Lightning's."""
    return lambda self, state, unit: self.session.call(hook)


class Hooking(Callback):
    """
    Args:
        max_updates: when to stop a module with manual optimization; the loop stops others.
        may_stop: whether the user's code may ask for a stop within a step.
    Attributes:
        outputs: what `predict_step` returned.
        evaluated: the numbers of the latest evaluation or test.
    """

    is_of_unit = True

    def __init__(self, session: Any, max_updates: float | None, *, may_stop: bool) -> None:
        self.session, self.trainer, self._max_updates = session, session.trainer, max_updates
        self.may_stop, self.saves = may_stop, False
        self.outputs: list[Any] = []
        self.evaluated: dict[str, torch.Tensor] = {}
        self._open = self._postponed = self._plateaus_due = self._is_told = False

    @property
    def latest_saved(self) -> str:
        """The path of this run's newest checkpoint, or "" without one."""
        return next((c.latest_saved for c in self.trainer.checkpoint_callbacks if c.latest_saved), "")

    # --- training

    def on_train_start(self, state: State, unit: Any) -> None:
        session, trainer = self.session, self.trainer
        session.loop_state, trainer.state.stage = state, "train"
        trainer.current_epoch = unit.train_progress.num_epochs_completed
        self._open = unit.train_progress.num_steps_completed_in_epoch > 0  # the epoch is resumed
        if state.eval_state is not None and unit.train_progress.evaluation_due and not self._open:
            # The run was stopped between an epoch's last batch and its evaluation. The epoch is closed after the evaluation.
            self._postponed = self._plateaus_due = True
            trainer.current_epoch -= 1
        session.call("on_train_start")

    def on_train_epoch_start(self, state: State, unit: Any) -> None:
        self._count_step()
        self.trainer.current_epoch, self._open = unit.train_progress.num_epochs_completed, True
        self.session.call("on_train_epoch_start")

    def on_train_step_start(self, state: State, unit: Any) -> None:
        self._count_step()
        self.session.batch_idx = unit.train_progress.num_steps_completed_in_epoch

    def on_train_step_end(self, state: State, unit: Any) -> None:
        session, trainer, phase_state = self.session, self.trainer, state.train_state
        assert phase_state is not None
        batch_idx = unit.train_progress.num_steps_completed_in_epoch - 1
        outputs, batch = _as_dict(unit, phase_state.step_output), unit.batch
        session.has_stepped = unit.at_boundary
        session.publish("train", step=True, write=False)
        session.call("on_train_batch_end", outputs, batch, batch_idx)
        unit.batch = None
        session.publish("train", step=True, write=unit.at_boundary and session.logs_now)
        if unit.at_boundary and isinstance(unit, AutomaticUnit):
            unit.schedules.step("step", batch_idx + 1, trainer.callback_metrics)
        if self._max_updates is not None and unit.updates >= self._max_updates:
            state.stop()
        self._stop_if_asked(state, unit)

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        self._plateaus_due = True
        self._postponed = state.eval_state is not None and unit.train_progress.evaluation_due and not state.should_stop
        if not self._postponed:
            self._close_epoch(state, unit)

    def _close_epoch(self, state: State, unit: Any) -> None:
        session, trainer = self.session, self.trainer
        trainer.state.stage = "train"
        self._open = self._postponed = False
        if isinstance(unit, ManualUnit):
            self._tell_of_uncounted_steps(unit)
        session.publish("train", step=False, write=False)
        session.call_at_epoch_end(lambda: self._step_plateaus(unit, last=True))
        session.publish("train", step=False, write=True)
        session.results["train"].reset()
        trainer.current_epoch += 1
        self._stop_if_asked(state, unit)

    def on_train_end(self, state: State, unit: Any) -> None:
        is_signal = state.should_stop and not state.stopped_by_script
        if not is_signal and (self._postponed or (self._open and unit.train_progress.num_steps_completed_in_epoch)):
            self._close_epoch(state, unit)
        for saver in self.trainer.checkpoint_callbacks if is_signal and unit.at_boundary else ():
            self.saves = saver.save_at_stop(self.trainer) or self.saves
        self.session.call("on_train_end")

    def _step_plateaus(self, unit: Any, *, last: bool) -> None:
        """Once an epoch, advance ReduceLROnPlateau as soon as its metrics are known: before a checkpoint is saved."""
        if not self._plateaus_due or not isinstance(unit, AutomaticUnit):
            return
        metrics = self.trainer.callback_metrics
        waiting = [s for s in unit.schedules.all if s.reduce_on_plateau and s.interval == "epoch" and s.monitor not in metrics]
        if last or not waiting:
            self._plateaus_due = False
            unit.schedules.step("epoch", unit.train_progress.num_epochs_completed, metrics)

    def _count_step(self) -> None:
        if self.session.has_stepped:
            self.session.has_stepped = False
            self.trainer.log_step += 1

    def _tell_of_uncounted_steps(self, unit: ManualUnit) -> None:
        """Warn once, at the end of an epoch in which no step was counted."""
        asks = [f"max_steps={self._max_updates}"] if self._max_updates is not None else []
        asks += [f"{type(c).__name__}(every_n_train_steps=...)" for c in self.trainer.checkpoint_callbacks if c.counts_steps]
        if unit.updates == 0 and asks and not self._is_told and agree.is_rank0():
            self._is_told = True
            logger.warning(
                "global_step is still 0, so %s waits for ever: steps are counted of optimizers that self.optimizers() gives, "
                "as Lightning does. Take these in training_step",
                " and ".join(asks),
            )

    def _stop_if_asked(self, state: State, unit: Any) -> None:
        trainer = self.trainer
        progress = unit.train_progress
        enough = (trainer.min_epochs or 0) <= progress.num_epochs_completed and (trainer.min_steps or 0) <= unit.updates
        if trainer.should_stop and enough:
            state.stop()

    # --- evaluation and prediction

    on_eval_start, on_test_start, on_predict_start = map(_starts, ("validation", "test", "predict"))
    on_eval_epoch_start, on_test_epoch_start = map(_calls, ("on_validation_epoch_start", "on_test_epoch_start"))
    on_predict_epoch_start, on_predict_epoch_end = map(_calls, ("on_predict_epoch_start", "on_predict_epoch_end"))
    on_test_end, on_predict_end = map(_calls, ("on_test_end", "on_predict_end"))

    def on_eval_epoch_end(self, state: State, unit: Any) -> None:
        self._end_epoch("validation")
        if self._postponed:
            self._step_plateaus(unit, last=False)

    def on_eval_end(self, state: State, unit: Any) -> None:
        session, trainer = self.session, self.trainer
        session.call("on_validation_end")
        if state.entry_point is not EntryPoint.FIT:
            return
        session.was_evaluated, trainer.state.stage = True, "train"
        if self._postponed:
            self._close_epoch(state, unit)
        else:
            self._stop_if_asked(state, unit)

    def on_test_epoch_end(self, state: State, unit: Any) -> None:
        self._end_epoch("test")

    def _start(self, phase: str, state: State) -> None:
        session, trainer = self.session, self.trainer
        session.loop_state = state
        trainer.state.stage = "sanity_check" if trainer.sanity_checking else "validate" if phase == "validation" else phase
        if phase in session.results:
            session.results[phase].reset()
        session.call(f"on_{phase}_start")

    def _end_epoch(self, phase: str) -> None:
        session, trainer = self.session, self.trainer
        session.results[phase].dataloader_idx = None
        session.publish(phase, step=False, write=False)
        session.call(f"on_{phase}_epoch_end")
        self.evaluated = session.publish(phase, step=False, write=not trainer.sanity_checking)

    def on_predict_step_end(self, state: State, unit: Any) -> None:
        phase_state = state.predict_state
        if phase_state is not None and not phase_state.step.is_padding and self.trainer.keeps_predictions:
            self.outputs.append(copy_data_to_device(phase_state.step_output, torch.device("cpu")))


def _as_dict(unit: Any, output: Any) -> dict[str, Any]:
    """A step's outputs, as `on_train_batch_end` gets them."""
    loss = None
    if isinstance(unit, AutomaticUnit):
        loss, output = output
    outputs = dict(output) if isinstance(output, Mapping) else {"loss": output} if output is not None else {}
    if loss is not None:
        outputs["loss"] = loss
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in outputs.items()}
