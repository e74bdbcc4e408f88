"""What a training step does, read from torch's dispatcher: bytes over the network, casts, copies between devices, waits, memory.

`fake_world(64)` makes this process rank 0 of 64 that do not exist: collectives return at once, and every other rank is taken to
have said what this one says. So bytes and memory of a step on 64 ranks are counted in one process, without a GPU.
Values are those of no run: only what is moved and kept counts here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# torch 2.13 has no public way to make a world of ranks that do not exist, nor to see each operator.
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose answer the host waits for.
WAITS = ("_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero", "_assert_async", "masked_select", "unique")


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """This process as rank 0 of `size`; agreements among ranks give what this one says."""

    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        for part in parts:
            part.copy_(mine)
        return _Done() if async_op else None

    def all_reduce(value: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        (group or dist.group.WORLD).allreduce([value])  # for a Trace to see; it changes nothing
        if op == dist.ReduceOp.SUM:
            value.mul_(dist.get_world_size(group))
        return _Done() if async_op else None

    environment = {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(size)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with (
            mock.patch.dict("os.environ", environment),
            mock.patch("torch.distributed.all_gather", all_gather),
            mock.patch("torch.distributed.all_reduce", all_reduce),
            mock.patch("echelon.world.agree.control_group", lambda: dist.group.WORLD),
            mock.patch("echelon.world.agree.channel", lambda group: (group, torch.device("cpu"))),
        ):
            yield
    finally:
        dist.destroy_process_group()


class _Done:
    def wait(self) -> bool:
        return True


class Trace(TorchDispatchMode):
    """Counts what the operators within its context do.

    Attributes:
        gathered, reduced, all_reduced: bytes by dtype: of whole tensors after an all-gather; of those that went into a
            reduce-scatter; of those that an all-reduce adds up.
        sent: bytes that one rank gave all others, by dtype.
        cast: bytes that changes of dtype made, by the new dtype.
        copied: bytes copied between devices, by (from, to, whether the host's memory was pinned).
        waits: operators whose result the host waits for, with their number.
        peak, live: bytes of tensors that were made within the context and live: at the most, and now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gathered: Counter[torch.dtype] = Counter()
        self.reduced: Counter[torch.dtype] = Counter()
        self.all_reduced: Counter[torch.dtype] = Counter()
        self.sent: Counter[torch.dtype] = Counter()
        self.cast: Counter[torch.dtype] = Counter()
        self.copied: Counter[tuple[str, str, bool]] = Counter()
        self.waits: Counter[str] = Counter()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def live(self) -> int:
        return sum(s.nbytes() for ref in list(self._storages.values()) if (s := ref()) is not None)

    def keeps(self, *tensors: torch.Tensor) -> None:
        """Count tensors that were made before the context, too."""
        for tensor in tensors:
            self._see(tensor)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        namespace, _, name = op._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            self._communicates(name, args)
        elif name in WAITS:
            self.waits[name] += 1
        elif name in ("_to_copy", "copy_"):
            self._copies(name, args, made)
        grew = [self._see(tensor) for tensor in _tensors(made)]
        if any(grew) or namespace != "aten":  # `fully_shard` gives freed memory back to storages without an operator
            self.peak = max(self.peak, self.live)
        return made

    def _communicates(self, name: str, args: Any) -> None:
        name, first = name.replace("all_reduce", "allreduce").replace("all_gather", "allgather"), next(_tensors(args), None)
        if first is None:
            return
        if "allgather" in name:
            self.gathered[first.dtype] += first.nbytes
        elif "reduce_scatter" in name:
            self.reduced[first.dtype] += list(_tensors(args))[1].nbytes
        elif "allreduce" in name:
            self.all_reduced[first.dtype] += first.nbytes
        elif "broadcast" in name:
            self.sent[first.dtype] += first.nbytes

    def _copies(self, name: str, args: Any, made: torch.Tensor) -> None:
        source = args[1] if name == "copy_" else args[0]
        if not isinstance(source, torch.Tensor):
            return
        if source.dtype != made.dtype:
            self.cast[made.dtype] += made.nbytes
        if source.device.type != made.device.type:
            host = source if source.device.type == "cpu" else made
            self.copied[source.device.type, made.device.type, host.device.type == "cpu" and host.is_pinned()] += made.nbytes

    def _see(self, tensor: torch.Tensor) -> bool:
        """True if its memory is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages and self._storages[key]() is not None:
            return False
        self._storages[key] = weakref.ref(storage, lambda _, key=key: self._storages.pop(key, None))
        return True


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            yield value.to_local() if isinstance(value, DTensor) else value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
