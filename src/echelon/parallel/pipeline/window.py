"""One update in a pipeline: its micro-batches, and what is known of the tensors that pass between the stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from echelon.parallel.gradients import pass_zeros
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.pipeline.values import Form, Leaf, placeholder

__all__ = ["Learned", "Made", "Window"]

Made = tuple[torch.Tensor, Any]


@dataclass(frozen=True)
class Learned:
    """What passes between the stages for micro-batches of one kind.

    Args:
        forms: of all calls of units.
        stages: by call, the stage of its unit.
        sent: by stage, the calls whose values it sends on, in this order.
        loss: the kind of the loss.
    """

    forms: dict[str, Form]
    stages: dict[str, int]
    sent: list[list[str]]
    loss: Leaf
    _stand_ins: dict[int, dict[str, Any]] = field(default_factory=dict)

    def kinds(self, stage: int) -> list[Leaf]:
        return [leaf for call in self.sent[stage] for leaf in self.forms[call].tensors]

    def given(self, stage: int, received: Sequence[torch.Tensor], device: torch.device) -> dict[str, Any]:
        """By call of earlier stages, what a stage is given: what it has received, and where that is one tensor of which
        nothing depends what stands in its place, which is made once.
        """
        if not stage:
            return {}
        if stage not in self._stand_ins:
            idle = [call for call, at in self.stages.items() if at < stage and call not in self.sent[stage - 1]]
            self._stand_ins[stage] = {
                call: placeholder(self.forms[call].tensors[0], device, math.nan, solid=False, tracked=False)
                for call in idle
                if self.forms[call].is_tensor
            }
        values, at = dict(self._stand_ins[stage]), 0
        for call in self.sent[stage - 1]:
            form = self.forms[call]
            values[call] = form.filled(received[at : at + len(form.tensors)])
            at += len(form.tensors)
        return values


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
        self._begun: Counter[int] = Counter()
        self._starts: dict[float, torch.Tensor] = {}  # by weight, the gradient with which a backward pass begins

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
