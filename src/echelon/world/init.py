"""Join the group of ranks that the environment describes, and find this process's place in it.

`World` is a view of torch's default process group, whether it was started by `init_from_env`, by the user, or not at all (a world
of one). It has no state that could disagree with torch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from echelon.common.errors import LauncherEnvironmentError, UsageError, require
from echelon.common.machine import DEVICE_VARIABLE, missing_interface
from echelon.common.numbers import digits
from echelon.contracts.expected_world import ExpectedWorld
from echelon.contracts.rank import STORE_PREFIX_VARIABLE, RankInfo
from echelon.world import stop
from echelon.world.device import device_of, set_threads, use
from echelon.world.handshake import RankSetup, check_same_setup, greeted
from echelon.world.meeting import Facts, meet, refusal
from echelon.world.store import store_of

__all__ = ["World", "check_joined", "ensure_group", "init_from_env", "is_main", "rank", "rank_info", "world_size"]


# With torch's default a hang costs 30 minutes. A collective that takes ten minutes has gone wrong.
DEFAULT_TIMEOUT = timedelta(minutes=10)
_LAST_WORK_S = 0.05
_joins = itertools.count()
_device: torch.device | None = None  # this process's device, once `init_from_env` has chosen it


@dataclass(frozen=True)
class World:
    """This rank in torch's default group.

    Args:
        rank, size: this rank's number and the world size; 0 and 1 without a group.
        device: where this rank computes.
    """

    rank: int
    size: int
    device: torch.device

    @classmethod
    def current(cls, device: torch.device | None = None) -> World:
        """The current world; `device` defaults to this rank's own."""
        if dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = 0, 1
        return cls(rank, size, device or _device_of(rank_info()))


def rank_info() -> RankInfo:
    """This process's rank and its place on the node.

    A default group goes before the environment: ranks that joined by a file, or by an address in the script, may have no
    launcher's environment, a different one, or half of one.

    Raises:
        LauncherEnvironmentError: there is no group, and the environment is half-set or contradicts itself.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    try:
        info = RankInfo.from_env()
    except LauncherEnvironmentError:
        if not (dist.is_available() and dist.is_initialized()):
            raise
    else:
        if size == 1 or (info.rank, info.world_size) == (dist.get_rank(), size):
            return info
    rank = dist.get_rank()
    local_size = min(digits(os.environ.get("LOCAL_WORLD_SIZE", "")) or size, size)
    local = digits(os.environ.get("LOCAL_RANK", ""))
    if local is None and torch.cuda.is_initialized():
        local = torch.cuda.current_device()
    return RankInfo(rank, rank % local_size if local is None or local >= local_size else local, 0, size, local_size)


def rank() -> int:
    """This process's rank, also before the ranks have joined; 0 if it runs alone."""
    return rank_info().rank


def world_size() -> int:
    """The number of ranks, also before they have joined; 1 if this process runs alone."""
    return rank_info().world_size


def is_main() -> bool:
    """Whether this is rank 0, which does what a single process should do, such as printing."""
    return rank() == 0


def init_from_env(
    device_type: str | None = None,
    pg_backend: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    *,
    pg_timeout: timedelta | None = None,
    float32_matmul_precision: str | None = None,
) -> torch.device:
    """Pick this rank's device and join the process group that the launcher's environment describes.

    Every rank calls it once, before anything that uses the device or the group; a second call returns the device again.
    Without a launcher this is a world of one and no group is started. From then on SIGTERM, SIGUSR1 and SIGHUP end this process
    with exit code 75, unless the program has handlers of its own; a loop that trains saves first (docs/checkpoints.md).

    Args:
        device_type: "cpu" or "cuda"; by default cuda if there is a device, else cpu. `--device` and $ECHELON_DEVICE go before it.
        pg_backend: by default gloo on CPU; on CUDA nccl for CUDA tensors and gloo for tensors in host memory. With "gloo" alone
            several ranks may share a GPU.
        timeout: the time after which a collective fails. `pg_timeout` is TorchTNT's name for it.
        float32_matmul_precision: torch's setting of this name; unchanged by default.
    Returns:
        The device.
    Raises:
        LauncherEnvironmentError: variables are missing or contradict each other, the port is taken, or a launch command started
            another number of ranks than the job requested; or, on all ranks, some ranks cannot compute together (`meeting`).
        UsageError: the device type, or a network interface that a variable names, does not exist here; or ECHELON_HANDSHAKE has
            an unknown value.
    """
    wait = pg_timeout if pg_timeout is not None else timeout
    require(isinstance(wait, timedelta) and wait > timedelta(), "timeout", "a timedelta above 0", wait)
    require(isinstance(pg_backend, str | None), "pg_backend", "a name such as 'gloo', or None", pg_backend)
    known = float32_matmul_precision in (None, "highest", "high", "medium")
    require(known, "float32_matmul_precision", "'highest', 'high', 'medium' or None", float32_matmul_precision)
    info = rank_info()
    if (asked := ExpectedWorld.from_env()) is not None:
        asked.check(info)
    joins = dist.is_available() and not dist.is_initialized() and (info.world_size > 1 or "RANK" in os.environ)
    device = _device_of(info, device_type, pg_backend, wait if joins else None)
    use(device)
    if float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(float32_matmul_precision)
    if joins:
        stop.leave_if_asked()
        set_threads(info)
        named = device_type is not None or DEVICE_VARIABLE in os.environ
        _join(info, pg_backend or _backend_of(device), wait, device, named=named)
    global _device
    _device = device
    # Not before joining: a rank that waits inside torch cannot run a handler, and would not end.
    stop.install_stop_handlers()
    return device


def _device_of(
    info: RankInfo, device_type: str | None = None, backend: str | None = None, joining: timedelta | None = None
) -> torch.device:
    """The device of an earlier call, unless this one names a type.

    If there is no such device, tell the ranks that would wait for this one.
    """
    if _device is not None and device_type is None and DEVICE_VARIABLE not in os.environ:
        return _device
    if backend is None and dist.is_available() and dist.is_initialized():
        backend = str(dist.get_backend_config())
    try:
        return device_of(info, device_type, shared=backend is not None and "nccl" not in backend)
    except UsageError as error:
        if joining is not None and info.world_size > 1:
            _refuse(info, error, joining)
        raise


def _refuse(info: RankInfo, error: UsageError, timeout: timedelta) -> None:
    """Tell the others, which would wait for this rank, why it does not join."""
    with contextlib.suppress(LauncherEnvironmentError):
        _meet(info, refusal(error), timeout)


def _backend_of(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _join(info: RankInfo, backend: str, timeout: timedelta, device: torch.device, *, named: bool) -> None:
    _end_calmly()
    # torch divides a group that is bound to a device by `split_group`, which gloo does not support.
    device_id = device if device.type == "cuda" and "nccl" in backend else None
    if wrong := missing_interface(os.environ, backend):
        error = UsageError(wrong)
        if info.world_size > 1:
            _refuse(info, error, timeout)
        raise error
    if info.world_size == 1:  # no other ranks: no port is needed, which another process could have taken
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device_id)
        return
    with _naming_the_address(info, timeout):
        try:
            setup = RankSetup.here(info, device, backend)
        except UsageError as error:
            _refuse(info, error, timeout)
            raise
        store, compared = _meet(info, Facts.here(device, asked=named, backend=backend), timeout, setup)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", store),  # the prefix of torch's own env://
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            device_id=device_id,
        )
    if compared:
        greeted()
    else:
        check_same_setup(device)


def _meet(info: RankInfo, facts: Facts, timeout: timedelta, setup: RankSetup | None = None) -> tuple[dist.Store, bool]:
    """Meet the other ranks in the store. Returns the store, and whether the ranks have compared their programs."""
    # torch's env:// reads only torchrun's variables: set them for other launchers.
    for name, value in info.to_env().items():
        os.environ.setdefault(name, value)
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    prefix, number = os.environ.get(STORE_PREFIX_VARIABLE), next(_joins)
    store: dist.Store
    with _naming_the_address(info, timeout):
        if prefix and of_launcher:
            served = dist.TCPStore(info.master_addr, info.master_port, is_master=False, wait_for_workers=False, timeout=timeout)
            # The launcher's store outlives a group: ranks that join again must not read the addresses of the last group.
            store = dist.PrefixStore(f"{prefix}/{number}", served)
        elif of_launcher:
            store, _, _ = next(iter(dist.rendezvous("env://", timeout=timeout)))
            store.set_timeout(timeout)
        else:
            store = store_of(info, timeout)
        fresh = bool(prefix) or not of_launcher
        meet(dist.PrefixStore(f"echelon/{number}", store), info, facts, timeout, fresh=fresh, setup=setup)
    return store, fresh


@contextlib.contextmanager
def _naming_the_address(info: RankInfo, timeout: timedelta) -> Iterator[None]:
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        whom = "all ranks" if info.rank == 0 else "rank 0, which serves it, and the others"
        raise LauncherEnvironmentError(
            f"rank {info.rank} of {info.world_size} could not join at MASTER_ADDR={info.master_addr} "
            f"MASTER_PORT={info.master_port} within {timeout.total_seconds():g} s ({str(error).splitlines()[0]}). "
            f"Do {whom} run, and can this host reach that address?"
        ) from error


@functools.cache
def _end_calmly() -> None:
    """Give gloo's threads a moment before the interpreter ends.

    Such a thread releases the tensors of a collective after it has reported the collective as finished, and needs the interpreter
    for that. If the interpreter has ended by then, the thread aborts the process: "terminate called without an active exception",
    6 of 25 short runs under torchrun on a loaded machine (torch 2.13). Destroying the group does not help, because modules still
    hold it. Another collective does not help either, since it ends in the same way.
    """
    atexit.register(time.sleep, _LAST_WORK_S)


def check_joined() -> None:
    """Refuse a world of one if several ranks were launched.

    Raises:
        LauncherEnvironmentError: this rank has not joined the others.
    """
    if not dist.is_initialized() and (info := RankInfo.from_env()).world_size > 1:
        raise LauncherEnvironmentError(
            f"{info.world_size} ranks were launched, but rank {info.rank} has not joined the others. "
            "Call echelon.init_from_env() first."
        )


def ensure_group(device: torch.device) -> None:
    """Start a group of one if there is none: sharding needs a group, even for one rank.

    Raises:
        LauncherEnvironmentError: several ranks were launched but have not joined; each would train a model of its own.
    """
    check_joined()
    if not dist.is_initialized():
        _end_calmly()
        dist.init_process_group(_backend_of(device), store=dist.HashStore(), rank=0, world_size=1)
