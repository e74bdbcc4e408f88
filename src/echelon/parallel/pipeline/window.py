"""One update in a pipeline: its micro-batches, and what is known of the tensors that pass between the stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echelon.parallel.gradients.clip import pass_zeros
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.pipeline.values import Form, Leaf, Unsendable, form_of

__all__ = ["Learned", "Made", "Window"]

Made = tuple[torch.Tensor, Any]


@dataclass(frozen=True)
class Learned:
    """What passes between the stages for micro-batches of one kind.

    Args:
        forms: of all calls of units.
        sent: by stage, the calls whose values it sends on, in this order.
        loss: the kind of the loss.
        written: the calls into whose outputs something is written.
        path: through the units, in a pass that computes no values; None if there is none.
    """

    forms: dict[str, Form]
    sent: list[list[str]]
    loss: Leaf
    written: frozenset[str] = frozenset()
    path: Any = None

    def kinds(self, stage: int) -> list[Leaf]:
        return [leaf for call in self.sent[stage] for leaf in self.forms[call].tensors]

    def given(self, stage: int, received: Sequence[torch.Tensor]) -> dict[str, Any]:
        """By call of earlier stages, what a stage has received."""
        values, at = {}, 0
        for call in self.sent[stage - 1] if stage else ():
            form = self.forms[call]
            values[call] = form.filled(received[at : at + len(form.tensors)])
            at += len(form.tensors)
        return values

    def differs(self, call: str, value: Any) -> str | None:
        """How what a unit has returned differs from what it returned when this was learned; None if it does not."""
        form = self.forms[call]
        if form.is_tensor and isinstance(value, torch.Tensor):
            given: list[Any] = [tuple(value.shape)]
        else:
            try:
                now, _ = form_of(value)
            except Unsendable as error:
                return f"returned a {error}, and did not before"
            if now.tree != form.tree:
                return "returned another nesting than before"
            given = [leaf.shape if isinstance(leaf, Leaf) else leaf for leaf in now.leaves]
        before = [leaf.shape if isinstance(leaf, Leaf) else leaf for leaf in form.leaves]
        if given == before:
            return None
        at = next(i for i, pair in enumerate(zip(given, before, strict=True)) if pair[0] != pair[1])
        if isinstance(given[at], tuple) and isinstance(before[at], tuple):
            return f"gave tensors of {given[at]}, and of {before[at]} before, for a batch of the same shape"
        return f"returned {given[at]!r} beside its tensors, and {before[at]!r} before"


class Window:
    """An update under way."""

    def __init__(
        self,
        micro_batches: list[MicroBatch[Any]],
        forward: Callable[[MicroBatch[Any]], Made],
        backward: Callable[[torch.Tensor, MicroBatch[Any]], None],
        before_backward: Callable[[bool, int], None] | None,
    ) -> None:
        self.micro_batches, self.forward, self.backward = micro_batches, forward, backward
        self.before_backward = before_backward
        self.first = 0
        self.learned: Learned
        self.made: dict[int, Made] = {}
        self.failed: Exception | None = None
        self.wrong: Exception | None = None  # found in a pass that went on, as other ranks wait for what it sends
        self._begun: Counter[int] = Counter()
        self._starts: dict[float, torch.Tensor] = {}  # by weight, the gradient with which a backward pass begins

    def fails(self, error: Exception) -> None:
        """The window does not count. All ranks hear of it when its passes have ended."""
        self.wrong = self.wrong or error

    def weighted(self, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> torch.Tensor:
        """The loss with its weight, of which torch's schedule takes the backward pass with the gradient 1.

        The loop's `backward` counts the loss and says with what gradient it would begin: here it does so on a tensor of its
        own, and of further micro-batches that weigh as much it only counts the loss.
        """
        weight, own = micro_batch.weight, loss.detach()
        start = None if isinstance(weight, torch.Tensor) else self._starts.get(weight)
        self.backward(own if start is not None else own.requires_grad_(), micro_batch)
        if start is None:
            start = own.grad
            assert start is not None
            if not isinstance(weight, torch.Tensor):
                self._starts[weight] = start
        if isinstance(weight, torch.Tensor):
            pass_zeros(loss, weight == 0)
        elif weight == 0:
            pass_zeros(loss)
        return loss * start

    def watch(self, stage: int, outputs: list[torch.Tensor]) -> None:
        """Tell `before_backward` when the backward pass of these begins."""
        own = [t for t in outputs if t.requires_grad]
        if own:
            own[0].register_hook(lambda gradient: self._begins(stage))

    def _begins(self, stage: int) -> None:
        before = self._begun.total()
        self._begun[stage] += 1
        assert self.before_backward is not None
        self.before_backward(self._begun[stage] == len(self.micro_batches), before)
