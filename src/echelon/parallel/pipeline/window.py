"""One update in a pipeline: its micro-batches, and what is known of the tensors that pass between the stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from echelon.parallel.gradients import pass_zeros
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.pipeline.values import Form, Leaf

__all__ = ["Learned", "Made", "Window", "weighted"]

Made = tuple[torch.Tensor, Any]


@dataclass(frozen=True)
class Learned:
    """What passes between the stages for micro-batches of one kind.

    Args:
        forms: of all calls of units.
        sent: by stage, the calls whose values it sends on, in this order.
        loss: the kind of the loss.
    """

    forms: dict[str, Form]
    sent: list[list[str]]
    loss: Leaf

    def kinds(self, stage: int) -> list[Leaf]:
        return [leaf for call in self.sent[stage] for leaf in self.forms[call].tensors]


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


def weighted(
    loss: torch.Tensor, micro_batch: MicroBatch[Any], backward: Callable[[torch.Tensor, MicroBatch[Any]], None]
) -> torch.Tensor:
    """The loss with its weight, of which torch's schedule takes the backward pass with the gradient 1.

    The loop's `backward` counts the loss and says with what gradient it would begin: here it does so on a tensor of its own.
    """
    own = loss.detach().requires_grad_()
    backward(own, micro_batch)
    assert own.grad is not None
    if not isinstance(micro_batch.weight, torch.Tensor) and micro_batch.weight == 0:
        pass_zeros(loss)
    return loss * own.grad
