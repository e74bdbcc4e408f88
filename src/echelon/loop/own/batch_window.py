"""A micro-batch in a user's own loop: forward, backward and, if it is its window's last, the update."""

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
from echelon.parallel.guards.guard import explain
from echelon.parallel.prepared import NO_CONTEXT, MicroBatch
from echelon.world.clock import Part, enter

__all__ = ["OwnWindow"]


class OwnWindow:
    """The value of `with window(...) as`. Enter it once per batch; call the model, `backward` and the optimizer's step within.

    Attributes:
        is_last: this batch is the last of its update. In the batches before, the optimizer's `step` and `zero_grad` and the
            scheduler's `step` do nothing, so they may be called in every batch.
        loss: after `backward`, this rank's mean loss of the batch; after the update's last batch, the mean over the global batch
            of all ranks. A float, or a 0-dim tensor; 0 if the global batch weighs nothing, so that its update is skipped. With
            several optimizers, the sum of the passes' losses; over the global batch once the window has ended.
        update: number of the update that this batch is for, from 0.
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
        self.error: BaseException | None = None  # the error that ended the window
        self.trained: tuple[float, torch.Tensor] | None = None  # weight and loss of this rank's batch
        # `backward` was called; the optimizer's step was called; the step was not skipped.
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
                explain(self._session.unit.prepared.guards, error)
        finally:
            if self.error is not None:
                self._session.failed(self.error)
        if lost is not None:
            raise lost from error
        if error is None and not self.went_back:
            raise OwnLoopError(
                "the window ended without window.backward(loss). Call it once in each window, in place of loss.backward(). To "
                "skip a batch, skip its window, on all ranks."
            )
        if error is None and self._session.unit.several is not None:
            self._end_several()
        for loader in self._session.unit.beside:
            loader.note()

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
        """Replaces `loss.backward()`: weighs the gradients and, with the update's last batch, averages them over the ranks.

        After the last batch they are the gradients of the mean over the global batch, ready to be inspected and clipped.

        Args:
            loss: the mean loss of the batch, one number.
            retain_graph: as torch has it.
        """
        self._check_open("backward")
        unit = self._session.unit
        if self.went_back and unit.several is None:
            raise OwnLoopError(
                "window.backward must be called once in a window, got a second call. Add the losses and call it with their sum. "
                "To train on several batches in one update, open a window for each and give prepare(..., accumulate=...). For a "
                "step with several passes of one batch, such as sharpness-aware minimisation, write a TrainUnit."
            )
        usual = isinstance(loss, torch.Tensor) and not loss.dim() and loss.requires_grad
        if not usual:
            if (problem := problem_with((loss, None), unit.module)) is not None:
                raise LossError(f"window.backward was given {problem}")
            loss = as_scalar(loss)
        self.went_back = True
        if unit.prepared.batches.doubts:
            unit.prepared.batches.check_loss(loss, by_share=self._weight is None)
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
        """Log a number of your own, which appears in the update's record, reduced over all ranks; see `State.log`. Call it before
        `backward`: a number logged after it counts for the next update.
        """
        self._check_open("log")
        self._state.log(name, value, weight, reduce=reduce)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, of: Any = None) -> torch.Tensor | None:
        """Replaces `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`: over all ranks, before the step.

        Args:
            of: with several optimizers, the optimizer whose parameters' gradients are clipped.
        Returns:
            the norm before clipping; None before the update's last batch, where nothing is clipped.
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
        """Replaces `torch.nn.utils.clip_grad_value_(model.parameters(), max_value)`; does nothing before the last batch."""
        number("max_value", max_value, "above 0", lambda most: most > 0, kind=OwnLoopError)
        unit = self._session.unit
        if not self._has_gradients("clip_grad_value_"):
            return
        if unit.several is None:
            clip.clip_by_value_(unit.prepared.module.parameters(), max_value)
        else:
            unit.several.clip_value(unit.several.asked(of), max_value)

    def keep(self, turn: Turn) -> None:
        """Called for the `step` of one of several optimizers before the update's last batch."""
        assert self._session.unit.several is not None
        self._session.unit.several.keep(turn)

    def step(self, turn: Turn | None, original: Callable[..., Any]) -> None:
        """Called for the optimizer's `step` in the update's last batch.

        Args:
            turn: the optimizer's turn, if there are several optimizers.
            original: the optimizer's own `step`.
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
        """Whether the gradients are those of a whole update."""
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
