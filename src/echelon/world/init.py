"""Join the group of ranks that the environment describes, and know one's place in it.

`World` is a view of torch's default process group, however it was started: by `init_from_env`, by the user, or not at all (a
world of one). It holds nothing that could disagree with torch.
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


# torch's default is 30 minutes, which is what a hang then costs. A collective that takes ten has gone wrong.
DEFAULT_TIMEOUT = timedelta(minutes=10)
_LAST_WORK_S = 0.05
_joins = itertools.count()
_device: torch.device | None = None  # that this process computes on, once `init_from_env` has chosen


@dataclass(frozen=True)
class World:
    """The ranks as torch has joined them.

    Args:
        rank, size: of the default group; 0 of 1 without one.
        device: where this rank computes.
    """

    rank: int
    size: int
    device: torch.device

    @classmethod
    def current(cls, device: torch.device | None = None) -> World:
        """The world as it is now; `device` defaults to this rank's own."""
        if dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = 0, 1
        return cls(rank, size, device or _device_of(rank_info()))


def rank_info() -> RankInfo:
    """This process's place. The default group is the truth where there is one: ranks that met by a file, or by an address that
    the script knows, need no launcher's environment, and may have another's, or half of one.

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
    """This process's number among the ranks, also before they have met; 0 alone."""
    return rank_info().rank


def world_size() -> int:
    """How many ranks there are, also before they have met; 1 alone."""
    return rank_info().world_size


def is_main() -> bool:
    """Whether this is rank 0, which prints and writes what one process alone should."""
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

    Every rank calls it, once, before anything that uses the device or the group; a second call returns the device again.
    Without a launcher this is a world of one and no group is started. From here on SIGTERM, SIGUSR1 and SIGHUP end this process
    with exit code 75, where the program has no handlers of its own; while a loop trains, it saves first (docs/checkpoints.md).

    Args:
        device_type: "cpu" or "cuda"; by default cuda if there is a device, else cpu. `--device` and $ECHELON_DEVICE go before it.
        pg_backend: by default gloo on CPU, and on CUDA nccl for its tensors with gloo for those in host memory. By "gloo" alone
            several ranks may compute on one GPU.
        timeout: after which a collective fails. `pg_timeout` is TorchTNT's name for it.
        float32_matmul_precision: torch's setting of that name; left alone by default.
    Returns:
        The device.
    Raises:
        LauncherEnvironmentError: variables are missing or contradict each other, or the port is taken; a launch command started
            another number of ranks than the job asked of it; or, on all ranks, some cannot compute together (`meeting`).
        UsageError: the device type, or a network interface that a variable names, does not exist here; ECHELON_HANDSHAKE has a
            value that there is not.
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
    # Not before: who waits for others inside torch cannot run a handler, and would not end.
    stop.install_stop_handlers()
    return device


def _device_of(
    info: RankInfo, device_type: str | None = None, backend: str | None = None, joining: timedelta | None = None
) -> torch.device:
    """That of an earlier call, unless this one names another kind. If there is none, others that would wait are told."""
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
    """Tell the others, who would wait for this rank, why it does not join."""
    with contextlib.suppress(LauncherEnvironmentError):
        _meet(info, refusal(error), timeout)


def _backend_of(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _join(info: RankInfo, backend: str, timeout: timedelta, device: torch.device, *, named: bool) -> None:
    _end_calmly()
    # A group that is bound to a device is divided by `split_group`, which gloo cannot do.
    device_id = device if device.type == "cuda" and "nccl" in backend else None
    if wrong := missing_interface(os.environ, backend):
        error = UsageError(wrong)
        if info.world_size > 1:
            _refuse(info, error, timeout)
        raise error
    if info.world_size == 1:  # nobody to meet: no port that another process could have taken
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
            store=dist.PrefixStore("default_pg", store),  # as torch's own env:// has it
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
    """The ranks' store, in which they have agreed that they can join; and whether they have compared what they run."""
    # torch's env:// reads exactly these; other launchers' facts are given to it under torchrun's names.
    for name, value in info.to_env().items():
        os.environ.setdefault(name, value)
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    prefix, number = os.environ.get(STORE_PREFIX_VARIABLE), next(_joins)
    store: dist.Store
    with _naming_the_address(info, timeout):
        if prefix and of_launcher:
            served = dist.TCPStore(info.master_addr, info.master_port, is_master=False, wait_for_workers=False, timeout=timeout)
            # The launcher's store outlives a group: ranks that join again must not read where the last one's were.
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

    Such a thread lets go of a finished collective's tensors after everyone has been told that it is finished, and needs the
    interpreter for that. If the interpreter has ended meanwhile, the thread takes the process along: "terminate called without
    an active exception", 6 of 25 short runs under torchrun on a loaded machine (torch 2.13). Destroying the group would not
    help, for modules still hold it, nor would one more collective, which has the same end.
    """
    atexit.register(time.sleep, _LAST_WORK_S)


def check_joined() -> None:
    """Refuse a world of one where several ranks were launched.

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
        LauncherEnvironmentError: several ranks were launched; each alone would train a model of its own.
    """
    check_joined()
    if not dist.is_initialized():
        _end_calmly()
        dist.init_process_group(_backend_of(device), store=dist.HashStore(), rank=0, world_size=1)
