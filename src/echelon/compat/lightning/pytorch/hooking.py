"""A module's and its callbacks' hooks, called from echelon's loop in Lightning's order; and what is logged in them.

Unlike in echelon's loop, an epoch's evaluation comes before `on_train_epoch_end`, so that this hook sees its numbers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch.automatic import AutomaticUnit
from echelon.compat.lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping
from echelon.compat.lightning.pytorch.hooks import LOGS, overridden
from echelon.compat.lightning.pytorch.logged import How, Results
from echelon.compat.lightning.pytorch.manual import ManualUnit
from echelon.compat.trainer.rank import Outputs
from echelon.data.chain import Chain
from echelon.loop.state import EntryPoint, State
from echelon.parallel.patching import for_now
from echelon.world import agree

__all__ = ["Hooking"]

logger = logging.getLogger(__name__)


def _starts(phase: str) -> Any:
    return lambda self, state, unit: self._start(phase, state)


def _calls(hook: str) -> Any:
    """A hook of the loop that only calls this hook of Lightning's."""
    return lambda self, state, unit: self.call(hook)


class Hooking(Outputs):
    """
    Args:
        trainer: has the options; the module's code sees it.
    Attributes:
        unit: the unit that is trained, once it is built.
        loop_state: echelon's State.
        max_updates: when to stop a module with manual optimization; the loop stops others.
        may_stop: whether the user's code may ask for a stop within a step.
        has_stepped: the latest batch ended with an update, and the next one has not begun.
        was_evaluated: `fit` has evaluated.
        silent: nothing is logged.
        results: what was logged, by phase.
        evaluated: the numbers of the latest evaluation or test.
        chains: the loaders of evaluation and prediction, by phase.
    """

    is_of_unit = True

    def __init__(self, trainer: Any, module: Any) -> None:
        super().__init__()
        self.trainer, self.module = trainer, module
        self.unit: Any = None
        self.loop_state: Any = None
        self.max_updates: float | None = None
        self.keeps, self.saves = trainer.keeps_predictions, False
        self.has_stepped = self.was_evaluated = self.silent = False
        self.batch_idx = 0
        self.results = {name: Results(name) for name in ("train", "validation", "test", "predict")}
        self.evaluated: dict[str, torch.Tensor] = {}
        self.chains: dict[str, Chain] = {}
        self._evaluated_batches = Counter[tuple[str, int]]()  # of each loader: the step for its logged numbers
        self._open = self._postponed = self._plateaus_due = self._is_told = False

    @property
    def latest_saved(self) -> str:
        """The path of this run's newest checkpoint, or "" without one."""
        return next((c.latest_saved for c in self.trainer.checkpoint_callbacks if c.latest_saved), "")

    # --- training

    def on_train_start(self, state: State, unit: Any) -> None:
        trainer = self.trainer
        self.loop_state, trainer.state.stage = state, "train"
        trainer.current_epoch = unit.train_progress.num_epochs_completed
        self._open = unit.train_progress.num_steps_completed_in_epoch > 0  # the epoch is resumed
        if state.eval_state is not None and unit.train_progress.evaluation_due and not self._open:
            # The run was stopped between an epoch's last batch and its evaluation. The epoch is closed after the evaluation.
            self._postponed = self._plateaus_due = True
            trainer.current_epoch -= 1
        self.call("on_train_start")

    def on_train_epoch_start(self, state: State, unit: Any) -> None:
        self.has_stepped = False
        self.trainer.current_epoch, self._open = unit.train_progress.num_epochs_completed, True
        self.call("on_train_epoch_start")

    def on_train_step_start(self, state: State, unit: Any) -> None:
        self.has_stepped = False
        self.batch_idx = unit.train_progress.num_steps_completed_in_epoch

    def on_train_step_end(self, state: State, unit: Any) -> None:
        trainer, phase_state = self.trainer, state.train_state
        assert phase_state is not None
        batch_idx = unit.train_progress.num_steps_completed_in_epoch - 1
        outputs, batch = _as_dict(unit, phase_state.step_output), unit.batch
        self.has_stepped = unit.at_boundary
        self.publish("train", step=True, write=False)
        self.call("on_train_batch_end", outputs, batch, batch_idx)
        unit.batch = None
        self.publish("train", step=True, write=unit.at_boundary and self.logs_now)
        if unit.at_boundary and isinstance(unit, AutomaticUnit):
            unit.schedules.step("step", batch_idx + 1, trainer.callback_metrics)
        if self.max_updates is not None and unit.updates >= self.max_updates:
            state.stop()
        self._stop_if_asked(state, unit)

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        self._plateaus_due = True
        self._postponed = state.eval_state is not None and unit.train_progress.evaluation_due and not state.should_stop
        if not self._postponed:
            self._close_epoch(state, unit)

    def _close_epoch(self, state: State, unit: Any) -> None:
        trainer = self.trainer
        trainer.state.stage = "train"
        self._open = self._postponed = False
        if isinstance(unit, ManualUnit):
            self._tell_of_uncounted_steps(unit)
        self.publish("train", step=False, write=False)
        self.call_at_epoch_end(lambda: self._step_plateaus(unit, last=True))
        self.publish("train", step=False, write=True)
        self.results["train"].reset()
        trainer.current_epoch += 1
        self._stop_if_asked(state, unit)

    def on_train_end(self, state: State, unit: Any) -> None:
        is_signal = state.should_stop and not state.stopped_by_script
        if not is_signal and (self._postponed or (self._open and unit.train_progress.num_steps_completed_in_epoch)):
            self._close_epoch(state, unit)
        for saver in self.trainer.checkpoint_callbacks if is_signal and unit.at_boundary else ():
            self.saves = saver.save_at_stop(self.trainer) or self.saves
        self.call("on_train_end")

    def _step_plateaus(self, unit: Any, *, last: bool) -> None:
        """Once an epoch, advance ReduceLROnPlateau as soon as its metrics are known: before a checkpoint is saved."""
        if not self._plateaus_due or not isinstance(unit, AutomaticUnit):
            return
        metrics = self.trainer.callback_metrics
        waiting = [s for s in unit.schedules.all if s.reduce_on_plateau and s.interval == "epoch" and s.monitor not in metrics]
        if last or not waiting:
            self._plateaus_due = False
            unit.schedules.step("epoch", unit.train_progress.num_epochs_completed, metrics)

    def _tell_of_uncounted_steps(self, unit: ManualUnit) -> None:
        """Warn once, at the end of an epoch in which no step was counted."""
        asks = [f"max_steps={self.max_updates}"] if self.max_updates is not None else []
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
        trainer = self.trainer
        self.call("on_validation_end")
        if state.entry_point is not EntryPoint.FIT:
            return
        self.was_evaluated, trainer.state.stage = True, "train"
        if self._postponed:
            self._close_epoch(state, unit)
        else:
            self._stop_if_asked(state, unit)

    def on_test_epoch_end(self, state: State, unit: Any) -> None:
        self._end_epoch("test")

    def _start(self, phase: str, state: State) -> None:
        trainer = self.trainer
        self.loop_state = state
        trainer.state.stage = "sanity_check" if trainer.sanity_checking else "validate" if phase == "validation" else phase
        self.results[phase].reset()
        self.call(f"on_{phase}_start")

    def _end_epoch(self, phase: str) -> None:
        trainer = self.trainer
        self.results[phase].dataloader_idx = None
        self.publish(phase, step=False, write=False)
        self.call(f"on_{phase}_epoch_end")
        self.evaluated = self.publish(phase, step=False, write=not trainer.sanity_checking)

    # --- hooks, of callbacks and of the module

    def hook(self, name: str) -> AbstractContextManager[None]:
        """Context of a hook in the module's code, so that `self.log` knows the hook."""
        return for_now(self.module, _hook=name)

    def call(self, name: str, *args: Any) -> None:
        """Call a hook: callbacks first, then the module."""
        with self.hook(name):
            self._call_callbacks(name, self.trainer.lightning_callbacks, args)
            answer = getattr(self.module, name)(*args) if hasattr(self.module, name) else None
        if name == "on_train_batch_start" and answer == -1:
            raise UsageError("on_train_batch_start returned -1, to leave out the rest of the epoch. Use limit_train_batches.")

    def call_at_epoch_end(self, meanwhile: Callable[[], None]) -> None:
        """Call `on_train_epoch_end`. Callbacks that monitor what the module logs in it come last."""
        name = "on_train_epoch_end"
        last = [each for each in self.trainer.lightning_callbacks if isinstance(each, (Checkpoint, EarlyStopping))]
        with self.hook(name):
            self._call_callbacks(name, [each for each in self.trainer.lightning_callbacks if each not in last], ())
            getattr(self.module, name)()
            self.publish("train", step=False, write=False)
            meanwhile()
            self._call_callbacks(name, last, ())

    def _call_callbacks(self, name: str, callbacks: list[Any], args: tuple[Any, ...]) -> None:
        for callback in callbacks:
            if overridden(name, callback, Callback):
                getattr(callback, name)(self.trainer, self.module, *args)

    # --- what is logged

    def take(self, hook: str, name: str, value: Any, how: How, batch_size: float | None, *, add_idx: bool) -> None:
        stage = self.trainer.state.stage
        phase = "validation" if stage in ("validate", "sanity_check") else stage
        if self.silent:
            return
        one = self.results[phase].log(hook, name, value, how, batch_size, add_idx=add_idx)
        _, in_step = LOGS[hook]
        if (phase == "train" and how.on_step) if in_step else how.on_epoch:  # for readers in the same hook
            self.trainer.callback_metrics.update(one.so_far(step=in_step))

    def publish(self, phase: str, *, step: bool, write: bool, at: int | None = None) -> dict[str, torch.Tensor]:
        """Give the numbers of a step or of an epoch to callbacks, loggers and the Trainer's attributes. Collective, as the
        phase's results are.

        Args:
            at: the step that loggers get, by default `log_step`.
        Returns:
            the numbers for loggers, by name.
        """
        trainer, results, logged = self.trainer, self.results[phase], dict[str, torch.Tensor]()
        for one, value in results.of_step() if step else results.of_epoch():
            name, forked = one.names(step=step)
            if phase == "train" or not step:
                trainer.callback_metrics.update({name: value, forked: value})
            if one.how.prog_bar:
                trainer.progress_bar_metrics[forked] = float(value)
            if one.how.logger:
                logged[forked] = value
        trainer.logged_metrics.update(logged)
        if write and trainer.loggers:
            values = {name: float(value) for name, value in logged.items()}
            given = values.pop("step", at)
            if values:
                place = {"epoch": trainer.current_epoch} if given is None else {}
                self.write_metrics({**place, **values}, trainer.log_step if given is None else int(given))
        return logged

    def write_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for logger in self.trainer.loggers if agree.is_rank0() else ():
            logger.log_metrics(dict(metrics), step=step)
            logger.save()

    @property
    def logs_now(self) -> bool:
        """Whether this step's numbers are written."""
        trainer, every = self.trainer, self.trainer.log_every_n_steps
        return bool(trainer.should_stop or (every > 0 and (trainer.log_step + 1) % every == 0))

    def end_evaluation_batch(self, phase: str) -> None:
        if not self.trainer.sanity_checking:
            place = phase, self.results[phase].dataloader_idx or 0
            self.publish(phase, step=True, write=True, at=self._evaluated_batches[place])
            self._evaluated_batches[place] += 1


def _as_dict(unit: Any, output: Any) -> dict[str, Any]:
    """A step's outputs, as `on_train_batch_end` gets them."""
    loss = None
    if isinstance(unit, AutomaticUnit):
        loss, output = output
    outputs = dict(output) if isinstance(output, Mapping) else {"loss": output} if output is not None else {}
    if loss is not None:
        outputs["loss"] = loss
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in outputs.items()}
