"""A micro-batch in a loop of one's own: forward, backward and, if it ends its window, the update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from echelon.common.errors import LossError, OwnLoopError
from echelon.common.numbers import number
from echelon.data import workers
from echelon.loop.auto.several import Turn
from echelon.loop.samples import as_scalar, problem_with, summable
from echelon.loop.state import State
from echelon.parallel.gradients import clip
from echelon.parallel.prepared import NO_CONTEXT, MicroBatch
from echelon.world.clock import Part, enter

__all__ = ["OwnWindow"]


class OwnWindow:
    """What `window` gives. Enter it once for each batch, and call the model, `backward` and the optimizer's step within.

    Attributes:
        is_last: whether the update follows: this batch is the last of its window. Before, the optimizer's `step` and `zero_grad`
            and the scheduler's `step` do nothing, so they may be called in every batch.
        loss: after `backward`, this rank's mean loss of the batch; with the window's last, that of the global batch over all
            ranks. A float, or a 0-dim tensor; 0 where the global batch weighs nothing, whose update is left out. With several
            optimizers the sum of the passes' losses, and that of the global batch once the window has ended.
        update: which update of the run this batch is for, from 0.
    """

    def __init__(self, session: Any, weight: float | torch.Tensor | None) -> None:
        self._session, self._weight = session, weight
        self._micro_batch: MicroBatch[Any] | None = None
        self._contexts: tuple[AbstractContextManager[Any], ...] = ()
        self._norm: torch.Tensor | None = None
        self._state: State
        self.is_open = False
        self.is_last = False
        self.update = 0
        self.loss: Any = None
        self.error: BaseException | None = None  # that ended it
        self.trained: tuple[float, torch.Tensor] | None = None  # weight and loss of this rank's batch
        # backward was called; the optimizer stepped; it was no skipped update
        self.went_back = self.stepped = self.updated = False

    def __enter__(self) -> OwnWindow:
        session, unit = self._session, self._session.unit
        session.enter(self)
        self.is_open, self.update, self._state = True, unit.window.updates, session.state
        step = unit.update.begin_step(unit, self._state)
        self.is_last = unit.update.is_last
        weight = 0 if step.is_padding else unit.weight(session.batch) if self._weight is None else self._weight
        weight = summable(weight) if isinstance(weight, torch.Tensor) else weight
        self._micro_batch = MicroBatch(session.batch, weight, self.is_last, step.is_padding, step.samples)
        if unit.window.reference is None:
            unit.update.estimate(unit, self._state, self._micro_batch)
        passes = unit.update.passes(unit, self._state, self._micro_batch)
        self._contexts = (passes,) if unit.computes.dtype is None else (passes, unit.autocast())
        for context in self._contexts:
            context.__enter__()
        enter(Part.FORWARD)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.is_open = False
        lost = workers.explain(error) if error is not None else None  # a loader's worker may die at any moment of a step
        self.error = lost or error
        try:
            for context in reversed(self._contexts):
                context.__exit__(kind, error, trace)
            if error is not None:
                self._session.unit.update.explain(self._session.unit, error)
        finally:
            if self.error is not None:
                self._session.failed(self.error)
        if lost is not None:
            raise lost from error
        if error is None and not self.went_back:
            raise OwnLoopError(
                "the window ended without window.backward(loss). Call it once in each window, in place of loss.backward(); leave "
                "a batch out by leaving out its window, on all ranks."
            )
        if error is None and self._session.unit.several is not None:
            self._end_several()
        if self._session.unit.beside is not None:
            self._session.unit.beside.note()

    def _end_several(self) -> None:
        unit = self._session.unit
        assert unit.several is not None
        unit.several.end_micro_batch(replica=bool(unit.prepared.data.is_replica))
        if self.is_last:
            unit.has_updated = True
            unit.update.finish(unit, self._state)
            unit.update.step(unit, self._state, None)
            self.loss = unit.update.latest[0]

    def backward(self, loss: torch.Tensor, *, retain_graph: bool | None = None) -> None:
        """In place of `loss.backward()`: the gradients are weighed and, with the window's last batch, averaged over the ranks.

        After the last one they are those of the mean over the global batch, so that they can be looked at and clipped.

        Args:
            loss: the mean loss of the batch, one number.
            retain_graph: as torch has it.
        """
        self._check_open("backward")
        unit = self._session.unit
        if self.went_back and unit.several is None:
            raise OwnLoopError(
                "window.backward must be called once in a window, got a second call. Add the losses and call it with their sum; "
                "to train on several batches in one update, open a window for each and give prepare(..., accumulate=...). A step "
                "that takes several passes of one batch, as sharpness-aware minimisation does, is a TrainUnit's train_step."
            )
        usual = isinstance(loss, torch.Tensor) and not loss.dim() and loss.requires_grad
        if not usual:
            if (problem := problem_with((loss, None), unit.module)) is not None:
                raise LossError(f"window.backward was given {problem}")
            loss = as_scalar(loss)
        self.went_back = True
        if unit.prepared.batches.doubts:
            unit.prepared.batches.check_loss(loss)
        assert self._micro_batch is not None
        with NO_CONTEXT if unit.computes.dtype is None else torch.autocast(unit.device.type, enabled=False):
            self._session.goes_back()
            if unit.several is not None:
                unit.several.backward(loss, self._micro_batch, retain_graph=retain_graph)
            else:
                unit.update.backward(unit, self._state, loss, self._micro_batch, retain_graph=retain_graph)
        before = 0.0 if self.trained is None else self.trained[1]
        self.trained = self._micro_batch.weight, loss.detach() + before
        self.loss = self.trained[1]
        if self.is_last and unit.several is None:
            unit.has_updated = True
            unit.update.finish(unit, self._state)
            self.loss = unit.update.loss
        enter(Part.OTHER)
        self._session.went_back()

    def log(self, name: str, value: Any, weight: Any = None, *, reduce: str = "mean") -> None:
        """As `State.log`: a number of your own, which stands in the update's record over all ranks. Before `backward`; what is
        logged after it stands with the next update.
        """
        self._check_open("log")
        self._state.log(name, value, weight, reduce=reduce)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, of: Any = None) -> torch.Tensor | None:
        """In place of `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`: over all ranks, before the step.

        Args:
            of: which optimizer's parameters, where there are several.
        Returns:
            the norm before clipping; None before the window's last batch, where nothing is clipped.
        """
        number("max_norm", max_norm, "above 0; inf only measures", lambda most: most > 0, kind=OwnLoopError)
        if not self._has_gradients("clip_grad_norm_"):
            return None
        unit = self._session.unit
        if unit.several is not None:
            norm: torch.Tensor | None = unit.several.clip(unit.several.asked(of), max_norm, norm_type)
            return norm
        self._norm = unit.prepared.clip_grad_norm_(max_norm, norm_type)
        return self._norm

    def clip_grad_value_(self, max_value: float, *, of: Any = None) -> None:
        """In place of `torch.nn.utils.clip_grad_value_(model.parameters(), max_value)`; nothing before the last batch."""
        number("max_value", max_value, "above 0", lambda most: most > 0, kind=OwnLoopError)
        unit = self._session.unit
        if not self._has_gradients("clip_grad_value_"):
            return
        if unit.several is None:
            clip.clip_by_value_(unit.prepared.module.parameters(), max_value)
        else:
            unit.several.clip_value(unit.several.asked(of), max_value)

    def keep(self, turn: Turn) -> None:
        """For the `step` of one of several optimizers, before the window's last batch."""
        assert self._session.unit.several is not None
        self._session.unit.several.keep(turn)

    def step(self, turn: Turn | None, original: Callable[..., Any]) -> None:
        """For the optimizer's `step`, in the window's last batch.

        Args:
            turn: the optimizer's, where there are several, and `original` its own `step`.
        """
        if turn is not None:
            assert self._session.unit.several is not None
            self._session.unit.several.step(turn, original)
            return
        if self.stepped:
            raise OwnLoopError("optimizer.step() must be called once in an update, got a second call.")
        self.stepped = True
        unit = self._session.unit
        self.updated = unit.update.step(unit, self._state, self._norm)

    def _has_gradients(self, name: str) -> bool:
        """Whether there are gradients of a whole update."""
        self._check_open(name)
        if not self.went_back:
            raise OwnLoopError(f"window.{name} must come after window.backward(loss), got it before.")
        if self.stepped:
            raise OwnLoopError(f"window.{name} must come before optimizer.step(), got it after.")
        return self.is_last

    def _check_open(self, name: str) -> None:
        if not self.is_open:
            raise OwnLoopError(
                f"window.{name} must be called inside its window, `with echelon.window(model) as window:`, got it outside."
            )
