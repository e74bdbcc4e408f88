"""The unit behind a loop of one's own: an AutoUnit whose loss, backward pass and update are called for from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.common.errors import OwnLoopError
from echelon.loop.auto.auto import AutoUnit
from echelon.loop.loss import summable
from echelon.loop.state import State, step_under_way
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.state.partition import parameters_of

__all__ = ["LoopUnit", "Plain"]


@dataclass
class Plain:
    """How a micro-batch is trained on in plain PyTorch, with nothing of echelon's: for the reference of `echelon prove`.

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


class LoopUnit(AutoUnit[Any]):
    """Model, optimizer and schedule of a loop of one's own, with the state that is saved.

    Args:
        made: optimizers with their schedulers. Before the run begins they are given the parameters that the module has then.
        several: there are several optimizers, or networks.
        options: of AutoUnit.
    Attributes:
        configured: the optimizers and the schedulers that the loop has.
        plain: set where plain PyTorch computes.
        instead, turns: gives the batches in place of the loader, and how; for `echelon prove`.
        given, taken: called with each batch before the loop gets it, and after its step with (state, data, weight, loss).
        seeded: called where the RNGs were set for a batch, as with bit-equal numbers.
        left_out: called when the batches of an unfinished update are left out.
        evaluated, has_evaluated: the batch of an evaluation loader that the loop has, and whether it had one in this evaluation.
        shares_batches: whether the ranks share a batch of the loader that the loop was given.
    """

    def __init__(
        self,
        module: nn.Module,
        made: Sequence[tuple[torch.optim.Optimizer, Any]],
        *,
        several: bool = False,
        **options: Any,
    ) -> None:
        self.has_several = several  # before the module is made parallel
        super().__init__(module=module, **options)
        if self.prepared.takes_windows:
            raise OwnLoopError(
                "the layout must compute micro-batches one by one in a loop of your own, got one that takes the micro-batches "
                "of an update at once. Write an AutoUnit."
            )
        self.configured = list(made)
        self.plain: Plain | None = None
        self.instead: Callable[[], Iterator[Any]] | None = None
        self.turns: Any = None
        self.given: Callable[[Any], Any] | None = None
        self.taken: Callable[[State, Any, float, Any], None] | None = None
        self.seeded: Callable[[], None] | None = None
        self.left_out: Callable[[], None] | None = None
        self.shares_batches = True
        self.evaluated: Any = None
        self.has_evaluated = False

    @property
    def divided(self) -> int:
        return super().divided if self.shares_batches else self.window.size

    @property
    def agrees_to_stop(self) -> bool:
        return self._update.joined

    @property
    def steps_by_itself(self) -> bool:
        return False

    def compute_loss(self, state: State, data: Any) -> tuple[torch.Tensor, Any]:
        raise OwnLoopError("the loss is computed in your own loop. `train` and `fit` need an AutoUnit with compute_loss.")

    def train_step(self, state: State, data: Any) -> Any:
        raise OwnLoopError("steps are taken in your own loop. `train` and `fit` need a unit.")

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return self.configured[0]

    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> dict[str, tuple[torch.optim.Optimizer, Any]]:
        return {str(i): each for i, each in enumerate(self.configured)}

    def step_lr_scheduler(self) -> None:
        """The loop does."""

    # --- a step, in the order in which the loop calls for it

    def samples_of_batch(self, state: State, data: Any) -> float | torch.Tensor:
        """What a batch weighs where the loop does not say: its samples."""
        self.samples_given = step_under_way(state.train_state).samples
        return self.weight(data)

    def samples_evaluated(self) -> float | torch.Tensor:
        """What the batch weighs that the loop evaluates."""
        self.samples_given = None
        return self.weight(self.evaluated)

    def open(self, state: State, data: Any, weight: Any) -> MicroBatch[Any]:
        """Begin the micro-batch that the loader gave."""
        step = self._update.begin_step(self, state)
        weight = 0 if step.is_padding else summable(weight) if isinstance(weight, torch.Tensor) else weight
        micro_batch = MicroBatch(data, weight, self._update.is_last, step.is_padding)
        if self.window.reference is None:
            self._update.estimate(self, [micro_batch])
        return micro_batch

    def passes(self, state: State, micro_batch: MicroBatch[Any]) -> AbstractContextManager[Any]:
        """Context of its passes."""
        around = self._update.passes(self, state, micro_batch)
        if self.seeded is not None and self._bitwise is not None:
            self.seeded()
        return around

    def backward(
        self, state: State, micro_batch: MicroBatch[Any], loss: torch.Tensor, *, retain_graph: bool | None = None
    ) -> None:
        """The weighted backward pass; after an update's last the gradients are those of its global batch."""
        if self.several is not None:
            self.several.backward(loss, micro_batch, retain_graph=retain_graph)
            return
        self._update.backward(self, state, loss, micro_batch, retain_graph=retain_graph)
        if micro_batch.is_last:
            self.has_updated = True
            self._update.finish(self, state)

    def end_several(self, state: State, *, last: bool) -> None:
        """A micro-batch of several optimizers has ended."""
        assert self.several is not None
        self.several.end_micro_batch(replica=self.prepared.is_replica)
        if last:
            self.has_updated = True
            self._update.finish_several(self, state)

    @property
    def update_loss(self) -> Any:
        """Of the latest window, over all ranks."""
        return self._update.loss

    def apply(self, state: State, norm: torch.Tensor | None) -> bool:
        """The optimizer's step; False if fp16's scaler left it out, or the global batch weighs nothing."""
        return self._update.step(self, state, norm)

    def zero_grad(self, state: State) -> None:
        # Not by the optimizer's own: that keeps gradients in the middle of an update, of which this is the end.
        for parameter in (p for optimizer in self.optimizers for p in parameters_of(optimizer)):
            parameter.grad = None

    def forget_window(self, state: State) -> None:
        """After an error in the middle of it."""
        self._update.discard(self, state)
        if self.left_out is not None:
            self.left_out()

    def epoch_closed(self, state: State, phase: str) -> None:
        begun = self.window.count
        super().epoch_closed(state, phase)
        if begun and self.left_out is not None:
            self.left_out()
