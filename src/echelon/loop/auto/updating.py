"""The update of an AutoUnit: what follows a window's last backward pass, read from top to bottom.

    _end_window     the sums over the ranks arrive, gradients become those of the global batch
    _clip           by norm, by value
    _apply          optimizer step, what the layout and the averages do after it, the record for whoever watches
    _advance        scheduler step

In fp16 an update with an inf is skipped on all ranks: parameters, schedule and averages stay as they are. So is one whose global
batch weighs nothing, as where all labels are left out.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from echelon.loop.auto.averaged import AveragedWeights
from echelon.loop.auto.bitwise import BitEqual
from echelon.loop.auto.finite import FiniteWatch
from echelon.loop.auto.several import Several
from echelon.loop.unit import TrainUnit
from echelon.loop.window import Window
from echelon.parallel.experts.loads import Routers
from echelon.parallel.gradients import clip
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe.precision import Shards
from echelon.world import agree, clock
from echelon.world.clock import Part

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["AutoUpdates"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A mark of every step: asking the enumeration takes longer than making the mark.
OPTIMIZER = int(Part.OPTIMIZER)


class AutoUpdates(TrainUnit[T]):
    """The part of an AutoUnit that updates its module. AutoUnit's constructor sets the attributes."""

    device: torch.device
    prepared: Prepared[Any]
    window: Window
    _takes_loaders: bool  # how many micro-batches an update has
    optimizer: torch.optim.Optimizer  # None where there are several
    several: Several | None = None
    lr_scheduler: Any
    clip_grad_norm: float | None
    clip_grad_value: float | None
    zero_grad_at_train_step_start: bool
    lr_interval: Literal["update", "epoch"]
    grad_scaler: Any
    swa_model: AveragedWeights | None
    swa_scheduler: Any
    latest_update: tuple[Any, Any]  # loss over the global batch and gradient norm, if it is clipped
    _shards: Shards | None  # of the optimizer, for the gradient scaler
    _bitwise: BitEqual | None
    _finite: FiniteWatch
    _first_look: RemovableHandle | None  # at what the optimizer holds
    _routers: Routers | None  # None where the module has no experts
    _own_schedule = True  # it may have a step_lr_scheduler of its own; training finds out as it begins
    _plateau: bool  # whether the scheduler advances with evaluations
    _trains_with: list[torch.optim.Optimizer]  # the one that was looked at, while ranks train together; saves see no list
    _reduces: bool  # whether windows are summed over ranks
    _around_window: AbstractContextManager[Any] | None  # the layout's context of the window under way
    _held: list[list[MicroBatch[T]]]  # its steps so far, where the layout takes them at once

    # --- what the user may write

    def step_lr_scheduler(self) -> None:
        """Advance the scheduler by one interval; override for one that wants a metric.

        A ReduceLROnPlateau advances after each evaluation within `fit` instead, with `eval_loss`.
        """
        if self.several is not None:
            self.several.advance(after_epoch=self.lr_interval == "epoch")
        elif self.lr_scheduler is not None and not self._plateau:
            self.lr_scheduler.step()

    def zero_grad(self, state: State) -> None:
        """Drop all gradients."""
        if self.several is None:
            clip.clear(self.optimizer)
        else:
            self.several.clear()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The one, or all of several."""
        return [self.optimizer] if self.several is None else [turn.optimizer for turn in self.several.turns]

    # --- a window

    def _enter_window(self, around: AbstractContextManager[Any]) -> None:
        around.__enter__()
        self._around_window = around

    def _exit_window(self) -> None:
        around, self._around_window = self._around_window, None
        if around is not None:
            around.__exit__(None, None, None)

    def _leave_window(self) -> None:
        """Forget an unfinished window."""
        self.window.discard()
        self._held.clear()
        self._exit_window()
        if self.several is not None:
            self.several.discard()
        self.prepared.discard_window()
        if self._routers is not None:
            self._routers.discard()
        if self._bitwise is not None:
            self._bitwise.discard()

    # --- its end

    def _update(self, state: State) -> torch.Tensor | None:
        """Returns the gradient norm, if it is clipped."""
        norm = None
        if self.several is not None:
            updated = self._end_several(state)
        else:
            weight, loss = self._end_window(state)
            if self.window.is_nothing:
                self._leave_out(state)
                return None
            norm = self._clip()
            updated = self._apply(state, weight, loss, norm)
        if not self.zero_grad_at_train_step_start:
            self.zero_grad(state)
        scheduled = (
            self.several is not None or self.lr_scheduler is not None or self.swa_scheduler is not None or self._own_schedule
        )
        if updated and scheduled and self.lr_interval == "update":
            self._advance()
        return norm

    def _end_window(self, state: State) -> tuple[Any, Any]:
        """The gradients become those of the global batch. Returns its weight and its loss."""
        window, prepared, scaler = self.window, self.prepared, self.grad_scaler
        if self._reduces:
            clock.enter(Part.WAIT)
        micro_batches, (weight, loss, stop) = window.count, window.close()
        if clock.running is not None:
            clock.running.enter(OPTIMIZER)
        if window.guards:
            window.check_guards()
        self._finite.take(loss, window.own_loss, micro_batches, self.train_progress)
        if stop:
            state.agree_to_stop()
        state.logged.end_window(window.told, None if self.device.type == "cpu" else self.device)
        if window.is_nothing:
            return weight, loss
        if self.several is not None:  # whose gradients are so already
            window.reference = float(weight)
            return weight, loss
        if scaler is not None:
            if self._shards is not None and self._shards.optimizer is not self.optimizer:  # another was assigned
                self._shards = Shards(self.optimizer, prepared.module.parameters())
            scaler.unscale_(self._shards)
        assert window.reference is not None
        if isinstance(weight, torch.Tensor):  # on a device: nothing waits for it
            # Gradients of no weight are zeros, and stay so.
            prepared.scale_grads(torch.where(weight == 0, torch.ones_like(weight), window.reference / weight))
        elif weight != window.reference:
            prepared.scale_grads(window.reference / weight)
            window.reference = window.reference if window.fixed else float(weight)
        return weight, loss

    def _end_several(self, state: State) -> bool:
        """The end of an update whose optimizers have stepped, each in its turn. False if its global batch weighs nothing."""
        several, window = self.several, self.window
        assert several is not None
        several.meet_at_end()
        if self._reduces:
            window.start_reduction(state.stop_requested, state.logged.signature())
        weight, loss = self._end_window(state)
        if window.is_nothing:
            self._leave_out(state)
            return False
        if self.swa_model is not None:
            self.swa_model.step()
        self.latest_update, more = (loss, None), {**several.numbers(), **state.logged.settled()}
        if self._routers is not None:
            self._routers.end_window(updated=True)
            more = {**self._routers.measures(), **more}
        if state.recorder is not None:
            state.recorder.update(self.train_progress.num_updates_completed + 1, loss, weight, None, None, more)
        return True

    def _leave_out(self, state: State) -> None:
        """An update of a global batch that weighs nothing, which all ranks know. It is counted, and trains nothing."""
        loss, self.latest_update = self.latest_update[0], (0.0, None)
        if loss is not None:  # for who averages the losses of updates: this one has none
            self.latest_update = (loss, None)
        if self._routers is not None:
            self._routers.end_window(updated=False)
        self.zero_grad(state)
        number = self.window.empty
        if agree.is_rank0() and number & (number - 1) == 0:  # each time that there are twice as many
            logger.warning(
                "update %s was left out, as its global batch weighs 0: all of its samples were filtered, or all of its labels "
                "left out. Parameters and schedule stay as they are. So far that was so in %s of %s updates",
                self.window.updates - 1,
                number,
                self.window.updates,
            )

    def _apply(self, state: State, weight: Any, loss: Any, norm: torch.Tensor | None) -> bool:
        """The optimizer's step, and what follows from it. False if fp16's scaler left the update out."""
        self.latest_update, lr = (loss, norm), self.optimizer.param_groups[0].get("lr")
        updated = self._step_optimizer()
        if self._routers is not None:
            self._routers.end_window(updated=updated)
        if updated:
            if self._first_look is not None:
                self._first_look.remove()
                self._first_look = None
            self.prepared.after_step()
            if self.swa_model is not None:
                self.swa_model.step()
        if state.recorder is not None:
            more = state.logged.settled()
            if self._routers is not None:
                more = {**self._routers.measures(), **more}
            state.recorder.update(self.train_progress.num_updates_completed + 1, loss, weight, lr, norm, more)
        if self.prepared.works_alone and self.prepared.told_to_stop(state.stop_requested):
            state.agree_to_stop()
        return updated

    def _clip(self) -> torch.Tensor | None:
        """Of whole gradients, before the optimizer's step. Returns their norm, if they are clipped by it."""
        norm = self.prepared.clip_grad_norm_(self.clip_grad_norm) if self.clip_grad_norm is not None else None
        if self.clip_grad_value is not None:
            self.prepared.clip_grad_value_(self.clip_grad_value)
        return norm

    def _step_optimizer(self) -> bool:
        """False if fp16's scaler left the update out."""
        scaler = self.grad_scaler
        if scaler is None:
            self.optimizer.step()
            return True
        assert self._shards is not None
        updated = self._shards.update_with(scaler)
        self._finite.take_skip(not updated, scaler)
        return updated

    def _advance(self) -> None:
        """After an update or an epoch, as `lr_interval` says: the schedule, or the averages' own once these have begun."""
        if self.swa_scheduler is not None and self.swa_model is not None and self.swa_model.begun:
            self.swa_scheduler.step()
        else:
            self.step_lr_scheduler()
