"""Traces what an update holds, sends and computes on this rank: every storage from allocation to release, by kind and module."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from echelon.parallel.shards import local
from echelon.planner.allocator import Allocator, Block, expands
from echelon.planner.flops import flops_of
from echelon.planner.pretended import (
    CollectiveOp,
    FakeTensor,
    TorchDispatchMode,
    collective_ops,
    is_backward,
    is_plain,
    ranks_of,
    sync_ops,
)
from echelon.planner.steps import COPY_IN, Collective, Operator, Step, operator_of, tensors_in

__all__ = ["BINS", "KINDS", "Trace", "Traced"]

BINS = 240  # parts of an update in its picture

# Kinds of memory, in the order in which they are shown.
KINDS = ("parameters", "gradients", "optimizer", "buffers", "kept", "activations", "gathered", "communication", "temporary")


_HOST = "host"  # the kind of storages in the host's memory


@dataclass
class Traced:
    """What a rank did in an update.

    Attributes:
        peak: the most bytes of tensors at one time.
        reserved: bytes that CUDA's caching allocator reserves on the device for them.
        by_kind: bytes at the peak, by kind (`KINDS`).
        by_module: activations at the peak, by the module in whose forward pass they were made.
        moment: of the peak: forward, backward or optimizer.
        module: the module in whose pass the peak was.
        resident: bytes that exist between updates.
        calls, message: number of collectives, and their bytes, by (kind, number of ranks). Bytes are those of the whole tensor
            for all-gathers, reduce-scatters and all-reduces; for all-to-all and messages to a neighbour, those that a rank sends.
        flops: of matrix products and attention, including recomputation.
        repeated: FLOPs of recomputation.
        types: FLOPs by dtype.
        steps: operators and collectives, in order.
        curve: the update in `BINS` parts of equally many steps: for each, the bytes by `KINDS` at its fullest moment.
    """

    peak: int = 0
    reserved: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    by_module: dict[str, int] = field(default_factory=dict)
    moment: str = ""
    module: str = ""
    resident: int = 0
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    message: Counter[tuple[str, int]] = field(default_factory=Counter)
    flops: int = 0
    repeated: int = 0
    types: Counter[str] = field(default_factory=Counter)
    steps: list[Step] = field(default_factory=list)
    curve: list[list[int]] = field(default_factory=list)

    def copy(self) -> Traced:
        """A copy of the current state."""
        calls, message, types = Counter(self.calls), Counter(self.message), Counter(self.types)
        return replace(self, calls=calls, message=message, types=types, steps=list(self.steps))

    def repeat(self, begin: Traced, end: Traced, times: int) -> None:
        """Repeat what happened between two copies `times` more times, right after it."""
        for name in ("calls", "message", "types"):
            more = {kind: times * (many - getattr(begin, name)[kind]) for kind, many in getattr(end, name).items()}
            getattr(self, name).update(more)
        self.flops += times * (end.flops - begin.flops)
        self.repeated += times * (end.repeated - begin.repeated)
        at = len(end.steps)
        self.steps[at:at] = end.steps[len(begin.steps) :] * times

    def sent(self) -> float:
        """Bytes that this rank sends if each collective sends as little as possible: in a ring, or to each rank only its part."""
        return sum(size * _RING.get(kind, _all_of_it)(ranks) for (kind, ranks), size in self.message.items())


def _all_of_it(ranks: int) -> float:
    return 1.0


def _others_parts(ranks: int) -> float:
    return (ranks - 1) / ranks


def _twice(ranks: int) -> float:
    return 2 * _others_parts(ranks)


def _nothing(ranks: int) -> float:
    return 0.0


_RING = {
    "all-gather": _others_parts,
    "reduce-scatter": _others_parts,
    "all-reduce": _twice,
    "all-to-all": _others_parts,
    "receive": _nothing,
}
_COLLECTIVES = {  # the first entry whose key is in the operator's name
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}


@dataclass(eq=False)
class _Storage:
    kind: str
    module: str
    size: int = 0
    stream: str = ""  # the CUDA stream in which it would be allocated


class Trace(TorchDispatchMode):
    """Context that traces operators, collectives and storages.

    Args:
        on_gpu: what an allocation is a multiple of, 512 bytes in CUDA's allocator, about 64 in a CPU's; and whether collectives
            need memory of their own, as gloo's do.
    Attributes:
        leaves_out: whether to leave out the current operators, such as trial passes of a pipeline in the first update.
        has_stepped: an optimizer has stepped in the current update.
    """

    def __init__(self, on_gpu: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.leaves_out: Callable[[], bool] = lambda: False
        self._on_gpu, self._rounding = on_gpu, 512 if on_gpu else 64
        self._buffer = _Storage("communication", "")  # of the latest collective of gloo
        self._storages: weakref.WeakKeyDictionary[torch.UntypedStorage, _Storage] = weakref.WeakKeyDictionary()
        # (storage, bytes more, moment, module, number of steps before)
        self._changes: list[tuple[_Storage, int, str, str, int]] = []
        self._begins = 0  # index of the latest update's first change
        self._offloads = False
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._count_storages = itertools.count()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._inside: list[str] = []
        self._steps = self.has_stepped = False
        self._is_over = False
        self._counts = Traced()
        self._undo: list[Any] = []

    # --- the kinds of tensors

    def watch(
        self,
        module: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        kept: Iterable[Any] = (),
        communication: Iterable[torch.Tensor] = (),
        *,
        offloads: bool = False,
    ) -> None:
        """Register tensors that exist already: parameters, buffers, others that are `kept`, and buffers of collectives.

        Args:
            offloads: shards of parameters, their gradients and the optimizer's state are in the host's memory.
        """
        self._offloads = offloads
        self._names.update((part, name) for name, part in module.named_modules())
        for each in kept:  # first, since the module may have some of these
            self._label(each, "kept")
        for each in communication:
            self._label(each, "communication")
        for parameter in module.parameters():
            self._label(parameter, "parameters")
        for buffer in module.buffers():
            self._label(buffer, "buffers")
        for optimizer in optimizers:
            self._undo.append(optimizer.register_step_pre_hook(self._step_begins))
            self._undo.append(optimizer.register_step_post_hook(self._step_ends))

    def _label(self, tensor: Any, kind: str) -> None:
        if isinstance(tensor, torch.Tensor):
            shard = local(tensor)
            kind = _HOST if self._offloads and shard is not tensor else kind
            self._see(shard, kind)
            self._storages[shard.untyped_storage()].kind = kind

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._label(parameter.grad, "gradients")

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps, self.has_stepped = False, True
        for state in optimizer.state.values():
            for value in state.values():
                self._label(value, "optimizer")

    def on_host(self, tensor: torch.Tensor) -> None:
        """The tensor, which was made by the last operator, is in the host's memory."""
        self._label(tensor, _HOST)
        last = self._counts.steps[-1]
        if isinstance(last, Operator):
            self._counts.steps[-1] = replace(last, host=tensor.nbytes)

    # --- updates and modules

    def so_far(self) -> Traced:
        """A copy of the current update's trace."""
        return self._counts.copy()

    def next_update(self) -> None:
        """End the current update and start the next."""
        self._counts, self._begins, self.has_stepped = Traced(), len(self._changes), False

    @property
    def _moment(self) -> str:
        return "optimizer" if self._steps else "backward" if is_backward() else "forward"

    def __enter__(self) -> Trace:
        self._undo.append(register_module_forward_pre_hook(self._enter_module))
        self._undo.append(register_module_forward_hook(self._leave_module, always_call=True))
        # `fully_shard` frees and allocates memory by it, without an operator.
        self._resize = mock.patch.object(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))
        self._resize.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._resize.stop()

    def close(self) -> None:
        self._is_over = True
        for each in self._undo:
            each.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._inside.append(self._names.get(module, self._inside[-1] if self._inside else ""))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside:
            self._inside.pop()

    # --- operators
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(map(is_plain, types)):
            return NotImplemented  # a wrapper's operators on its inner tensors come here, too
        kwargs = kwargs or {}
        if op is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
            return args[0]  # a number that autograd saved reaches the mode as a number, which the operator refuses
        made = op(*args, **kwargs)
        if self.leaves_out():
            return made
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, FakeTensor):  # unknown so far: of another model, such as a teacher
                self._see(tensor, "kept")
        kind = None
        if op in sync_ops:
            kind = "communication"
            numbers = tuple(map(self._number, tensors_in(args)))
            self._counts.steps.append(Operator(op._schema.name, self._moment, numbers, (), 0))
        elif op in collective_ops:
            kind = self._communicates(op, made, args, kwargs)
        else:
            self._operates(op, made, args, kwargs)
        for tensor in tensors_in(made):
            self._see(tensor, kind)
        self._allocates_aside(op, made, args)
        return made

    def _allocates_aside(self, op: Any, made: Any, args: Any) -> None:
        """Note the streams: `fully_shard` allocates the buffers of its gathers and its reductions in streams of their own."""
        name = op._schema.name
        if name == COPY_IN:
            for known in self._known(made, args[0]):
                known.stream = "" if known.kind == "parameters" else "gather"
        elif name == "c10d::_reduce_scatter_base_":
            for known in self._known(args[0]):
                known.stream = "reduce"
        elif name == "aten::_to_copy" and any(known.stream == "reduce" for known in self._known(args)):
            for known in self._known(made):
                known.stream = "reduce"

    def _known(self, *values: Any) -> list[_Storage]:
        storages = (tensor.untyped_storage() for tensor in tensors_in(values))
        return [self._storages[each] for each in storages if each in self._storages]

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = next(self._count_storages)
        return self._numbers[storage]

    def _operates(self, op: Any, made: Any, args: Any, kwargs: Any) -> None:
        is_repeated = bool(self._inside) and is_backward()  # a module's forward pass inside the backward pass
        step = operator_of(op, made, args, kwargs, self._moment, self._number, is_repeated)
        if step is not None:
            far = sum(known.size for known in self._known(args, tuple(kwargs.values())) if known.kind == _HOST)
            self._counts.steps.append(replace(step, host=far) if far else step)
        if flops := flops_of(op, made, args, kwargs):
            self._release_buffer()
            self._counts.flops += flops
            self._counts.types[step.dtype if step else ""] += flops
            self._counts.repeated += flops if is_repeated else 0

    def _communicates(self, op: Any, made: Any, args: Any, kwargs: Any) -> str:
        name = op._schema.name
        kind = next(kind for word, kind in _COLLECTIVES.items() if word in name)
        whole = CollectiveOp.get_comm_tensor_size(op, made, args, kwargs)
        if "gather_into_tensor" in name and "out" not in name:
            whole = sum(t.nbytes for t in tensors_in(made))
        elif kind == "reduce-scatter" and "c10d_functional" in name:
            whole = sum(t.nbytes for t in tensors_in(args))
        elif kind in ("all-reduce", "all-to-all", "send", "receive"):
            whole = sum(t.nbytes for t in tensors_in(args[1] if "alltoall_base" in name else args[0]))
        members = ranks_of(CollectiveOp.get_process_group(op, args))
        ranks = len(members)
        self._counts.calls[kind, ranks] += 1
        self._counts.message[kind, ranks] += whole
        reads = {self._number(t) for t in tensors_in(args)}
        # Collectives of `torch.distributed` fill their first argument; functional ones return a new tensor.
        into = made if "c10d_functional" in name else () if kind == "send" else args[0]
        written = {self._number(t) for t in tensors_in(into)}
        peer = members[args[2]] if kind in ("send", "receive") else None
        self._counts.steps.append(Collective(kind, self._moment, tuple(reads), tuple(written), whole, members, peer))
        label = "gathered" if kind == "all-gather" else "communication"
        if kind in ("all-gather", "reduce-scatter"):
            for tensor in tensors_in(args):
                if (known := self._storages.get(tensor.untyped_storage())) is not None and known.kind in (
                    "temporary",
                    "activations",
                ):
                    known.kind = label
            if not self._on_gpu:
                self._release_buffer()
                self._count(self._buffer, whole)
        return label

    def _release_buffer(self) -> None:
        """gloo collects a whole tensor in a buffer of its own, which its threads hold for some milliseconds after the wait."""
        self._count(self._buffer, 0)

    def _see(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._storages:
            made_in = "activations" if self._moment == "forward" else "temporary"
            known = self._storages[storage] = _Storage(kind or made_in, self._inside[-1] if self._inside else "")
            weakref.finalize(storage, self._count, known, 0).atexit = False
            self._count(known, storage.nbytes())

    def _count(self, known: _Storage, size: int) -> None:
        """Record a storage's new number of bytes; 0 if it is gone."""
        now = -(-size // self._rounding) * self._rounding
        if now != known.size and not self._is_over:
            module, steps = self._inside[-1] if self._inside else "", len(self._counts.steps)
            self._changes.append((known, now - known.size, self._moment, module, steps))
            known.size = now

    def _resizing(self, real: Any) -> Any:
        @functools.wraps(real)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            answer = real(storage, size)
            if (known := self._storages.get(storage)) is not None:
                known.kind = "gathered"
                self._count(known, size)
            return answer

        return resize_

    # --- the result

    def result(self) -> Traced:
        """The trace of the latest update, with the peak over all updates, since the first may hold more than others."""
        held, peak, at = 0, 0, 0
        for number, (known, more, _, _, _) in enumerate(self._changes):
            held += more if known.kind != _HOST else 0
            if held > peak:
                peak, at = held, number
        by_kind: Counter[str] = Counter()
        by_module: Counter[str] = Counter()
        for known, more, _, _, _ in self._changes[: at + 1]:
            by_kind[known.kind] += more
            if known.kind == "activations":
                by_module[known.module] += more
        made = self._counts
        made.peak, made.resident, made.reserved = peak, held, self._reserved()
        made.by_kind = {kind: by_kind[kind] for kind in KINDS if by_kind[kind]}
        made.by_module = {name: size for name, size in by_module.most_common() if size > 0}
        if self._changes:
            _, _, made.moment, made.module, _ = self._changes[at]
        made.curve = self._curve(len(made.steps))
        return made

    def _reserved(self) -> int:
        """Bytes that the simulated allocator reserves for all storages."""
        allocator, sizes, blocks = Allocator(expands()), Counter[_Storage](), dict[_Storage, Block]()
        for known, more, _, _, _ in self._changes:
            sizes[known] += more
            if known.kind == _HOST:
                continue
            if known in blocks:
                allocator.give(blocks.pop(known))
            if sizes[known]:
                blocks[known] = allocator.take(sizes[known], known.stream)
        return allocator.reserved

    def _curve(self, steps: int) -> list[list[int]]:
        held: Counter[str] = Counter()
        for known, more, _, _, _ in self._changes[: self._begins]:
            held[known.kind] += more
        fullest = [held[kind] for kind in KINDS]
        made, now = list[list[int]](), 0
        for known, more, _, _, at in self._changes[self._begins :]:
            part = min(BINS - 1, at * BINS // max(1, steps))
            while now < part:
                made.append(fullest)
                now, fullest = now + 1, [held[kind] for kind in KINDS]
            held[known.kind] += more
            if sum(held[kind] for kind in KINDS) > sum(fullest):
                fullest = [held[kind] for kind in KINDS]
        return [*made, fullest] + [[held[kind] for kind in KINDS]] * (BINS - 1 - now)
