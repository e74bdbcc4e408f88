"""When a Trainer logs, evaluates and saves: transformers' own callbacks decide, between the steps of echelon's loop."""

from __future__ import annotations

import json
import math
from typing import Any

from transformers import trainer_callback as theirs

from echelon.common.errors import UsageError
from echelon.compat.trainer.rank import length_of
from echelon.compat.transformers.losses import takes
from echelon.compat.transformers.saving import Saver
from echelon.compat.transformers.unit import needs_metric, set_mode
from echelon.data.loader import Loader
from echelon.loop.callback import Callback
from echelon.loop.state import State
from echelon.world import agree

__all__ = ["Flow", "History"]

# Fields of TrainerState that a resumed run needs.
_REMEMBERED = ("log_history", "best_metric", "best_global_step", "best_model_checkpoint")
_WHOLE_UPDATES = ("on_pre_optimizer_step", "on_optimizer_step")


class History:
    """What a Trainer and its callbacks remember of a run; part of the unit's checkpoints.

    Attributes:
        loss: sum of the updates' losses since the last log.
        total: sum of the losses logged before.
        logged_at: the update of the last log.
        rate: the learning rate of the latest update.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.reset()

    def reset(self) -> None:
        self.loss: Any = 0.0
        self.total, self.logged_at = 0.0, 0
        self.rate: Any = 0.0

    def _exportable(self) -> list[Any]:
        return [c for c in self._trainer.callback_handler.callbacks if isinstance(c, theirs.ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        kept: dict[str, Any] = {name: getattr(state, name) for name in _REMEMBERED}
        kept["callbacks"] = [[type(c).__name__, c.state().get("attributes", {})] for c in self._exportable()]
        kept["loss"] = [float(self.loss), self.total, self.logged_at]
        kept["rate"] = float(self.rate)
        return {"json": json.dumps(kept, default=float)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept = json.loads(state_dict["json"])
        for name in _REMEMBERED:
            setattr(self._trainer.state, name, kept[name])
        for callback, (name, attributes) in zip(self._exportable(), kept["callbacks"], strict=False):
            if type(callback).__name__ == name:
                vars(callback).update(attributes)
        self.loss, self.total, self.logged_at = kept["loss"]
        self.rate = kept.get("rate", 0.0)


class Flow(Callback):
    """Calls the events of transformers' callbacks from the hooks of echelon's loop.

    Args:
        loader: the training data.
        saver: None saves nothing until a callback asks for a save.
        start: when training began.
        ignore_keys: of its evaluations; None has transformers' default.
    """

    def __init__(
        self,
        trainer: Any,
        loader: Any,
        saver: Saver | None,
        *,
        start: float = 0.0,
        ignore_keys: list[str] | None = None,
    ) -> None:
        self._for_log = {"start_time": start} if takes(trainer.log, "start_time") else {}
        self._for_evaluate = {"ignore_keys": ignore_keys} if ignore_keys is not None else {}
        self._trainer, self._steps_per_epoch, self._saver = trainer, length_of(loader), saver
        self._batches = _batches_of(loader)
        self.saves = saver is not None
        own = [c for c in trainer.callback_handler.callbacks if not type(c).__module__.startswith("transformers.")]
        self._may_differ = bool(own)  # a user's callback may decide differently on each rank
        self.may_stop = bool(own) or any(isinstance(c, theirs.EarlyStoppingCallback) for c in trainer.callback_handler.callbacks)

    def _call(self, event: str) -> None:
        trainer = self._trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def _tell_epoch(self, unit: Any) -> None:
        state, progress = self._trainer.state, unit.train_progress
        batches = self._batches or state.max_steps * unit.gradient_accumulation_steps  # as transformers counts a stream
        state.epoch = progress.num_epochs_completed + min(1.0, progress.num_steps_completed_in_epoch / batches)

    # --- hooks of the loop

    def on_train_start(self, state: State, unit: Any) -> None:
        if self._saver is not None:
            self._saver.keep(self._trainer.state.best_model_checkpoint)
            self._saver.on_train_start(state, unit)
        handler = self._trainer.callback_handler
        overridden = [c for c in handler.callbacks for event in _WHOLE_UPDATES if _overrides(c, event)]
        if overridden:
            raise UsageError(
                f"{type(overridden[0]).__name__} has on_pre_optimizer_step or on_optimizer_step, which are not part of "
                "echelon.compat. Instead: on_step_end, or a hook of the optimizer (register_step_pre_hook)."
            )
        self._tell_epoch(unit)
        self._call("on_train_begin")
        if self._trainer.args.eval_on_start and unit.train_progress.num_updates_completed == 0:
            self._trainer.evaluate(**self._for_evaluate)
        steps = unit.train_progress.num_steps_completed_in_epoch
        if steps and steps != self._steps_per_epoch:  # callbacks set things up in on_epoch_begin, also for the rest of an epoch
            self._call("on_epoch_begin")

    def on_train_epoch_start(self, state: State, unit: Any) -> None:
        self._call("on_epoch_begin")

    def on_train_step_start(self, state: State, unit: Any) -> None:
        if unit.at_boundary:
            self._trainer.history.rate = unit.optimizer.param_groups[0]["lr"]
            self._call("on_step_begin")
        unit.module.train()  # in each step, as transformers does: a callback may have left it in eval mode
        set_mode(unit.optimizer, "train")

    def on_train_step_end(self, state: State, unit: Any) -> None:
        if not unit.at_boundary:
            self._call("on_substep_end")
            return
        trainer = self._trainer
        loss, _ = unit.latest_update
        trainer.history.loss = trainer.history.loss + loss
        trainer.state.global_step = unit.train_progress.num_updates_completed
        self._tell_epoch(unit)
        self._call("on_step_end")
        self._act(state, unit)

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        if self._steps_per_epoch:
            self._tell_epoch(unit)
        self._call("on_epoch_end")
        self._act(state, unit)

    def on_train_end(self, state: State, unit: Any) -> None:
        by_signal = state.should_stop and not state.stopped_by_script
        if by_signal and self._saver is not None:
            self._saver.save(state, unit)
        elif not by_signal and unit.train_progress.num_steps_completed_in_epoch:  # cut short
            self._call("on_epoch_end")
            self._act(state, unit)
        if self._saver is not None:
            self._saver.end(unit, "stopped" if by_signal else "complete")

    def on_exception(self, state: State, unit: Any, exc: BaseException) -> None:
        if self._saver is not None:
            self._saver.on_exception(state, unit, exc)

    # --- what the callbacks ask for

    def _act(self, state: State, unit: Any) -> None:
        trainer = self._trainer
        control = self._agree()
        updates = trainer.state.global_step
        if control.should_log and updates > trainer.history.logged_at:
            self._log(unit, updates)
            control = self._agree()  # its callbacks may have asked for more
        if control.should_evaluate:
            self._evaluate(unit)
            control = self._agree()
        if control.should_save:
            self._save(state, unit)
        if trainer.control.should_epoch_stop:
            raise UsageError(
                "control.should_epoch_stop is not part of echelon.compat. Instead: control.should_training_stop, or a dataset "
                "of the length that an epoch is to have."
            )
        if trainer.control.should_training_stop and updates < trainer.state.max_steps:
            state.stop()

    def _save(self, state: State, unit: Any) -> None:
        trainer = self._trainer
        if self._saver is None:
            # A run in progress is not refused: checkpoints of other runs in its folder are set aside.
            self._saver, self.saves = trainer.new_saver(restart=True, late=True), True
            self._saver.on_train_start(state, unit)
        best, known = trainer.state.best_global_step, trainer.state.best_model_checkpoint
        path = self._saver.path_at(best) if best else None
        # The best may be known only after it was saved: at an epoch's end, after the save of the epoch's last update.
        if path not in (None, known) and (best == trainer.state.global_step or self._saver.folder.is_saved(best)):
            trainer.state.best_model_checkpoint = path
            self._saver.keep(path)
        self._saver.write(state, unit)
        self._call("on_save")

    def _agree(self) -> Any:
        """Evaluations and saves are collective: all ranks do what one rank's callbacks ask for."""
        control = self._trainer.control
        if self._may_differ:
            names = ("should_log", "should_evaluate", "should_save")
            asked = agree.any_ranks([bool(getattr(control, name)) for name in names])
            vars(control).update(zip(names, asked, strict=True))
        return control

    def _log(self, unit: Any, updates: int) -> None:
        trainer, history = self._trainer, self._trainer.history
        loss = float(history.loss)
        logs = {"loss": loss / (updates - history.logged_at)}
        _, norm = unit.latest_update
        if norm is not None:
            logs["grad_norm"] = float(norm)
        logs["learning_rate"] = float(history.rate)
        history.loss, history.total, history.logged_at = 0.0, history.total + loss, updates
        trainer.log(logs, **self._for_log)

    def _evaluate(self, unit: Any) -> None:
        trainer, args = self._trainer, self._trainer.args
        metrics = trainer.evaluate(**self._for_evaluate)
        is_best = self._note_best(metrics)
        if args.save_strategy == "best":
            trainer.control.should_save = is_best
        if needs_metric(unit.lr_scheduler):
            unit.lr_scheduler.step(self._metric(metrics))

    def _metric(self, metrics: dict[str, float]) -> float:
        wanted = self._trainer.args.metric_for_best_model
        name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        if name not in metrics:
            known = ", ".join(sorted(set(metrics) - {"epoch"}))
            raise UsageError(
                f"metric_for_best_model must be one of the evaluation's metrics, {known}, got {wanted!r}. compute_metrics makes "
                "more of them."
            )
        return metrics[name]

    def _note_best(self, metrics: dict[str, float]) -> bool:
        state, args = self._trainer.state, self._trainer.args
        if args.metric_for_best_model is None:
            return False
        value, best = self._metric(metrics), state.best_metric
        better = not math.isnan(value) and (best is None or (value > best if args.greater_is_better else value < best))
        if better:
            state.best_metric = value
            if args.save_strategy != "no":
                state.best_global_step = state.global_step
        return better


def _batches_of(loader: Any) -> int | None:
    """Batches of an epoch on each rank, as transformers counts them: a short last update may have fewer. None if unknown."""
    if isinstance(loader, Loader):
        return -(-loader.samples * loader.accumulation // loader.global_batch)
    return length_of(loader)


def _overrides(callback: Any, event: str) -> bool:
    return getattr(type(callback), event, None) is not getattr(theirs.TrainerCallback, event, None)
