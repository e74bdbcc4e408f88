"""Gradients that a loop drops by another way than its optimizer: `model.zero_grad()`, or `parameter.grad = None`.

Between the passes a sharded model shows whole parameters, gathered for them. What a loop does to their gradients does not reach
the shards, which the optimizer holds. In the middle of an update nothing may drop gradients, in any layout.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from echelon.common.errors import OwnLoopError
from echelon.parallel.gradients.clip import clear, times_changed
from echelon.parallel.shards import is_split, local
from echelon.parallel.state.partition import has_gradients

__all__ = ["Cleared"]

logger = logging.getLogger(__name__)

_MOST_LOOKS = 8  # in which the module of an optimizer among several has been computed
_MOST_COMPARISONS = 16  # of the values of a gradient


class Cleared:
    """Sees what a loop drops of an optimizer's gradients, by one parameter that it sees.

    Args:
        module: with the parameters that the optimizer holds; nothing is gathered.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._own = module, {id(parameter) for parameter in module.parameters()}
        self._looks_left = _MOST_LOOKS if any(map(is_split, module.parameters())) else 0
        self._is_marked = self._has_told = False
        self._gathered: nn.Parameter | None = None  # one that the loop sees between the passes in place of a shard
        self._shown: list[nn.Parameter] = []  # all that it sees
        self._witness: nn.Parameter | None = None  # one with a gradient, in the middle of an update
        self._version = 0
        # Its gradient as it was, in the first updates alone: a device waits for the comparison.
        self._before: torch.Tensor | None = None
        self._comparisons_left = _MOST_COMPARISONS

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """From here to the next backward pass: a gathered parameter gets a gradient, which a loop that clears takes away."""
        if self._gathered is not None and self._gathered.grad is None and has_gradients(optimizer):
            self._gathered.grad, self._is_marked = torch.zeros_like(self._gathered), True
            self._version = times_changed(self._gathered)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a backward pass: what the loop has cleared of gathered parameters is cleared of their shards."""
        if self._is_marked:
            assert self._gathered is not None
            was_cleared = times_changed(self._gathered) != self._version
            self._gathered.grad, self._is_marked = None, False
            if was_cleared:
                clear(optimizer)
        if self._looks_left and self._gathered is None:
            self._looks_left -= 1
            gathered = (p for p in self._module.parameters() if id(p) not in self._own and p.requires_grad)
            self._gathered = min(gathered, key=torch.numel, default=None)

    def begins_update(self) -> None:
        """Also after one that was left in its middle."""
        self._witness = None

    def before_backward(self, *, is_last: bool) -> None:
        """Of a loop with one optimizer.

        Raises:
            UsageError: the gradients of the update's earlier batches are gone.
        """
        if self._witness is not None and (times_changed(self._witness) != self._version or self._has_other_values()):
            self._was_changed(self._witness.grad)
        if self._witness is None and not is_last:
            self._shown = list(self._module.parameters())

    def _has_other_values(self) -> bool:
        """`gradient.data.clamp_()` and `GradScaler.unscale_` are changes that torch does not count."""
        before, self._before = self._before, None
        if before is None or self._witness is None or self._witness.grad is None:
            return False
        return not torch.allclose(local(self._witness.grad), before, rtol=0, atol=0, equal_nan=True)

    def _was_changed(self, gradient: torch.Tensor | None) -> None:
        if gradient is None or not float(gradient.abs().sum()):
            raise OwnLoopError(
                "the gradients of an update must be kept until its last batch, but something has dropped them in the middle. "
                "Clear them by zero_grad() of the optimizer that prepare() returned, which knows when."
            )
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "gradients were changed in the middle of an update, when only some of its batches are in them: was "
                "torch.nn.utils.clip_grad_norm_ left in the loop, or GradScaler.unscale_? Call window.clip_grad_norm_(max_norm) "
                "or window.clip_grad_value_(max_value), which wait for the update's last batch and clip over all ranks, and let "
                "prepare(precision='fp16') scale. Change gradients otherwise under `if window.is_last` alone"
            )

    def after_backward(self, *, is_last: bool) -> None:
        if is_last:
            self._witness = None
        elif self._witness is None:
            # What an unfinished sum lies in: parameters that the loop saw between the passes, which are gathered ones where there
            # are such; else shards, which are back in their place by now.
            shown, those = ([p for p in each if p.grad is not None] for each in (self._shown, self._module.parameters()))
            self._witness = min(shown or those, key=torch.numel, default=None)
        self._shown = []
        if self._witness is not None:
            self._version = times_changed(self._witness)
            if self._comparisons_left and not self._has_told:
                self._comparisons_left -= 1
                assert self._witness.grad is not None
                self._before = local(self._witness.grad).detach().clone()
