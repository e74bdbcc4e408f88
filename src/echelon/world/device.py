"""This rank's device, and moving data to it."""

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

# The variables that configure torch's allocator: since 2.9, and before. 2.11 to 2.13 read both.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def device_of(info: RankInfo, device_type: str | None = None, *, shared: bool = False) -> torch.device:
    """The device of a rank: cuda:LOCAL_RANK if there is CUDA, else the CPU. $ECHELON_DEVICE, set by `--device`, overrides both.

    Args:
        shared: several ranks may share a device, which gloo allows and NCCL does not.
    Raises:
        UsageError: the device type is unknown or absent, or this node has fewer devices than ranks.
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
    # If the launcher shows every rank only its own device (CUDA_VISIBLE_DEVICES per rank), that is index 0.
    index = 0 if count == 1 and info.local_world_size > 1 and "CUDA_VISIBLE_DEVICES" in os.environ else info.local_rank
    if index >= count and not shared:
        raise DeviceError(
            f"rank {info.rank} has local rank {info.local_rank}, but its node has {count} CUDA devices. "
            f"Start at most {count} ranks a node, compute on the CPU (`--device cpu`, or {DEVICE_VARIABLE}=cpu), or let ranks "
            "share a device by init_from_env(pg_backend='gloo')."
        )
    return torch.device("cuda", index % count)


def use(device: torch.device) -> None:
    """Make a GPU the current device of this process, before anything is allocated on it.

    Unless the user configures the allocator, it gets expandable segments: then varying sizes, or an evaluation between two steps,
    do not fragment the memory. torch reads either variable once, at the first allocation.
    """
    if device.type != "cuda":
        return
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    torch.cuda.set_device(device)


def in_thread(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap work that may use CUDA, to run in another thread with this rank's device.

    A new thread starts with device 0, whatever the process has chosen. Without this every rank of a node would open a context on
    device 0, of half a gigabyte, as soon as the thread waits for an event or allocates page-locked memory.
    """
    if not torch.cuda.is_initialized():
        return work
    device = torch.cuda.current_device()

    def with_device() -> None:
        torch.cuda.set_device(device)
        work()

    return with_device


def set_threads(info: RankInfo) -> None:
    """Divide the cores of this node between its ranks, unless OMP_NUM_THREADS is set.

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
    """Make results independent of whether this process computes all or one of `parts` parts.

    It selects deterministic kernels and the number of threads for one part, since this number decides the order of sums in a
    matrix product. An operation without a deterministic kernel raises.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with workspaces of fixed sizes
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it selects the kernel that was fastest in this run
    compile_alike()
    torch.set_num_threads(max(1, usable_cores() // parts))


def copy_data_to_device(data: T, device: torch.device, *args: Any, **options: Any) -> T:
    """The same structure with every tensor on `device`: dicts, lists, tuples, named tuples, dataclasses, anything with `.to`.

    Args:
        args, options: further arguments of `Tensor.to`, such as `non_blocking=True`.
    """
    return map_tensors(data, lambda t: t.to(device, *args, **options))  # type: ignore[no-any-return]


def record_stream(data: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that `stream` uses the tensors in a nested structure, so that their memory is not reused early.

    Calls `record_stream` also on other objects with the methods `to` and `record_stream`.
    """

    def record(value: Any) -> Any:
        if value.is_cuda if isinstance(value, torch.Tensor) else hasattr(value, "record_stream"):
            value.record_stream(stream)
        return value

    map_tensors(data, record)


def from_host(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """`like.new_tensor(values)`, without waiting for the device: copies from page-locked memory overlap with its kernels."""
    on_host = torch.tensor(values, dtype=like.dtype, pin_memory=like.is_cuda)
    return on_host.to(like.device, non_blocking=True)


def to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Start copying values to host memory. The event tells when they have arrived; it is None for values on the CPU."""
    if not values.is_cuda:
        return values, None
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record()
    return on_host, arrival


def map_tensors(data: Any, fn: Any) -> Any:
    """The same structure with `fn(value)` for each tensor and each other object with a method `to`."""
    return map_named(data, lambda _, value: fn(value))


def map_named(data: Any, fn: Any, name: str = "") -> Any:
    """`map_tensors` with `fn(name, value)`, where name is the path of keys, fields and indices, joined by dots."""
    below = f"{name}." if name else ""
    if isinstance(data, torch.Tensor):
        return fn(name, data)
    if isinstance(data, Mapping):
        return mapping_of(data, {k: map_named(v, fn, f"{below}{k}") for k, v in data.items()})
    if isinstance(data, PackedSequence):  # a tuple whose lengths must stay in host memory
        rest = (map_named(v, fn, name) for v in data[2:])
        return type(data)(fn(f"{below}data", data.data), data.batch_sizes, *rest)
    if isinstance(data, deque):
        return deque((map_named(v, fn, f"{below}{i}") for i, v in enumerate(data)), data.maxlen)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_named(v, fn, f"{below}{k}") for k, v in zip(data._fields, data, strict=True)))
    if isinstance(data, (list, tuple)):
        return type(data)(map_named(v, fn, f"{below}{i}") for i, v in enumerate(data))
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        # Fields are set on a copy: a constructor may do more than store its arguments.
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
    if dataclasses.is_dataclass(data):  # as the outputs of transformers, whose `update` raises
        made: Any = copy.copy(data)
        for key, value in items.items():
            made[key] = value
        return made
    copied: Any = getattr(data, "copy", dict)()  # keeps a defaultdict's factory, an OrderedDict's kind
    copied.update(items)
    return copied
