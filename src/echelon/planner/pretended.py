"""A pretended world: this process acts as one rank among ranks that do not exist, with tensors that have a shape and no memory.

torch's "fake" process group answers every collective at once, and FakeTensorMode runs operators on shapes alone. So the training
code can run as a rank of any world, with a model of any size. torch 2.13 has no public names for either, nor for what
`fully_shard` and DistributedDataParallel do with memory; this file has all private names that are needed. Tested with torch 2.13;
tests/planner/test_values.py fails if another version differs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# This module brings the meta kernels of collectives, which fake tensors need.
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from echelon.common.errors import PlanError
from echelon.parallel.shards import local
from echelon.planner.values import SHAPED_BY_WHOLE, Values
from echelon.world import agree

__all__ = [
    "Chunks",
    "CollectiveOp",
    "FakeTensor",
    "NoMemory",
    "TorchDispatchMode",
    "buckets_of",
    "collective_ops",
    "is_backward",
    "is_plain",
    "pretended_world",
    "ranks_of",
    "recurrent_functions",
    "sync_ops",
    "without_overrides",
    "without_values",
]

aten = torch.ops.aten
recurrent_functions = torch._VF  # whose functions recurrent layers call
without_overrides = torch._C.DisableTorchFunction  # a context without TorchFunctionModes
_ECHELON, _TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)

_HERE, _OPTIMIZERS = str(Path(__file__).parent), str(Path(_TORCH, "optim"))

_NOTHING = "_echelon_is_nothing"  # an attribute of tensors whose value is 0


@contextlib.contextmanager
def pretended_world(size: int, rank: int = 0, shapes: Mapping[str, int] | None = None) -> Iterator[NoMemory]:
    """This process acts as `rank` of `size`; every other rank is assumed to send the same values. Yields the tensors' mode."""
    mode, threads = NoMemory(shapes), torch.get_num_threads()
    # Only small values are computed: beside other tracing processes, threads would wait for each other longer than they compute.
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with (
            agree.alone(),
            mock.patch.object(dist, "Reducer", lambda *args: _Reducer(mode, *args)),
            mock.patch.object(dist, "Logger", mock.MagicMock()),
            mock.patch.object(dist, "_broadcast_coalesced", functools.partial(_broadcast, mode)),
            mock.patch.object(nn.Module, "_apply", _apply),
            mock.patch.object(FakeTensor, "numpy", lambda tensor, **_: mode.ones_of(tensor)),
            mock.patch.object(FakeTensor, "__format__", _formatted),
            mock.patch.object(FakeTensor, "data", property(torch.Tensor.detach, _set_data), create=True),
            mock.patch.object(recurrent_functions, "_pad_packed_sequence", _padded),
            mock.patch("torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty", Chunks),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", _propagated),
        ):
            yield mode
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()


_real_broadcast = dist._broadcast_coalesced


def _broadcast(mode: NoMemory, group: Any, tensors: Sequence[torch.Tensor], *args: Any) -> None:
    """Other ranks have the same values, but torch flattens tensors with known and unknown ones together."""
    with mode.values.unchanged(tensors):
        _real_broadcast(group, list(tensors), *args)


def without_values(module: nn.Module, mode: NoMemory) -> None:
    """Replace the module's parameters and buffers, also those on the meta device, by tensors without memory. In place. Integer
    tensors and small buffers that have values keep them.
    """
    made: dict[int, torch.Tensor] = {}

    def of(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                vars(empty).update(vars(tensor))
            mode.values.take(empty, tensor if tensor.device.type != "meta" else None)
            made[id(tensor)] = empty
        return made[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(local(tensor), FakeTensor):
                    tensors[name] = of(tensor)


_real_apply: Any = nn.Module._apply


def _apply(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Replaces `nn.Module._apply` for `to`, `half` and `cuda`: tensors without memory change only their dtype. torch's own would
    swap each tensor's data, which fails for them.
    """
    parts = list(module.modules()) if recurse else [module]
    held: list[dict[str, Any]] = [tensors for part in parts for tensors in (part._parameters, part._buffers)]
    if not any(isinstance(tensor, FakeTensor) for tensors in held for tensor in tensors.values()):
        real: nn.Module = _real_apply(module, change, recurse)
        return real
    changed: dict[int, torch.Tensor] = {}  # a tied parameter is changed once
    for tensors in held:
        for name, tensor in tensors.items():
            if tensor is None or not is_plain(type(tensor)):
                continue
            if id(tensor) not in changed:
                with torch.no_grad():
                    made = change(tensor)
                if made.dtype == tensor.dtype:
                    made = tensor
                elif isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                    vars(made).update(vars(tensor))
                changed[id(tensor)] = made
            tensors[name] = changed[id(tensor)]
    return module


_real_propagation = ShardingPropagator._propagate_tensor_meta_non_cached


def _propagated(propagator: ShardingPropagator, op_schema: Any) -> Any:
    """The output shape of an operator on DTensors. torch runs it on fake tensors of the whole shape, which must not be traced."""
    with _disable_current_modes():
        return _real_propagation(propagator, op_schema)


def _formatted(tensor: torch.Tensor, how: str) -> str:
    """`f"{loss:.3f}"`, which torch supports only for its own tensor class."""
    return format(tensor.item(), how) if tensor.dim() == 0 else object.__format__(tensor, how)


def _set_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """`tensor.data = other`; torch's own setter would turn the fake tensor into a plain meta tensor."""
    if not isinstance(other, FakeTensor):
        with tensor.fake_mode:  # type: ignore[attr-defined]
            other = torch.empty_strided(other.shape, other.stride(), dtype=other.dtype)
    with torch.no_grad():
        tensor.set_(other.detach())  # type: ignore[call-overload]


def _padded(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces `pad_packed_sequence`, which writes lengths in C++, without an operator."""
    sizes = batch_sizes.tolist()
    steps, places = torch.arange(len(sizes)).repeat_interleave(batch_sizes), torch.cat([torch.arange(size) for size in sizes])
    padded = data.new_full((max(len(sizes), total_length), sizes[0], *data.shape[1:]), value)
    padded = padded.index_put((steps, places), data)
    lengths = (batch_sizes > torch.arange(sizes[0]).unsqueeze(1)).sum(1)
    return padded.transpose(0, 1) if batch_first else padded, lengths


def is_plain(kind: type) -> bool:
    """Whether tensors of the class have their own storage and no inner tensors."""
    return kind in (torch.Tensor, nn.Parameter) or issubclass(kind, FakeTensor)


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The world's ranks of a group."""
    return tuple(dist.get_process_group_ranks(group))


def is_backward() -> bool:
    """Whether a backward pass runs in this thread."""
    return torch._C._current_graph_task_id() != -1


_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index, aten._unsafe_index_put}
# Operators whose output shape depends on values -> the output for a number of elements.
_BY_COUNT: dict[Any, Callable[[torch.Tensor, int], Any]] = {
    aten.nonzero.default: lambda tensor, count: tensor.new_empty((count, tensor.dim()), dtype=torch.int64),
    aten.masked_select.default: lambda tensor, count: tensor.new_empty(count),
    aten.repeat_interleave.Tensor: lambda repeats, count: repeats.new_empty(count),
    aten._unique2.default: lambda tensor, count: (
        tensor.new_empty(count),
        tensor.new_empty(tensor.shape, dtype=torch.int64),
        tensor.new_empty(count, dtype=torch.int64),
    ),
}
# The most values that a line may read in two updates: on a device, reading so many one by one would take longer than training.
_MOST_READ = 20_000
_CHOSEN = "_echelon_chosen"  # an attribute: the number of elements chosen from a tensor


@functools.cache
def _depends_on_values(op: Any) -> bool:
    """Whether the operator's output or its shape depends on values. Indexing is handled apart: see `_without_mask`."""
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return (bool(tags & set(op.tags)) or op in SHAPED_BY_WHOLE) and op.overloadpacket not in _INDEX


def _place_in_group(op: Any, args: Any) -> tuple[int, int]:
    group = CollectiveOp.get_process_group(op, args)
    return group.rank(), group.size()


def _line() -> str:
    """The innermost line outside of torch and echelon that called the current operator."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_ECHELON, _TORCH, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "the script"


def _is_asked_by_optimizer() -> bool:
    """Whether an optimizer reads the value: it counts its steps in a tensor, and computes the same whatever the count is."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_OPTIMIZERS):
        if not frame.f_code.co_filename.startswith((_TORCH, _HERE)):
            return False
        frame = frame.f_back
    return frame is not None


class NoMemory(FakeTensorMode):
    """The mode of tensors with a shape and no memory. Reading an unknown value (see `Values`) gives 1, as for a loss or `all()`;
    for `any()` and a count of infs it gives 0.

    Args:
        shapes: by line, such as "train.py:8": the number of elements that it selects, where that depends on values.
    Attributes:
        read: number of unknown values that were read.
        values: the known values.
        on_host: called with each tensor that was made in the host's memory.
    """

    def __init__(self, shapes: Mapping[str, int] | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.shapes, self.read = shapes or {}, 0
        self.values = Values(lambda tensor: isinstance(tensor, FakeTensor), _place_in_group, _disable_current_modes)
        self.on_host: Callable[[torch.Tensor], None] = lambda tensor: None
        self._read_at: Counter[str] = Counter()

    def __deepcopy__(self, memo: Any) -> NoMemory:
        """The mode itself, so that the tensors of a copied module stay in it: a mode does not accept another mode's tensors."""
        return self

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _depends_on_values(op):
            known, made = self._known(op, args, kwargs)
            if known:
                return made
        made = self._without_memory(op, types, args, kwargs)
        self.values.follow(op, made, args, kwargs)
        return made

    def _known(self, op: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Whether known values determine the operator's output, and the output."""
        if _line() in self.shapes:
            return False, None
        values = self.values.given_by(op, args, kwargs)
        if values is None:
            return False, None
        with _disable_current_modes():
            made = tree_map_only(torch.Tensor, self.from_tensor, values)
        if op is aten._pack_padded_sequence.default:
            made = made[0], values[1]  # recurrent layers read the sizes in C++, without an operator
        if op not in SHAPED_BY_WHOLE or not tree_leaves(values)[0].is_floating_point():  # otherwise these floats were not real
            self.values.keep(made, values)
        return True, made

    def _without_memory(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if (of_count := _BY_COUNT.get(op)) is not None:
            mask = args[1].expand(args[0].shape) if op is aten.masked_select.default else None
            return of_count(args[0], self._chosen(op, args[0], mask))
        if op.overloadpacket in _INDEX:
            fills = len(args) > 2 and args[2].numel() == 1  # a single value is written to all selected elements
            args = (args[0], [each for index in args[1] for each in self._without_mask(op, index, fills)], *args[2:])
        if op is aten._local_scalar_dense.default and not isinstance(args[0], FakeTensor):
            with _disable_current_modes():  # made before training, such as Adagrad's count of steps
                return op(*args, **kwargs)
        if op is aten._local_scalar_dense.default:
            self._reads()
            kind = args[0].dtype
            value = 0 if hasattr(args[0], _NOTHING) else 1
            return bool(value) if kind is torch.bool else float(value) if kind.is_floating_point else value
        if op in (aten.allclose.default, aten.equal.default):
            self._reads()
            return True
        if op is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:  # torch has a shape only for bfloat16
            with self:
                halves = [each.to(torch.bfloat16) for each in args[:2]]
                return op(*halves, *args[2:], **kwargs).to(args[0].dtype)
        if op is aten.bincount.default and len(args) > 2 and args[2] > 0:  # minlength: the number of experts
            return args[0].new_empty(args[2], dtype=torch.int64 if args[1] is None else args[1].dtype)
        try:
            made = super().__torch_dispatch__(op, types, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise PlanError(
                f"{_line()} must give what follows from shapes, or from whole numbers and masks of the data, to be planned, got "
                f"{op}, which reads values that a plan does not have. Leave it out of the script that is planned."
            ) from None
        if op.overloadpacket is aten.any:
            setattr(made, _NOTHING, True)
        elif op is aten._amp_foreach_non_finite_check_and_unscale_.default:
            setattr(args[1], _NOTHING, True)
        return made

    def _reads(self) -> None:
        """Count a value that was read.

        Raises:
            PlanError: a line reads values without end.
        """
        if _is_asked_by_optimizer():
            return
        self.read += 1
        self._read_at[line := _line()] += 1
        if self._read_at[line] > _MOST_READ:
            raise PlanError(
                f"{line} must read fewer than {_MOST_READ} values of tensors to be planned, got more: a loop that ends when a "
                "value changes does not end in a plan, where each value is 1. Give it a largest number of rounds."
            )

    def _without_mask(self, op: Any, index: torch.Tensor | None, fills: bool) -> list[torch.Tensor | None]:
        """The index tensors that an index stands for: a mask becomes one integer index for each of its dims."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        count = 1 if fills else self._chosen(op, index)
        return [index.new_empty(count, dtype=torch.int64) for _ in range(index.dim())]

    def _chosen(self, op: Any, tensor: torch.Tensor, mask: torch.Tensor | None = None) -> int:
        """The number of elements that are selected from the tensor, or of its distinct ones. The same in the backward pass.

        Args:
            mask: the mask that selects, if it is not the tensor itself.

        Raises:
            PlanError: the number is unknown.
        """
        if (count := getattr(tensor, _CHOSEN, None)) is None:
            line = _line()
            count = self.shapes.get(line)
            if count is None and (value := self.values.of(tensor if mask is None else mask)) is not None:
                with _disable_current_modes():
                    count = int(value.count_nonzero())
            if count is None:
                raise PlanError(
                    f"{line} must choose a known number of elements to be planned, got {op.overloadpacket.__name__} of a tensor "
                    f"of shape {tuple(tensor.shape)}, whose values a plan does not have. Say how many it mostly is: "
                    f"--shape {line}=N."
                )
            setattr(tensor, _CHOSEN, count)
        return int(count)

    def ones_of(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """The known values of a tensor that is read as a whole, or ones."""
        if (value := self.values.of(tensor)) is not None:
            with _disable_current_modes():
                known: npt.NDArray[Any] = value.numpy()
                return known
        self.read += tensor.numel()
        return np.ones(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class Chunks:
    """Replaces torch's `_chunk_with_empty`, and makes each chunk on access: `fully_shard` uses only one, and making the chunks of
    all ranks as fake tensors would take nearly all of the time.
    """

    def __init__(self, tensor: torch.Tensor, number: int, dim: int) -> None:
        self._tensor, self._dim, self._each = tensor, dim, math.ceil(tensor.shape[dim] / number)

    def __getitem__(self, at: int) -> torch.Tensor:
        begin = at * self._each
        if begin >= self._tensor.shape[self._dim]:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._each, self._tensor.shape[self._dim] - begin))


def buckets_of(module: nn.Module) -> Sequence[torch.Tensor]:
    """The buckets in which a DistributedDataParallel sends gradients."""
    reducer = getattr(module, "reducer", None)
    return reducer.buckets if isinstance(reducer, _Reducer) else ()


class _Reducer:
    """Holds and sends the same as DistributedDataParallel's reducer, which is C++ and needs memory: gradients become views of
    buckets, or are copied into them, and a full bucket is all-reduced. In a pass without reduction, gradients stay outside of the
    buckets.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Sequence[int]],
        limits: Any,
        group: dist.ProcessGroup,
        sparse: Any,
        cap: Any,
        find_unused: Any,
        as_view: bool,
        *_: Any,
    ) -> None:
        self._group, self._as_view, self._reduces = group, as_view, False
        self._places: dict[nn.Parameter, tuple[int, int]] = {}
        self.buckets, self._sizes, self._waits = [], [len(bucket) for bucket in buckets], [0] * len(buckets)
        for number, bucket in enumerate(buckets):
            at = 0
            for parameter in (parameters[index] for index in bucket):
                self._places[parameter] = number, at
                at += parameter.numel()
                parameter.register_post_accumulate_grad_hook(self._is_ready)
            with mode:
                self.buckets.append(torch.zeros(at, dtype=parameters[bucket[0]].dtype))

    def prepare_for_backward(self, outputs: Any) -> None:
        self._reduces, self._waits = True, list(self._sizes)

    def _is_ready(self, parameter: torch.Tensor) -> None:
        if not self._reduces or parameter.grad is None:
            return
        number, at = self._places[parameter]  # type: ignore[index]
        bucket = self.buckets[number]
        view = bucket[at : at + parameter.numel()].view_as(parameter)
        if parameter.grad.untyped_storage() is not bucket.untyped_storage():
            view.copy_(parameter.grad)
            if self._as_view:
                parameter.grad = view
        self._waits[number] -= 1
        if self._waits[number] == 0:
            dist.all_reduce(bucket, group=self._group)
        if not any(self._waits):
            self._reduces = False

    def __getattr__(self, name: str) -> Any:  # the wrapper's other calls of its reducer
        return lambda *args, **options: False
