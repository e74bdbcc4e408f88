"""Whether the same parameters have gradients in all micro-batches of a window: what deferring an all-reduce relies on.

With copies of the shards, `fully_shard` keeps one flat sum for each unit until its all-reduce, and adds to it by place: where
another parameter of the unit had a gradient in an earlier micro-batch, it would be added to the wrong one; where none has in the
last, the sum would be left over for the next window. Seen with torch 2.13; tests/loop/test_accumulation.py has both:
models whose heads take turns by micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.guards.guard import Guard
from echelon.parallel.shards import is_fully_sharded, is_split, reshard
from echelon.world import agree

__all__ = ["SameGradients"]


class SameGradients(Guard):
    """Watches the whole parameters of a sharded module, each from the first forward pass on that gathers it.

    Args:
        together: all ranks make the same calls of `end_backward` and `settle`, so that they learn of each other's errors.
    """

    def __init__(self, module: nn.Module, *, together: bool = False) -> None:
        self._now: set[str] = set()
        self._told = agree.AnyRanksLater() if together else None
        self._problem: str | None = None
        self._first: set[str] | None = None
        reshard(module)
        # What `fully_shard` leaves alone, as scalars, is reduced apart.
        self._known = {p for p in module.parameters() if not is_split(p)}
        for name, part in module.named_modules():
            if is_fully_sharded(part):
                part.register_forward_pre_hook(torch.compiler.disable(self._looking(f"{name}." if name else "")))

    def _looking(self, prefix: str) -> Any:
        seen: set[nn.Module] = set()

        def look(part: nn.Module, args: Any) -> None:
            if part in seen or not torch.is_grad_enabled():
                return
            seen.add(part)
            for name, parameter in part.named_parameters():
                if parameter.requires_grad and not is_split(parameter) and parameter not in self._known:
                    self._known.add(parameter)
                    parameter.register_post_accumulate_grad_hook(lambda _, name=prefix + name: self._now.add(name))

        return look

    def discard(self) -> None:
        self._now, self._first, self._problem = set(), None, None
        if self._told is not None:
            self._told.last()

    def end_backward(self, *, last: bool) -> None:
        """After the backward pass of a micro-batch. Where ranks call `settle`, that raises what is found here, on all.

        Raises:
            UsageError: other parameters had gradients than in the window's first.
        """
        now, self._now = self._now, set()
        is_first = self._first is None
        if self._first is None:
            self._first = now
        others = sorted(self._first ^ now)
        if last or others:
            self._first = None
        problem = (
            f"{others[0]} has a gradient in some micro-batches of an accumulation window and none in others, so the all-reduce "
            "over the copies of the shards cannot wait for the last of them. Give FSDPStrategy(requires_all_reduce=True)."
            if others
            else None
        )
        if self._told is not None:
            self._problem = self._problem or problem
            if not is_first:  # in which nothing can be found
                self._told(self._problem is not None)
        elif problem is not None:
            raise LayoutError(problem)

    def settle(self) -> None:
        """Also before a backward pass, in which copies may wait for one another, and before an update. Collective: the latest
        `end_backward` has sent the message.

        Raises:
            UsageError: on all ranks, what one has found.
        """
        if self._told is not None and self._told.last():
            problem, self._problem = self._problem, None
            raise LayoutError(str(agree.first_told(problem)))
