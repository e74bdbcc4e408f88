"""The unit behind a user's own loop, which computes the loss and calls backward pass and update from outside."""

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
    """Model, optimizer and schedule of a user's own loop, with the state that is saved.

    Args:
        made: optimizers with their schedulers. Before the run begins, the optimizers get the parameters that the module has then.
        options: as in AutoUnit.
        several: there are several optimizers, or networks.
    Attributes:
        update: the way from a batch to the optimizer's step, used by the loop's windows.
        configured: the loop's optimizers and schedulers.
        reference: under `echelon prove`, the training in plain PyTorch, which gives the batches and the windows; else None.
        given: called with each batch before the loop gets it; returns the batch.
        taken: called after the step on each batch, with (state, data, weight, loss).
        beside: loaders that the loop may read beside the training loader, as by `zip`. A checkpoint has their positions.
        evaluated, samples_given: the current batch of an evaluation loader, and its number of samples if the loader says so.
        has_evaluated: whether this rank had a batch in the current evaluation.
        leaves_out_ranks: an evaluation loader has fewer samples than there are ranks, so only some ranks log numbers.
        shares_batches: whether the ranks share each batch of the training loader given to `prepare`.
    """

    unsaved = ("beside",)  # where these loaders stand is saved beside the loop's own
    is_own_loop = True  # messages then speak of the loop, not of this class, which the user does not know

    def __init__(
        self,
        module: nn.Module,
        made: Sequence[tuple[torch.optim.Optimizer, Any]],
        options: AutoOptions,
        *,
        several: bool = False,
    ) -> None:
        self.has_several = several  # needed before the module is made parallel
        super().__init__()
        for phase in ("eval", "predict", "test"):  # as in AutoUnit, so that each can restore the other's checkpoints
            setattr(self, f"{phase}_progress", Progress())
        self.build_from(module, options)
        if self.prepared.trains == "scheduled":
            raise OwnLoopError(
                "the layout must compute micro-batches one by one in a loop of your own, got one that computes all micro-batches "
                "of an update at once. Write an AutoUnit."
            )
        self.update = self._update
        self.configured = list(made)
        self.reference: Any = None
        self.given: Callable[[Any], Any] | None = None
        self.taken: Callable[[State, Any, float, Any], None] | None = None
        self.shares_batches = True
        self.beside: list[Any] = []
        self.evaluated: Any = None
        self.has_evaluated = self.leaves_out_ranks = False

    @property
    def divided(self) -> int:
        return super().divided if self.shares_batches else self.window.size

    @property
    def begins_update(self) -> bool:
        """Whether the current batch is the first of an update."""
        return self.window.count == 0 if self.reference is None else self.reference.plain.is_first

    @property
    def agrees_to_stop(self) -> bool:
        return self._update.joined

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return self.configured[0]

    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> dict[str, tuple[torch.optim.Optimizer, Any]]:
        return {str(i): each for i, each in enumerate(self.configured)}

    def zero_grad(self, state: State) -> None:
        # Does not call the optimizer's zero_grad, which the session makes keep gradients within an update.
        for parameter in (p for optimizer in self.optimizers for p in parameters_of(optimizer)):
            parameter.grad = None
