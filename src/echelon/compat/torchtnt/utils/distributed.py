"""torchtnt.utils.distributed: ranks, and what they tell each other."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LauncherEnvironmentError, UsageError
from echelon.compat.torchtnt.utils.exchange import (
    Group,
    PGWrapper,
    all_gather_str,
    all_gather_tensors,
    broadcast_str,
    rank_zero_read_and_broadcast,
    sync_bool,
)
from echelon.contracts.rank import RankInfo
from echelon.launcher.functions.run import launch
from echelon.parallel.ddp import sync_batchnorm
from echelon.world import agree
from echelon.world.init import init_from_env
from echelon.world.timeout import timeout_of_default_group

__all__ = [
    "PGWrapper",
    "ProcessGroupSetupParams",
    "all_gather_str",
    "all_gather_tensors",
    "barrier",
    "broadcast_str",
    "destroy_process_group",
    "get_file_init_method",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_or_create_gloo_pg",
    "get_process_group_backend_from_device",
    "get_tcp_init_method",
    "get_world_size",
    "local_rank_zero_fn",
    "rank_zero_fn",
    "rank_zero_read_and_broadcast",
    "revert_sync_batchnorm",
    "spawn_multi_process",
    "sync_bool",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


# --- who this rank is


def _number(variable: str, field: str) -> int:
    """A variable of torchrun's, which may be set alone; else what another launcher says; else one process alone."""
    text = os.environ.get(variable)
    if not text:
        try:
            return int(getattr(RankInfo.from_env(), field))
        except LauncherEnvironmentError:  # whoever joins ranks says what is missing; to ask for a number, this is enough
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


def rank_zero_fn(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: only global rank 0 calls the function, the others get None."""

    @wraps(fn)
    def on_rank0(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return fn(*args, **kwargs) if get_global_rank() == 0 else None

    return on_rank0


def local_rank_zero_fn(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: only local rank 0 of each node calls the function."""

    @wraps(fn)
    def on_local_rank0(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return fn(*args, **kwargs) if get_local_rank() == 0 else None

    return on_local_rank0


# --- groups


def get_process_group_backend_from_device(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def barrier() -> None:
    """Wait for all ranks of the default group, if there is one."""
    PGWrapper(None).barrier()


def destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def get_or_create_gloo_pg(candidate_pg: Group = None) -> Iterator[Group]:
    """A gloo group of the candidate's ranks: the candidate if it has gloo, else a new one, which ends with the context.

    Of the default group the new one stays, since `echelon` uses it too. None without a process group. Collective over the
    candidate's ranks.
    """
    if not dist.is_initialized() or candidate_pg is None or candidate_pg is dist.group.WORLD:
        yield agree.control_group()
        return
    if "gloo" in str(dist.get_backend_config(candidate_pg)):
        yield candidate_pg
        return
    members = dist.get_process_group_ranks(candidate_pg)
    made = dist.new_group(members, timeout_of_default_group(), backend="gloo", use_local_synchronization=True)
    try:
        yield made
    finally:
        dist.destroy_process_group(made)


def get_file_init_method(*, world_size: int | None = None, rank: int | None = None, filename: str | None = None) -> str:
    """An `init_method` for `torch.distributed.init_process_group` by which ranks meet through a file.

    Args:
        filename: one that all ranks see and that does not exist yet; a world of one makes its own.
    Raises:
        UsageError: several ranks and no file: each would make up another, and wait in it for ever.
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
    rank = get_global_rank() if rank is None else rank
    size = get_world_size() if world_size is None else world_size
    if size < 1:
        raise UsageError(f"Invalid world_size value provided: {size}. Value must be greater than 0.")
    if rank < 0:
        raise UsageError(f"Invalid rank value provided: {rank}. Value must be at least 0.")
    if rank >= size:
        raise UsageError(
            f"Invalid rank and world_size values provided: rank={rank}, world_size={size}. Rank must be less than world_size."
        )
    return rank, size


# --- modules


def revert_sync_batchnorm(module: nn.Module, device: str | torch.device | None = None) -> nn.Module:
    """As `echelon.parallel.ddp.sync_batchnorm.revert_sync_batchnorm`, which leaves the layers on their device.

    Args:
        device: move the layers there.
    """
    sync_batchnorm.revert_sync_batchnorm(module)
    if device is not None:
        for layer in module.modules():
            if isinstance(layer, sync_batchnorm.LocalBatchNorm):
                layer.to(device)
    return module


# --- processes


@dataclass
class ProcessGroupSetupParams:
    """For annotations alone: `spawn_multi_process` needs none, and its ranks meet without a port."""

    backend: str
    port: str
    world_size: int
    timeout_s: int


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
            gc.collect()  # what holds the group ends before it
            destroy_process_group()


def spawn_multi_process(
    world_size: int, backend: str, method: Callable[..., T], *method_args: Any, timeout_s: float = 60.0, **method_kwargs: Any
) -> list[T]:
    """Call a function on ranks of this machine within a process group; each rank's value, by rank.

    `echelon.launch` with a group: the ranks find torchrun's variables, RANK included, in their environment.

    Args:
        timeout_s: of the group's collectives.
    Raises:
        RankFailedError: with the first failing rank's traceback; the exception itself is its `__cause__`.
    """
    call = _InGroup(backend, timedelta(seconds=timeout_s), method)
    return launch(call, ranks=world_size, args=method_args, kwargs=method_kwargs)
