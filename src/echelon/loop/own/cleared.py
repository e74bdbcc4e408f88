"""Gradients that a loop clears without its optimizer: by `model.zero_grad()`, or `parameter.grad = None`.

Between forward and backward passes, a sharded model shows gathered parameters. What a loop does to their gradients does not reach
the shards, which the optimizer holds. Within an update, nothing may clear gradients, in any layout.
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

_MOST_LOOKS = 8  # looks for a gathered parameter; with several optimizers, not every look comes after a pass of the module
_MOST_COMPARISONS = 16  # comparisons of a gradient's values


class Cleared:
    """Notices that a loop clears or changes an optimizer's gradients, by watching one parameter.

    Args:
        module: has the parameters that the optimizer holds; nothing is gathered at this point.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._own = module, {id(parameter) for parameter in module.parameters()}
        self._looks_left = _MOST_LOOKS if any(map(is_split, module.parameters())) else 0
        self._is_marked = self._has_told = False
        self._gathered: nn.Parameter | None = None  # one that the loop sees between passes in place of a shard
        self._shown: list[nn.Parameter] = []  # all parameters that the loop sees between passes
        self._witness: nn.Parameter | None = None  # one with a gradient, within an update
        self._version = 0
        # A copy of the witness's gradient; only in the first updates, because the comparison waits for the device.
        self._before: torch.Tensor | None = None
        self._comparisons_left = _MOST_COMPARISONS

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Until the next backward pass, give a gathered parameter a gradient; a loop that clears gradients removes it."""
        if self._gathered is not None and self._gathered.grad is None and has_gradients(optimizer):
            self._gathered.grad, self._is_marked = torch.zeros_like(self._gathered), True
            self._version = times_changed(self._gathered)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a backward pass: if the loop has cleared the gathered parameters' gradients, clear those of the shards."""
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
        """A new update begins, perhaps after one that was not finished."""
        self._witness = None

    def before_backward(self, *, is_last: bool) -> None:
        """Check the gradients of a loop with one optimizer.

        Raises:
            UsageError: the gradients of the update's earlier batches are gone.
        """
        if self._witness is not None and (times_changed(self._witness) != self._version or self._has_other_values()):
            self._was_changed(self._witness.grad)
        if self._witness is None and not is_last:
            self._shown = list(self._module.parameters())

    def _has_other_values(self) -> bool:
        """Whether the witness's gradient has changed. torch does not count `gradient.data.clamp_()` and `GradScaler.unscale_`."""
        before, self._before = self._before, None
        if before is None or self._witness is None or self._witness.grad is None:
            return False
        return not torch.allclose(local(self._witness.grad), before, rtol=0, atol=0, equal_nan=True)

    def _was_changed(self, gradient: torch.Tensor | None) -> None:
        if gradient is None or not float(gradient.abs().sum()):
            raise OwnLoopError(
                "the gradients of an update must be kept until its last batch, but something has cleared them in the middle. "
                "Clear them by zero_grad() of the optimizer that prepare() returned, which knows when."
            )
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "gradients were changed in the middle of an update, when only some of its batches are in them: was "
                "torch.nn.utils.clip_grad_norm_ left in the loop, or GradScaler.unscale_? Call window.clip_grad_norm_(max_norm) "
                "or window.clip_grad_value_(max_value), which wait for the update's last batch and clip over all ranks, and let "
                "prepare(precision='fp16') scale. Make other changes to gradients only under `if window.is_last`"
            )

    def after_backward(self, *, is_last: bool) -> None:
        if is_last:
            self._witness = None
        elif self._witness is None:
            # The unfinished sum of gradients is in the parameters that the loop saw between passes, if some were gathered; else
            # in the shards, which are back in the module by now.
            shown, those = ([p for p in each if p.grad is not None] for each in (self._shown, self._module.parameters()))
            self._witness = min(shown or those, key=torch.numel, default=None)
        self._shown = []
        if self._witness is not None:
            self._version = times_changed(self._witness)
            if self._comparisons_left and not self._has_told:
                self._comparisons_left -= 1
                assert self._witness.grad is not None
                self._before = local(self._witness.grad).detach().clone()
