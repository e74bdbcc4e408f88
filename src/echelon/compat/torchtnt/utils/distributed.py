"""torchtnt.utils.distributed: ranks, and what they tell each other."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import quote

import torch
import torch.distributed as dist

from echelon.common.errors import LauncherEnvironmentError, UsageError
from echelon.compat.collect import gather_tensors
from echelon.contracts.rank import RankInfo
from echelon.launcher.functions.launch import launch
from echelon.world.init import init_from_env

__all__ = [
    "all_gather_tensors",
    "barrier",
    "get_file_init_method",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_process_group_backend_from_device",
    "get_tcp_init_method",
    "get_world_size",
    "spawn_multi_process",
]

T = TypeVar("T")

Group = dist.ProcessGroup | None


# --- who this rank is


def _number(variable: str, field: str) -> int:
    """A number from torchrun's variable, which may be set alone; else from another launcher; else that of a single process."""
    text = os.environ.get(variable)
    if not text:
        try:
            return int(getattr(RankInfo.from_env(), field))
        except LauncherEnvironmentError:  # joining the ranks reports what is missing; here this is enough
            return int(getattr(RankInfo(rank=0, world_size=1), field))
    if not text.isdecimal():
        raise UsageError(f"{variable}={text!r} is no number.")
    return int(text)


def get_global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else _number("RANK", "rank")


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else _number("WORLD_SIZE", "world_size")


def get_local_rank() -> int:
    return _number("LOCAL_RANK", "local_rank")


def get_local_world_size() -> int:
    return _number("LOCAL_WORLD_SIZE", "local_world_size")


# --- groups


def get_process_group_backend_from_device(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def barrier() -> None:
    """Wait for all ranks of the default group, if there is one."""
    if dist.is_initialized():
        nccl = "nccl" in str(dist.get_backend_config())
        dist.barrier(device_ids=[torch.cuda.current_device()] if nccl else None)


def get_file_init_method(*, world_size: int | None = None, rank: int | None = None, filename: str | None = None) -> str:
    """An `init_method` for `torch.distributed.init_process_group` by which ranks meet through a file.

    Args:
        filename: a file that all ranks see and that does not exist yet; a single rank makes its own.
    Raises:
        UsageError: several ranks and no file: each would choose another one, and wait there for ever.
    """
    rank, size = _place(rank, world_size)
    if filename is None:
        if size > 1:
            raise UsageError(
                f"get_file_init_method: {size} ranks need one filename that all of them know, on a disk that they share. Give "
                "filename=..., or use init_from_env(), by which ranks meet at the launcher's address."
            )
        filename = os.path.join(tempfile.mkdtemp(prefix="echelon-"), "store")
    return f"file://{quote(os.path.abspath(filename))}?world_size={size}&rank={rank}"


def get_tcp_init_method(
    *, world_size: int | None = None, rank: int | None = None, hostname: str | None = None, port: int | None = None
) -> str:
    """An `init_method` by which ranks meet at an address of rank 0; by default MASTER_ADDR and MASTER_PORT.

    Raises:
        UsageError: several ranks, and neither a port nor MASTER_PORT: each would choose another.
    """
    rank, size = _place(rank, world_size)
    if port is None:
        if "MASTER_PORT" in os.environ:
            port = _number("MASTER_PORT", "master_port")
        elif size > 1:
            raise UsageError(
                f"get_tcp_init_method: {size} ranks need one port that all of them know. Give port=..., set MASTER_PORT, or use "
                "init_from_env()."
            )
        else:
            port = 0  # the store takes a free one, and nobody else needs to know it
    host = hostname or os.environ.get("MASTER_ADDR", "localhost")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}?world_size={size}&rank={rank}"


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    return (get_global_rank() if rank is None else rank), (get_world_size() if world_size is None else world_size)


# --- what ranks tell each other


def all_gather_tensors(result: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """As `compat.collect.gather_tensors`: every rank's tensor, by rank, whatever its shape. Gradients do not flow back."""
    return gather_tensors(result, group)


# --- processes


class _InGroup:
    """Calls the function within a process group over the ranks that `launch` has started."""

    def __init__(self, backend: str, timeout: timedelta, fn: Callable[..., Any]) -> None:
        self._backend, self._timeout, self._fn = backend, timeout, fn
        self.__name__ = getattr(fn, "__name__", "spawn_multi_process")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        init_from_env("cuda" if "nccl" in self._backend else "cpu", self._backend, self._timeout)
        try:
            return self._fn(*args, **kwargs)
        finally:
            gc.collect()  # objects that hold the group must end before it
            dist.destroy_process_group()


def spawn_multi_process(
    world_size: int, backend: str, method: Callable[..., T], *method_args: Any, timeout_s: float = 60.0, **method_kwargs: Any
) -> list[T]:
    """Call a function on ranks of this machine within a process group; each rank's value, by rank.

    `echelon.launch` with a group: the ranks find torchrun's variables, RANK included, in their environment.

    Args:
        timeout_s: time limit of the group's collectives.
    Raises:
        RankFailedError: with the first failing rank's traceback; the exception itself is its `__cause__`.
    """
    call = _InGroup(backend, timedelta(seconds=timeout_s), method)
    return launch(call, ranks=world_size, args=method_args, kwargs=method_kwargs)
