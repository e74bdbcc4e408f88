"""Checks that all ranks use a sharded module alike: the same blocks in the same order, with gradients of the same parameters.

`fully_shard` gathers a block when it is called, and reduces its gradients after its backward pass. The first collective on one
rank is paired with the first on the others. If a rank calls another block of the same size, it gets weights that are partly one
block's and partly the other's, and sums go to the wrong parameters, without an error. If sizes differ, the collective fails.

Examples: each rank skips layers by a generator of its own, or only rank 0 calls a head (tests/parallel/test_same_calls.py).

How many numbers are reduced also depends on which parameters of a block have gradients: `_EquallyMany` sends equally many on all
ranks.

Each rank compares a window's calls with those of the window before, and reports only a change, in the message that the window
sends anyway. If no rank reports a change, all ranks still do the same. Which parameters have gradients is known only when the
window has been reduced, so it is reported in the next window, at a save, or at the end. Calls of an evaluation are compared at
its end.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError, RanksDisagreeError
from echelon.parallel.experts.distribute import divided_experts, divided_parameters
from echelon.parallel.guards.guard import Guard
from echelon.parallel.names import class_name, plain_name, plain_names
from echelon.parallel.older_torch import reduce_scatter_single
from echelon.parallel.shards import is_fully_sharded, is_split, reshard
from echelon.world import agree

__all__ = ["SameCalls", "SameGradients"]

_BITS = 18  # then sums of squares over 2 ** 14 ranks are exact in float64
_REMEMBERED = 10_000  # calls kept one by one; text generation token by token makes millions
_REMEDY = (
    "If layers are skipped at random, draw on all ranks from generators with the same seed; call a layer that only some ranks "
    "need on all ranks, with its output times 0 on the others; or train under 'ddp'."
)


class SameCalls(Guard):
    """Compares between ranks which blocks of a sharded module they call, and which of its parameters have gradients.

    Args:
        reduces: torch's own reduce-scatter is in use; replace it by one that sends equally many numbers on all ranks.
    """

    numbers = 2  # a hash of what this rank has done, and its square

    def __init__(self, module: nn.Module, *, reduces: bool = True) -> None:
        self._module = module
        self._blocks: list[str] = []
        for name, part in module.named_modules():
            if is_fully_sharded(part):
                part.register_forward_pre_hook(torch.compiler.disable(self._noting(len(self._blocks))))
                self._blocks.append(plain_name(name) or class_name(module))
                if reduces:
                    with contextlib.suppress(ValueError):  # torch refuses if it reduces the block in several calls
                        part.set_custom_reduce_scatter(_EquallyMany(part))
        experts = divided_parameters(module)
        named = [(n, p) for n, p in plain_names(module) if is_split(p) and p not in experts]
        self._names, self._parameters = [n for n, _ in named], [p for _, p in named]
        self._now, self._ungraded = _Calls(), _Calls()  # with gradients and without, since the latest window or evaluation
        self._calls: tuple[list[int], int] = [], 0
        self._without: list[bool] = []  # for each parameter: had no gradient after the latest window
        self._looked_after = 0  # the update after which `_without` was recorded, from 0
        self._said = (0.0, 0.0)

    def _noting(self, number: int) -> Any:
        def note(part: nn.Module, args: Any) -> None:
            (self._now if torch.is_grad_enabled() else self._ungraded).add(number)

        return note

    def signature(self) -> tuple[float, float]:
        calls = self._now.take()
        self._ungraded.take()
        if calls != self._calls or self.has_news:
            self._calls, self.has_news = calls, True
            self._said = self._number()
        return self._said

    def _number(self) -> tuple[float, float]:
        number = 1.0 + zlib.crc32(repr((self._calls, self._without)).encode()) % ((1 << _BITS) - 1)
        return number, number * number

    def check(self, sums: Sequence[float], ranks: int, update: int) -> None:
        if sums:
            total, squares = map(round, sums)
            self.has_news = False
            if ranks * squares != total * total:
                self._compare(update)
        without, self._looked_after = [p.grad is None for p in self._parameters], update
        if without != self._without:
            self._without, self.has_news = without, True

    def discard(self) -> None:
        self._now.take()

    def evaluated(self) -> None:
        calls = self._ungraded.take()
        if not agree.is_same(list(calls)):
            self._compare_calls(agree.gather(self._named(calls)), "the evaluation", "Its numbers are wrong.")

    def settle(self) -> None:
        if agree.any_rank(self.has_news):
            self.has_news, self._said = False, self._number()
            self._compare(self._looked_after)

    def _compare(self, update: int) -> None:
        every = agree.gather([self._named(self._calls), self._lacking()])
        self._compare_calls([each for each, _ in every], f"update {update}", "The update was not made.")
        lacking = [set(each) for _, each in every]
        if (other := _another(lacking)) is not None:
            name = min(lacking[0] ^ lacking[other])
            having, without = (0, other) if name in lacking[other] else (other, 0)
            raise RanksDisagreeError(
                f"the ranks must compute gradients of the same parameters of {class_name(self._module)}, which are reduced "
                f"together; in update {self._looked_after} rank {having} had a gradient of {name} and rank {without} had none, "
                f"so sums went to wrong parameters. Continue from an earlier checkpoint. {_REMEDY}"
            )

    def _compare_calls(self, calls: list[list[str]], when: str, so: str) -> None:
        if (other := _another(calls)) is not None:
            at, ours, theirs = _first_difference(calls[0], calls[other])
            raise RanksDisagreeError(
                f"the ranks must call the blocks of {class_name(self._module)} in the same order, in which its parameters are "
                f"gathered and its gradients reduced; as call {at} of {when} rank 0 {ours} and rank {other} {theirs}. {so} "
                f"{_REMEDY}"
            )

    def _named(self, calls: tuple[list[int], int]) -> list[str]:
        first, others = calls
        return [self._blocks[at] for at in first] + ([f"further blocks ({others:08x})"] if others else [])

    def _lacking(self) -> list[str]:
        return [name for name, is_without in zip(self._names, self._without, strict=False) if is_without]


class _Calls:
    """The first calls, by block index, and a checksum of the calls after them."""

    def __init__(self) -> None:
        self._first: list[int] = []
        self._others = 0

    def add(self, number: int) -> None:
        if len(self._first) < _REMEMBERED:
            self._first.append(number)
        else:
            self._others = zlib.crc32(number.to_bytes(4, "little"), self._others)

    def take(self) -> tuple[list[int], int]:
        """Return the calls so far, and start anew."""
        taken, self._first, self._others = (self._first, self._others), [], 0
        return taken


class _EquallyMany:
    """For `FSDPModule.set_custom_reduce_scatter`: reduces as many numbers as if all parameters had gradients.

    torch leaves out parameters without a gradient. If only some ranks lack a gradient, gloo ends the process and NCCL hangs. With
    equal sizes sums go to wrong parameters instead, which `SameCalls` reports on all ranks before they are used further.
    """

    def __init__(self, part: nn.Module) -> None:
        below = {p for each in part.modules() if each is not part and is_fully_sharded(each) for p in each.parameters()}
        below |= {p for _, experts, _ in divided_experts(part) if experts is not part for p in experts.parameters()}
        self._most = sum(_most_of_a_rank(p) for p in part.parameters() if p.requires_grad and is_split(p) and p not in below)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        if (own := output_tensor.numel()) >= self._most:  # larger after layers were unfrozen
            return reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        sent = input_tensor.new_zeros(group.size(), self._most)
        sent[:, :own] = input_tensor.view(group.size(), own)
        output_tensor.resize_(self._most)  # in place: replicas all-reduce it next, and torch reads its beginning
        return reduce_scatter_single(output_tensor, sent.view(-1), group=group, op=op, async_op=async_op)


def _most_of_a_rank(parameter: Any) -> int:
    """The largest number of the parameter's elements on any rank: a reduction counts this many for every rank."""
    shape = list(parameter.shape)
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        if not placement.is_replicate():  # torch 2.13's is_shard() is false for a dim that is split twice
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return math.prod(shape)


def _another(every: Sequence[Any]) -> int | None:
    """The first rank whose entry differs from rank 0's."""
    return next((r for r, each in enumerate(every) if each != every[0]), None)


def _first_difference(own_calls: Sequence[str], others: Sequence[str]) -> tuple[int, str, str]:
    """The position of the first difference, from 1, and what each of the two ranks does there."""
    for at, (a, b) in enumerate(zip_longest(own_calls, others), 1):
        if a != b:
            return at, _said(a), _said(b)
    raise AssertionError("the two are the same")


def _said(called: str | None) -> str:
    return "made no further call" if called is None else f"called {called}"


# Checks that the same parameters have gradients in all micro-batches of a window, on which a deferred all-reduce relies.
#
# With replicas of the shards, `fully_shard` keeps one flat sum per unit until its all-reduce, and adds to it by position. If
# other parameters of the unit had gradients in an earlier micro-batch, gradients would be added to the wrong parameters. If none
# has a gradient in the last micro-batch, the sum would be left over for the next window. Seen with torch 2.13;
# tests/loop/test_accumulation.py has both: models whose heads take turns by micro-batch.


class SameGradients(Guard):
    """Watches the gathered parameters of a sharded module, each from the first forward pass that gathers it.

    Args:
        together: all ranks call `end_backward` and `settle` equally often, so that they learn of each other's errors.
    """

    def __init__(self, module: nn.Module, *, together: bool = False) -> None:
        self._now: set[str] = set()
        self._told = agree.AnyRanksLater() if together else None
        self._problem: str | None = None
        self._first: set[str] | None = None
        reshard(module)
        # Parameters that `fully_shard` leaves alone, such as scalars, are reduced separately.
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
        """Called after a micro-batch's backward pass. With `together`, `settle` raises on all ranks what is found here.

        Raises:
            UsageError: other parameters had gradients than in the window's first micro-batch.
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
            "over replicas of the shards cannot wait for the last micro-batch. Set FSDPStrategy(requires_all_reduce=True)."
            if others
            else None
        )
        if self._told is not None:
            self._problem = self._problem or problem
            if not is_first:  # the first micro-batch has nothing to compare with
                self._told(self._problem is not None)
        elif problem is not None:
            raise LayoutError(problem)

    def settle(self) -> None:
        """Called before a backward pass, in which replicas may wait for each other, and before an update. Collective: the latest
        `end_backward` has sent the message.

        Raises:
            UsageError: on all ranks, if one has found a difference.
        """
        if self._told is not None and self._told.last():
            problem, self._problem = self._problem, None
            raise LayoutError(str(agree.first_not_none(problem)))
