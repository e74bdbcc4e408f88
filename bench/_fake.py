"""Fake ranks: this process acts as one rank of thousands, and traces what a step would send, hold and compute there.

torch's "fake" process group answers every collective at once, and FakeTensorMode gives tensors a shape and no memory. So a step
of the library itself is traced, with a model of any size. Values are meaningless; only sizes count.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# This module brings the meta kernels of collectives, which fake tensors need. torch 2.13 has no public names for any of these.
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor, debug
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.planner.pretended import Chunks
from echelon.planner.steps import flops_of

__all__ = ["Step", "Traced", "even_loads", "fake_tensors", "fake_world"]


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0, per_node: int = 8) -> Iterator[None]:
    """This process acts as `rank` of `size`; every other rank is assumed to send the same as this one."""
    environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % per_node)}
    environment |= {"LOCAL_WORLD_SIZE": str(min(size, per_node)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with (
            mock.patch.dict("os.environ", environment),
            mock.patch("echelon.world.agree.control_group", lambda: dist.group.WORLD),
            mock.patch("echelon.world.agree.channel", lambda group: (group, torch.device("cpu"))),
            # Fake tensors have no values to compare, so buffers are assumed not to change.
            mock.patch("echelon.parallel.fsdp.move_and_sync._checksums", lambda module: {}),
            mock.patch("torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty", Chunks),
        ):
            yield
    finally:
        dist.destroy_process_group()
        # The cache has meshes of this world, which look like those of the next. Older versions of torch cannot clear it.
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


@contextlib.contextmanager
def even_loads(rows: int) -> Iterator[None]:
    """Every expert gets equally many of this rank's `rows`. The library reads these counts, and fake tensors have no values."""
    known = FakeTensor.tolist

    def tolist(counts: FakeTensor) -> Any:
        return [[rows // counts.shape[1]] * counts.shape[1]] * 2 if counts.dim() == 2 else known(counts)

    def bincount(chosen: torch.Tensor, weights: None = None, minlength: int = 0) -> torch.Tensor:
        return chosen.new_full((minlength,), chosen.numel() // minlength)

    with mock.patch.object(FakeTensor, "tolist", tolist), mock.patch("torch.bincount", bincount):
        yield


@contextlib.contextmanager
def fake_tensors(mode: FakeTensorMode | None = None) -> Iterator[FakeTensorMode]:
    """Context for building a model and for its steps, with one mode for both. Make the model parallel outside: it reads meshes.

    Inside, ranks agree on nothing, since fake values cannot be compared.
    """
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    with mock.patch("echelon.world.agree.is_joined", lambda: False), mode:
        yield mode


@dataclass
class Traced:
    """What happened on this rank.

    Attributes:
        calls: collectives, by (kind, ranks that take part).
        message: their bytes, by the same keys. For all-gathers, reduce-scatters and all-reduces, those of the whole tensor; for
            all-to-all and messages to a neighbour, those that a rank sends.
        flops: of matrix products and attention, including recomputation.
        held_before: bytes of tensors that existed before the step: parameters, optimizer state.
        held: bytes of tensors that exist at the end.
        peak: the largest sum of bytes of tensors that existed at one time, including those made before the step.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    message: Counter[tuple[str, str]] = field(default_factory=Counter)
    sizes: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    held_before: int = 0
    held: int = 0
    peak: int = 0

    def sent(self, kind: str, axis: str) -> float:
        """Bytes that this rank sends if each collective sends as little as possible: in a ring, or to each rank only its part."""
        n = self.sizes[axis]
        factor = {
            "all-gather": (n - 1) / n,
            "reduce-scatter": (n - 1) / n,
            "all-reduce": 2 * (n - 1) / n,
            "all-to-all": (n - 1) / n,
        }
        return self.message[kind, axis] * factor.get(kind, 1.0)


_KINDS = {
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
}


class Step(TorchDispatchMode):
    """Context that traces operators and collectives.

    Args:
        axes: the mesh axis of each group of ranks, by torch's name of the group.
    """

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.traced, self._axes = Traced(), axes
        self._bytes: dict[int, int] = {}
        self._is_over = False
        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))

    def keep(self, *tensors: Iterable[torch.Tensor]) -> None:
        """Register tensors that exist already: parameters, optimizer state. Call before entering the context."""
        for each in tensors:
            for tensor in each:
                self._see(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        self.traced.held_before = self.traced.held

    def __enter__(self) -> Step:
        self._patch.start()  # `fully_shard` frees and allocates memory by it, without an operator
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()
        self._is_over = True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's operators on its local tensors come here, too
        made = op(*args, **(kwargs or {}))
        if op in collective_ops:
            if op not in sync_ops:
                self._communicates(op, made, args, kwargs)
        else:
            self.traced.flops += flops_of(op, made, args, kwargs or {}) or 0
        for tensor in _tensors(made):
            self._see(tensor)
        return made

    def _communicates(self, op: Any, made: Any, args: Any, kwargs: Any) -> None:
        kind = next(kind for word, kind in _KINDS.items() if word in op._schema.name)
        group = CollectiveOp.get_process_group(op, args)
        axis = self._axes.get(group.group_name, f"{group.size()} ranks")
        whole = CollectiveOp.get_comm_tensor_size(op, made, args, kwargs)
        if "gather_into_tensor" in op._schema.name and "out" not in op._schema.name:
            whole = sum(t.nbytes for t in _tensors(made))
        elif kind == "reduce-scatter" and "c10d_functional" in op._schema.name:
            whole = sum(t.nbytes for t in _tensors(args))
        elif kind in ("all-reduce", "all-to-all", "send", "receive"):
            whole = sum(t.nbytes for t in _tensors(args[1] if "alltoall_base" in op._schema.name else args[0]))
        self.traced.calls[kind, axis] += 1
        self.traced.message[kind, axis] += whole
        self.traced.sizes[axis] = group.size()

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._bytes:
            self._bytes[key] = 0
            weakref.finalize(storage, self._count, key, None).atexit = False
            self._count(key, storage.nbytes())

    def _count(self, key: int, size: int | None) -> None:
        """Record a storage's new number of bytes; None if it is gone."""
        if self._is_over:
            return
        before = self._bytes.pop(key, 0)
        if size is not None:
            self._bytes[key] = size
        self.traced.held += (size or 0) - before
        self.traced.peak = max(self.traced.peak, self.traced.held)

    def _resizing(self, real: Any) -> Any:
        @functools.wraps(real)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            answer = real(storage, size)
            if id(storage) in self._bytes:
                self._count(id(storage), size)
            return answer

        return resize_


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, DTensor):
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
