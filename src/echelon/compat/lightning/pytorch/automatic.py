"""A LightningModule whose optimizer the loop steps, as an AutoUnit: `compute_loss` is `training_step`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from echelon.common.errors import LossError
from echelon.compat.lightning.pytorch.hooks import Callback, ModuleHooks, overridden
from echelon.compat.lightning.pytorch.module import LightningModule
from echelon.compat.lightning.pytorch.optimizers import LightningOptimizer, NoOptimizer, Schedules, configured
from echelon.compat.lightning.pytorch.steps import ModuleSteps
from echelon.loop.auto.auto import AutoUnit
from echelon.loop.auto.unit_options import AutoOptions
from echelon.loop.auto.update import Update
from echelon.loop.state import State
from echelon.loop.unit import AppStateMixin
from echelon.parallel.names import class_name
from echelon.parallel.prepared import MicroBatch
from echelon.parallel.shards import reshard

__all__ = ["AutomaticUnit"]

logger = logging.getLogger(__name__)


class HookedUpdate(Update):
    """The update, from the loss to the optimizer's step, with Lightning's hooks."""

    def backward(self, unit: Any, state: State, loss: torch.Tensor, micro_batch: MicroBatch[Any], **options: Any) -> None:
        self.before_backward(unit, loss)
        super().backward(unit, state, loss, micro_batch, **options)
        if not micro_batch.is_last:
            self.after_backward(unit)

    def finish(self, unit: Any, state: State) -> None:
        super().finish(unit, state)
        self.after_backward(unit)  # only now are the gradients, which the hook may clip, those of the global batch

    # These two are called by the reference of `echelon prove`, too, which has a backward pass of its own.

    def before_backward(self, unit: Any, loss: torch.Tensor) -> None:
        unit.session.call("on_before_backward", loss)

    def after_backward(self, unit: Any) -> None:
        unit.session.call("on_after_backward")

    def clip(self, unit: Any) -> torch.Tensor | None:
        session, optimizer = unit.session, unit.session.optimizers[0]
        session.call("on_before_optimizer_step", optimizer)
        if not unit.waits["configure_gradient_clipping"]:
            return super().clip(unit)
        with session.hook("configure_gradient_clipping"):
            by_norm = unit.clip_grad_norm
            value, algorithm = (by_norm, "norm") if by_norm is not None else (unit.clip_grad_value, "value")
            unit.lightning_module.configure_gradient_clipping(optimizer, value, algorithm if value is not None else None)
        return None

    def step_optimizer(self, unit: Any) -> bool:
        if not unit.waits["optimizer_step"]:
            return super().step_optimizer(unit)
        unit.updated = None
        session, loss = unit.session, unit.window.latest_loss
        with session.hook("optimizer_step"):
            unit.lightning_module.optimizer_step(
                session.trainer.current_epoch, session.batch_idx, session.optimizers[0], lambda: loss
            )
        if unit.updated is None:  # the module skipped the step: schedules advance anyway
            unit.step_lr_scheduler()
        return bool(unit.updated)


class AutomaticUnit(ModuleSteps, AutoUnit[Any]):
    """
    Args:
        lightning_module: the module to train.
        options: AutoOptions.
    """

    kind_of_update = HookedUpdate
    may_stop, keeps_modes, expects_mean = False, True, False
    may_lack = (*AutoUnit.may_lack, "lightning", "schedules")  # type: ignore[assignment]

    def __init__(self, session: Any, lightning_module: LightningModule, **options: Any) -> None:
        super().__init__(module=lightning_module, options=AutoOptions(zero_grad_first=True, **options))
        self.eval_loss = self.test_loss = None  # type: ignore[assignment]  # logged values have their own names
        self.attach(session)
        self._must_clear = False
        hears = overridden("on_before_zero_grad", lightning_module, ModuleHooks)
        self._hears_of_clearing = hears or any(
            overridden("on_before_zero_grad", each, Callback) for each in session.trainer.lightning_callbacks
        )
        self.updated: bool | None = False  # in the module's own optimizer_step; None: it has not called optimizer.step
        self.waits = {
            name: overridden(name, lightning_module, LightningModule)
            for name in ("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")
        }

    def may_divide_batches(self) -> bool:
        return False  # hooks and limits count batches

    def app_state(self) -> dict[str, Any]:
        """The state that exists: the session builds the optimizer only after the weights are restored."""
        return AppStateMixin.app_state(self)

    # --- what AutoUnit calls

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        """The module's optimizer, without a schedule: `schedules` advances these."""
        lightning_module = self.lightning_module
        made = lightning_module.configure_optimizers()
        if made is None:
            logger.warning("%s.configure_optimizers returned None: nothing will be updated", class_name(lightning_module))
            made = NoOptimizer([p for p in lightning_module.parameters() if p.requires_grad])
        optimizers, schedules = configured(made, automatic=True)
        self.schedules = Schedules(schedules, lightning_module.lr_scheduler_step)
        self.session.optimizers = [LightningOptimizer(optimizers[0], self.step_by_hook, lightning_module)]
        return optimizers[0], None

    def compute_loss(self, state: State, data: Any) -> tuple[torch.Tensor, Any]:
        weight = state.logged.weight
        counts = not isinstance(weight, (int, float)) or weight > 0
        output = self.call_training_step(state, self.train_progress, data, counts=counts)
        self.batch = data
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            raise LossError(
                f"{class_name(self.lightning_module)}.training_step returned {type(output).__name__}; return the loss, or a "
                'dict with "loss". A batch that is to be left out has a loss of `0 * loss`; with several optimizers, set '
                "`self.automatic_optimization = False`."
            )
        if self._must_clear:
            self._clear(state)
        return loss, output

    def epoch_closed(self, state: State, phase: str) -> None:
        if phase == "train":
            super().epoch_closed(state, phase)
            return
        for guard in self.prepared.guards:
            guard.evaluated()

    # --- an update, with its hooks

    def zero_grad(self, state: State) -> None:
        """Postpone clearing until after `training_step`, where Lightning does it."""
        self._must_clear = True

    def _clear(self, state: State) -> None:
        self._must_clear = False
        session, optimizer = self.session, self.session.optimizers[0]
        if self._hears_of_clearing:
            reshard(self.module)  # what a hook writes to gathered parameters, for example a teacher's, would be lost
        session.call("on_before_zero_grad", optimizer)
        if self.waits["optimizer_zero_grad"]:
            self.lightning_module.optimizer_zero_grad(session.trainer.current_epoch, session.batch_idx, optimizer)
        else:
            super().zero_grad(state)

    def step_by_hook(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """`optimizer.step(...)` in the module's own `optimizer_step`."""
        self.updated = Update.step_optimizer(self._update, self)
        return closure() if closure is not None else None

    def step_lr_scheduler(self) -> None:
        self.schedules.step("step", self.train_progress.num_steps_completed_in_epoch + 1, None)

    def on_train_epoch_end(self, state: State) -> None:
        self.schedules.step("epoch", self.train_progress.num_epochs_completed, None)

    # --- for the Trainer

    def backward_by_hand(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise LossError("manual_backward is for `self.automatic_optimization = False`, to be set in the module's __init__.")

    @property
    def updates(self) -> int:
        updates: int = self.train_progress.num_updates_completed
        return updates
