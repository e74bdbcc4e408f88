"""A window of a loop of one's own in plain PyTorch, with nothing of echelon's, for the reference of `echelon prove`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from echelon.loop.auto.several import Turn
from echelon.loop.own.batch_window import OwnWindow
from echelon.parallel.prepared import NO_CONTEXT
from echelon.parallel.recipe.precision import Precision

__all__ = ["Plain", "PlainWindow"]


@dataclass
class Plain:
    """How a micro-batch is trained on.

    Args:
        share: of the global batch's mean: the loss is multiplied by it.
        is_last: the optimizer steps after it.
        is_first: of its update.
        computes: in which precision the window computes; None is float32.
        scale: part of the share, by which the gradients are divided again before the step.
    """

    share: float
    is_last: bool
    is_first: bool
    computes: Precision | None = None
    scale: float = 1.0
    loss: torch.Tensor | None = None
    norm: float | None = None
    weight: Any = None  # what the loop says that the batch counts


class PlainWindow(OwnWindow):
    """`backward` is `loss.backward()`, a step a step."""

    def __enter__(self) -> OwnWindow:
        session, unit, plain = self._session, self._session.unit, self._plain
        session.enter(self)
        self.is_open, self.update, self.is_last = True, unit.window.updates, plain.is_last
        plain.weight = unit.weight(session.batch) if self._weight is None else self._weight
        if plain.computes is not None:
            self._contexts = (plain.computes.autocast(unit.device),)
            self._contexts[0].__enter__()
        return self

    @property
    def _plain(self) -> Plain:
        plain: Plain = self._session.unit.reference.plain
        return plain

    def _end_several(self) -> None:
        """There is nothing to sum up."""

    def backward(self, loss: torch.Tensor, *, retain_graph: bool | None = None) -> None:
        plain, unit = self._plain, self._session.unit
        with NO_CONTEXT if plain.computes is None else torch.autocast(unit.device.type, enabled=False):
            (loss * plain.share).backward(retain_graph=retain_graph)
        if plain.is_last and plain.scale != 1:
            for parameter in unit.module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= plain.scale
        self.loss = plain.loss = loss.detach() + (0 if plain.loss is None else plain.loss)
        self.went_back, self._session.accumulates = True, unit.several is None

    def log(self, name: str, value: Any, weight: Any = None, *, reduce: str = "mean") -> None:
        """Nobody reads it."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, of: Any = None) -> torch.Tensor | None:
        if not self.is_last:
            return None
        norm = torch.nn.utils.clip_grad_norm_(self._clipped(of), max_norm, norm_type)
        self._plain.norm = float(norm)
        return norm

    def clip_grad_value_(self, max_value: float, *, of: Any = None) -> None:
        if self.is_last:
            torch.nn.utils.clip_grad_value_(self._clipped(of), max_value)

    def _clipped(self, of: Any) -> Any:
        unit = self._session.unit
        return unit.module.parameters() if unit.several is None else unit.several.asked(of).parameters

    def keep(self, turn: Turn) -> None:
        turn.put_aside()

    def step(self, turn: Turn | None, original: Callable[..., Any]) -> None:
        self.stepped = self.updated = True
        if turn is not None:
            turn.take_back()
        (self._session.unit.optimizer if turn is None else turn.optimizer).step()  # which prove may have replaced
