"""This rank's device, and data on its way there."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from echelon.common.errors import DeviceError, require
from echelon.common.machine import DEVICE_VARIABLE, usable_cores
from echelon.common.numbers import digits
from echelon.contracts.rank import RankInfo
from echelon.world.inductor import compile_alike

__all__ = [
    "copy_data_to_device",
    "device_of",
    "from_host",
    "in_thread",
    "map_named",
    "map_tensors",
    "mapping_of",
    "record_stream",
    "same_kernels",
    "set_threads",
    "to_host",
    "use",
]

T = TypeVar("T")

# By which torch's allocator is configured: since 2.9, and before. 2.11 to 2.13 read both.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def device_of(info: RankInfo, device_type: str | None = None, *, shared: bool = False) -> torch.device:
    """The device of a rank: cuda:LOCAL_RANK if there is CUDA, else the CPU. $ECHELON_DEVICE, set by `--device`, decides first.

    Args:
        shared: with more ranks than devices, ranks take turns, as gloo allows it and NCCL does not.
    Raises:
        UsageError: an unknown or absent device type, or fewer devices than ranks on this node.
    """
    source, chosen = ("device_type", device_type)
    if imposed := os.environ.get(DEVICE_VARIABLE):
        source, chosen = DEVICE_VARIABLE, imposed
    require(chosen in (None, "cpu", "cuda"), source, "'cpu' or 'cuda'", chosen, kind=DeviceError)
    if chosen == "cpu" or (chosen is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise DeviceError(f"{source} is 'cuda', but torch finds no CUDA device here. Use {source}='cpu'.")
    # A launcher that shows every rank one device only (CUDA_VISIBLE_DEVICES per rank) leaves index 0.
    index = 0 if count == 1 and info.local_world_size > 1 and "CUDA_VISIBLE_DEVICES" in os.environ else info.local_rank
    if index >= count and not shared:
        raise DeviceError(
            f"rank {info.rank} has local rank {info.local_rank}, but its node has {count} CUDA devices. "
            f"Start at most {count} ranks a node, compute on the CPU (`--device cpu`, or {DEVICE_VARIABLE}=cpu), or let ranks "
            "share a device by init_from_env(pg_backend='gloo')."
        )
    return torch.device("cuda", index % count)


def use(device: torch.device) -> None:
    """Make a GPU this process's current one, before anything is allocated there.

    Segments of its memory may grow, unless the user configures the allocator: a step whose sizes vary, or a whole evaluation
    between two steps, then leaves no holes that nothing fits into. torch reads either variable once, at the first allocation.
    """
    if device.type != "cuda":
        return
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    torch.cuda.set_device(device)


def in_thread(work: Callable[[], None]) -> Callable[[], None]:
    """The same work, for another thread of this rank that may touch CUDA.

    A thread begins with device 0 as its current one, whatever its process has chosen. Without this each rank of a node would
    open a context there, half a gigabyte each, by waiting for an event or asking for page-locked memory.
    """
    if not torch.cuda.is_initialized():
        return work
    device = torch.cuda.current_device()

    def with_device() -> None:
        torch.cuda.set_device(device)
        work()

    return with_device


def set_threads(info: RankInfo) -> None:
    """Share the cores of this node between its ranks, unless the user has said otherwise.

    Two ranks with two threads each on two cores are five times slower than with one: the threads wait for one another.
    """
    if "OMP_NUM_THREADS" not in os.environ and info.local_world_size > 1:
        own = digits(os.environ.get("SLURM_CPUS_PER_TASK", ""))
        task = (os.environ.get("SLURM_PROCID"), os.environ.get("SLURM_STEP_NUM_TASKS"))
        if own is not None and task == (str(info.rank), str(info.world_size)):  # srun gives each task cores of its own
            torch.set_num_threads(max(1, min(own, usable_cores())))
        else:
            torch.set_num_threads(max(1, usable_cores() // info.local_world_size))


def same_kernels(parts: int) -> None:
    """Compute alike whether this process does all or one of `parts` parts: deterministic kernels, threads for one part.

    The number of threads decides in which order a matrix product adds. An operation without a deterministic kernel raises.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with workspaces of fixed sizes
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it takes what was fastest this time
    compile_alike()
    torch.set_num_threads(max(1, usable_cores() // parts))


def copy_data_to_device(data: T, device: torch.device, *args: Any, **options: Any) -> T:
    """The same structure with every tensor on `device`: dicts, lists, tuples, named tuples, dataclasses, anything with `.to`.

    Args:
        args, options: more of what `Tensor.to` takes, such as `non_blocking=True`.
    """
    return map_tensors(data, lambda t: t.to(device, *args, **options))  # type: ignore[no-any-return]


def record_stream(data: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that `stream` uses these tensors, however deep they lie, so that their memory is not reused early.

    Other objects that have a method `record_stream` beside `to` are told as well.
    """

    def record(value: Any) -> Any:
        if value.is_cuda if isinstance(value, torch.Tensor) else hasattr(value, "record_stream"):
            value.record_stream(stream)
        return value

    map_tensors(data, record)


def from_host(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """`like.new_tensor(values)`, without waiting for the device: only page-locked memory is copied beside its kernels."""
    on_host = torch.tensor(values, dtype=like.dtype, pin_memory=like.is_cuda)
    return on_host.to(like.device, non_blocking=True)


def to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Start copying values to host memory; the event tells when they are there. None if they are there already."""
    if not values.is_cuda:
        return values, None
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record()
    return on_host, arrival


def map_tensors(data: Any, fn: Any) -> Any:
    """The same structure with `fn(value)` for each tensor, and for each other object that has a method `to`."""
    return map_named(data, lambda _, value: fn(value))


def map_named(data: Any, fn: Any, name: str = "") -> Any:
    """As `map_tensors`, with `fn(name, value)`: the keys, fields and numbers on the way there, with dots between them."""
    below = f"{name}." if name else ""
    if isinstance(data, torch.Tensor):
        return fn(name, data)
    if isinstance(data, Mapping):
        return mapping_of(data, {k: map_named(v, fn, f"{below}{k}") for k, v in data.items()})
    if isinstance(data, PackedSequence):  # a tuple, whose lengths torch wants in host memory
        rest = (map_named(v, fn, name) for v in data[2:])
        return type(data)(fn(f"{below}data", data.data), data.batch_sizes, *rest)
    if isinstance(data, deque):
        return deque((map_named(v, fn, f"{below}{i}") for i, v in enumerate(data)), data.maxlen)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_named(v, fn, f"{below}{k}") for k, v in zip(data._fields, data, strict=True)))
    if isinstance(data, (list, tuple)):
        return type(data)(map_named(v, fn, f"{below}{i}") for i, v in enumerate(data))
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        # Fields are set on a copy: a constructor may do more than store what it is given.
        twin: Any = copy.copy(data)
        for field in dataclasses.fields(data):
            object.__setattr__(twin, field.name, map_named(getattr(data, field.name), fn, f"{below}{field.name}"))
        return twin
    if hasattr(data, "to") and callable(data.to):
        return fn(name, data)
    return data


def mapping_of(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same kind as `data`, with these items in place of its own."""
    if type(data) is dict:
        return items
    if dataclasses.is_dataclass(data):  # as the outputs of transformers, which let nobody call their `update`
        made: Any = copy.copy(data)
        for key, value in items.items():
            made[key] = value
        return made
    copied: Any = getattr(data, "copy", dict)()  # keeps a defaultdict's factory, an OrderedDict's kind
    copied.update(items)
    return copied
