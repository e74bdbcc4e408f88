"""The unit behind a loop of one's own, which calls for loss, backward pass and update from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from echelon.common.errors import OwnLoopError
from echelon.loop.auto.optimized_unit import OptimizedUnit
from echelon.loop.auto.unit_options import AutoOptions
from echelon.loop.progress import Progress
from echelon.loop.state import State
from echelon.parallel.state.partition import parameters_of

__all__ = ["LoopUnit"]


class LoopUnit(OptimizedUnit):
    """Model, optimizer and schedule of a loop of one's own, with the state that is saved.

    Args:
        made: optimizers with their schedulers. Before the run begins they are given the parameters that the module has then.
        options: as AutoUnit has them.
        several: there are several optimizers, or networks.
    Attributes:
        update: the way from a batch to the optimizer's step, which the loop's windows go.
        configured: the optimizers and the schedulers that the loop has.
        reference: of `echelon prove`, where plain PyTorch trains: it gives the batches in place of the loader, and the windows.
        given, taken: called with each batch before the loop gets it, and after its step with (state, data, weight, loss).
        beside: loaders that the loop may read beside the training loader, with where they stand; None without.
        evaluated, samples_given: the batch of an evaluation loader that the loop has, and its samples, where the loader says so.
        has_evaluated: whether it had one in this evaluation.
        leaves_out_ranks: an evaluation loader has fewer samples than there are ranks: only some of them know what was logged.
        shares_batches: whether the ranks share a batch of the loader that the loop was given.
    """

    is_own_loop = True  # so that words are of the loop, and not of a class that its author has never met

    def __init__(
        self,
        module: nn.Module,
        made: Sequence[tuple[torch.optim.Optimizer, Any]],
        options: AutoOptions,
        *,
        several: bool = False,
    ) -> None:
        self.has_several = several  # before the module is made parallel
        super().__init__()
        for phase in ("eval", "predict", "test"):  # names of an AutoUnit's state: either goes on from the other's checkpoints
            setattr(self, f"{phase}_progress", Progress())
        self.build_from(module, options)
        if self.prepared.trains == "scheduled":
            raise OwnLoopError(
                "the layout must compute micro-batches one by one in a loop of your own, got one that takes the micro-batches "
                "of an update at once. Write an AutoUnit."
            )
        self.update = self._update
        self.configured = list(made)
        self.reference: Any = None
        self.given: Callable[[Any], Any] | None = None
        self.taken: Callable[[State, Any, float, Any], None] | None = None
        self.shares_batches = True
        self.beside: Any = None
        self.evaluated: Any = None
        self.has_evaluated = self.leaves_out_ranks = False

    @property
    def divided(self) -> int:
        return super().divided if self.shares_batches else self.window.size

    @property
    def begins_update(self) -> bool:
        """Whether the batch that the loop has is the first of an update."""
        return self.window.count == 0 if self.reference is None else self.reference.plain.is_first

    @property
    def agrees_to_stop(self) -> bool:
        return self._update.joined

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return self.configured[0]

    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> dict[str, tuple[torch.optim.Optimizer, Any]]:
        return {str(i): each for i, each in enumerate(self.configured)}

    def zero_grad(self, state: State) -> None:
        # Not by the optimizer's own: that keeps gradients in the middle of an update, of which this is the end.
        for parameter in (p for optimizer in self.optimizers for p in parameters_of(optimizer)):
            parameter.grad = None
