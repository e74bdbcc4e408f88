"""The unit behind a loop of one's own: an AutoUnit whose loss, backward pass and update are called for from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.common.errors import OwnLoopError
from echelon.loop.auto.auto import AutoUnit
from echelon.loop.state import State, step_under_way
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.prepared import NO_CONTEXT
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
        self._ended: tuple[Any, Any] = (None, None)  # weight and loss of the latest window
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
        return self._reduces

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
        self._samples = step_under_way(state.train_state).samples
        return self.weight(data)

    def samples_evaluated(self) -> float | torch.Tensor:
        """What the batch weighs that the loop evaluates."""
        self._samples = None
        return self.weight(self.evaluated)

    def open(self, state: State, data: Any, weight: Any) -> MicroBatch[Any]:
        """Begin the micro-batch that the loader gave."""
        window, prepared = self.window, self.prepared
        if self._finite.is_long:
            self._finite.raise_if_long(together=self._reduces)
        assert state.train_state is not None
        step = state.train_state.step
        ends_window = window.open(step.is_last)
        if step.is_padding:
            weight = 0
        elif isinstance(weight, torch.Tensor):
            weight = float(weight) if weight.device.type == "cpu" else weight.double()
        if window.reference is None:
            window.estimate(0 if prepared.is_replica else weight, over_ranks=self._reduces)
        micro_batch = MicroBatch(data, weight, ends_window, step.is_padding)
        if state.recorder is not None and state.recorder.counts_flops:
            state.recorder.count_flops(self, [micro_batch])
        if window.count == 1 and (around := prepared.window()) is not NO_CONTEXT:
            self._enter_window(around)
        if self._bitwise is not None:
            self._bitwise.begin(window.updates, window.count - 1)
            if self.seeded is not None:
                self.seeded()
        prepared.forward_begins()
        if self.several is not None:
            self.several.begin(float(weight))
        return micro_batch

    def backward(self, state: State, micro_batch: MicroBatch[Any], loss: torch.Tensor) -> None:
        """The weighted backward pass; after an update's last the gradients are those of its global batch."""
        if self.several is not None:
            self.several.backward(loss, micro_batch, retain_graph=self.retain_graph)
            return
        bitwise, last = self._bitwise, micro_batch.is_last
        self.prepared.backward(loss, micro_batch, partial(self._backward, state))
        if bitwise is not None:
            bitwise.add(last=last)
        if last:
            self.has_updated = True
            self._exit_window()
            self._ended = self._end_window(state)

    def end_several(self, state: State, *, last: bool) -> None:
        """A micro-batch of several optimizers has ended."""
        assert self.several is not None
        self.several.end_micro_batch(replica=self.prepared.is_replica)
        if last:
            self.has_updated = True
            self._exit_window()
            self._end_several(state)

    @property
    def update_loss(self) -> Any:
        """Of the latest window, over all ranks."""
        return self._ended[1]

    def apply(self, state: State, norm: torch.Tensor | None) -> bool:
        """The optimizer's step; False if fp16's scaler left it out, or the global batch weighs nothing."""
        if self.window.is_nothing:
            self._leave_out(state)
            return False
        return self._apply(state, *self._ended, norm)

    def reduces(self, micro_batch: MicroBatch[Any]) -> bool:
        """Whether the ranks' gradients are averaged in this micro-batch's backward pass."""
        return micro_batch.is_last or self._bitwise is not None

    def zero_grad(self, state: State) -> None:
        # Not by the optimizer's own: that keeps gradients in the middle of an update, of which this is the end.
        for parameter in (p for optimizer in self.optimizers for p in parameters_of(optimizer)):
            parameter.grad = None

    def forget_window(self, state: State) -> None:
        """After an error in the middle of it."""
        self._leave_window()
        self.zero_grad(state)

    def _leave_window(self) -> None:
        super()._leave_window()
        if self.left_out is not None:
            self.left_out()
