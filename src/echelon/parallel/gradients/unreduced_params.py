"""Averages gradients over the data-parallel ranks for parameters whose gradients the layout does not reduce.

These are: scalars, which `fully_shard` cannot split; parameters that the optimizer has besides the module's, such as a learned
loss weight of the unit; and layers that the module got after it was made parallel. Communication: one all-reduce per dtype, of a
few numbers as a rule, after the last backward pass of a window.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from echelon.common.errors import LayoutError
from echelon.parallel.gradients.fixed_order import tree_sum
from echelon.parallel.shards import is_split
from echelon.world import agree
from echelon.world.device import from_host

__all__ = [
    "AfterEachBackward",
    "Joined",
    "after_backward",
    "average_",
    "check_equal",
    "hook_backward",
    "in_buckets",
    "tracked_tensors",
]

K = TypeVar("K")
Groups = Sequence[dist.ProcessGroup | None]
_AT_ONCE = 1 << 24  # elements in one message: their copy takes 64 MiB in float32


def in_buckets(tensors: Mapping[K, torch.Tensor]) -> Iterator[list[K]]:
    """The keys of tensors that are sent together: of one dtype and device, and of at most `_AT_ONCE` elements unless a single
    tensor has more.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[K]] = {}
    for key, tensor in tensors.items():
        kinds.setdefault((tensor.dtype, tensor.device), []).append(key)
    for keys in kinds.values():
        bucket, size = list[K](), 0
        for key in keys:
            if bucket and size + tensors[key].numel() > _AT_ONCE:
                yield bucket
                bucket, size = [], 0
            bucket.append(key)
            size += tensors[key].numel()
        yield bucket


@torch.no_grad()
def average_(parameters: Iterable[nn.Parameter], groups: Groups, *, in_order: bool = False) -> None:
    """Replace each gradient by its mean over the ranks. A gradient that is missing on a rank counts as zero there. Collective.

    Averaging a mean again changes nothing, so gradients that something else has reduced are safe. A gradient that is sparse on
    every rank that has it stays sparse, as SparseAdam needs.

    Args:
        parameters: the same on all ranks, in the same order.
        groups: one for each axis of data-parallel ranks.
        in_order: add in the order of `parallel/gradients/fixed_order`.
    """
    for same in in_buckets({parameter: parameter for parameter in parameters}):
        parts = [p.new_zeros(p.numel()) if p.grad is None else _dense(p.grad).reshape(-1) for p in same]
        # Which gradients a rank has: one that no rank has stays None, so the optimizer skips its parameter.
        flags = from_host([float(p.grad is not None) for p in same], same[0])
        sparse = from_host([float(p.grad is not None and p.grad.is_sparse) for p in same], same[0])
        flat = torch.cat([*parts, flags, sparse])
        flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
        for group in groups:
            flat = _mean(flat, group, in_order)
        start, shared = 0, zip(*flat[-2 * len(same) :].view(2, -1), strict=True)
        for parameter, (flag, sparse_flag) in zip(same, shared, strict=True):
            mean = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad.copy_(mean)
            elif parameter.grad is not None or bool(flag.abs() > 0):  # reading the flag waits for a device, so it comes last
                mean = mean.to(parameter.dtype, copy=True)
                parameter.grad = mean.to_sparse(1) if bool(sparse_flag == flag) else mean


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _mean(flat: torch.Tensor, group: dist.ProcessGroup | None, in_order: bool) -> torch.Tensor:
    size = dist.get_world_size(group)
    if not in_order:
        dist.all_reduce(flat, group=group)
        return flat.div_(size)
    gathered = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(gathered, flat, group=group)
    return tree_sum(gathered).div_(size)


class Joined:
    """Finds parameters that a module got after it was made parallel, which its layout does not know."""

    def __init__(self, before: Iterable[nn.Parameter]) -> None:
        # Not weak references: `module.to(...)` swaps DTensors, and torch refuses to swap a tensor that has one.
        self._before = {p for p in before if not is_split(p)}

    def trained(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p.requires_grad and not is_split(p) and p not in self._before]


def check_equal(parameters: Sequence[nn.Parameter], groups: Groups, what: str) -> None:
    """Check that all ranks of each group have the same parameters with the same values. Collective.

    Raises:
        UsageError: on all ranks of a group, if they differ.
    """
    facts = [[list(p.shape), str(p.dtype), str(complex(p.detach().to(torch.complex128).sum()))] for p in parameters]
    for group in groups:
        if len(agree.kinds(facts, group)) > 1:
            raise LayoutError(
                f"{what} that differ between ranks, and averaging their gradients would not make them equal. "
                "Make them part of the module before it is made parallel, or seed all ranks alike before creating them. To let "
                "each rank train its own, use a TrainUnit."
            )


class AfterEachBackward:
    """Averages gradients of whole parameters, for users who call `backward` themselves.

    Averages in every backward pass: with several passes per update, each pass adds to the mean of the sum so far.

    Args:
        listens: average after a pass through the module's outputs, too, if it reaches none of the parameters on this rank.
            Without it, call `forget` before each step.
    Attributes:
        enabled: False if the loop averages them instead.
    """

    _all: ClassVar[weakref.WeakKeyDictionary[nn.Module, AfterEachBackward]] = weakref.WeakKeyDictionary()

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], groups: Groups, *, listens: bool = True) -> None:
        self.enabled = True
        self._parameters, self._groups, self._is_awaited = list(parameters), list(groups), False
        AfterEachBackward._all[module] = self
        # All ranks call the root, but not all need to have used such a parameter.
        self._handles = [module.register_forward_hook(self._listen)] if listens else []
        for parameter in self._parameters:
            needed = parameter.requires_grad  # a frozen parameter may be trained later
            self._handles.append(parameter.requires_grad_(True).register_post_accumulate_grad_hook(lambda _: self._expect()))
            parameter.requires_grad_(needed)

    @classmethod
    def of(cls, module: nn.Module) -> AfterEachBackward | None:
        return cls._all.get(module)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Begin anew, even if the last backward pass ended in an error."""
        self._is_awaited = False

    def _listen(self, module: nn.Module, args: Any, output: Any) -> None:
        self.forget()
        if torch.is_grad_enabled():
            self.before_backward(output)

    def before_backward(self, output: Any) -> None:
        """Average after the backward pass of these outputs, whichever parameters it reaches on this rank."""
        if self.enabled:
            hook_backward(output, lambda _: self._expect())

    def _expect(self) -> None:
        if self.enabled and not self._is_awaited:
            self._is_awaited = True
            after_backward(self._average)

    def _average(self) -> None:
        self._is_awaited = False
        average_((p for p in self._parameters if p.requires_grad), self._groups)


# Hooks for a backward pass, and for the end of the current one.
#
# torch has no public hook for the end of a backward pass. DistributedDataParallel and FSDP queue their last work as done here.
# Tested with torch 2.13; tests/parallel/test_gradients.py notices a change.


def hook_backward(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` in the backward pass with the gradient of each tensor in these outputs of a forward pass."""
    for tensor in tracked_tensors(output):
        tensor.register_hook(hook)


def tracked_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors with a graph in these outputs: in containers, in sets, in attributes of objects such as distributions. Not
    parameters, which would keep a hook forever, nor tensors that only a call yields, as of a generator."""
    if isinstance(output, torch.Tensor):
        return [output] if output.grad_fn is not None else []
    tracked, seen, todo = dict[int, torch.Tensor](), set[int](), [output]
    while todo:
        for leaf in tree_leaves(todo.pop()):
            if isinstance(leaf, torch.Tensor):
                if leaf.grad_fn is not None:
                    tracked[id(leaf)] = leaf
            elif isinstance(leaf, set | frozenset):
                todo.extend(leaf)
            elif hasattr(leaf, "__dict__") and id(leaf) not in seen and not isinstance(leaf, nn.Module | type | FunctionType):
                seen.add(id(leaf))
                todo.append(list(vars(leaf).values()))
    return list(tracked.values())


def after_backward(call: Callable[[], None]) -> None:
    """Call `call` once when the current backward pass ends, in the thread that called `backward`. Only from a backward hook."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
