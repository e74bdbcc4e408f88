"""The store at MASTER_ADDR and MASTER_PORT, which rank 0 serves. An error names a port that is taken."""

from __future__ import annotations

import logging
import socket
import threading
import time
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from echelon.common.errors import LauncherEnvironmentError
from echelon.contracts.rank import RankInfo, said_by
from echelon.world.device import in_thread

__all__ = ["store_of"]

logger = logging.getLogger(__name__)

# A rank that is not connected after _LOOK_S checks the address: rank 0 may not run yet, or another program may have its port.
# A program that listens gets _SILENT_S to answer, since rank 0 may be busy with thousands of ranks.
_LOOK_S, _SILENT_S = 5.0, 30.0
_FIRST_WORD_S = 10.0


def store_of(info: RankInfo, timeout: timedelta) -> dist.Store:
    """The store of torch's env://, but rank 0 does not wait for the others: torch would not say which are missing.

    Raises:
        LauncherEnvironmentError: another process has rank 0's port, or this host does not know the address.
        dist.DistError: the store is not reachable within `timeout`.
    """
    if info.rank == 0:
        _check_port(info)
        return _connected(info, timeout)
    result: list[dist.Store | BaseException] = []

    def connect() -> None:
        try:
            result.append(_connected(info, timeout))
        except BaseException as error:
            result.append(error)

    # In a thread: torch 2.13 waits forever for a program that accepts connections but does not answer.
    thread = threading.Thread(target=in_thread(connect), name="echelon store", daemon=True)
    thread.start()
    thread.join(_LOOK_S)
    _watch(thread, info, timeout)
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _watch(thread: threading.Thread, info: RankInfo, timeout: timedelta) -> None:
    """Wait until the thread has connected or failed.

    Raises:
        LauncherEnvironmentError: it cannot succeed any more.
    """
    at, since, warned = f"MASTER_ADDR={info.master_addr} MASTER_PORT={info.master_port}", time.monotonic(), False
    before = None
    while thread.is_alive():
        state = _look(info)
        if state != before:
            before, since = state, time.monotonic()
        silent_s = time.monotonic() - since
        long = silent_s > min(_SILENT_S, timeout.total_seconds())
        if long and state == "listens":
            raise LauncherEnvironmentError(
                f"rank {info.rank} of {info.world_size}: a program listens at {at} but does not answer like rank 0. Another "
                "program seems to have that port: set MASTER_PORT to a free one on all ranks, or start with `echelon run`, which "
                "finds one itself."
            )
        if long and state == "unknown":
            raise LauncherEnvironmentError(
                f"rank {info.rank} of {info.world_size}: {socket.gethostname()} knows no address for {at.split()[0]}. Set it to "
                "a name of rank 0's host that this host can resolve, or to its address."
            )
        if silent_s > min(_FIRST_WORD_S, _SILENT_S) and state == "nothing" and not warned:
            warned, variables = True, said_by(info)
            logger.warning(
                "rank %s waits for rank 0 at %s, where nothing listens yet. Does it run?%s",
                info.rank,
                at,
                f" It is expected because of {variables}: unset these to run this process alone." if variables else "",
            )
        thread.join(_LOOK_S)


def _connected(info: RankInfo, timeout: timedelta) -> dist.Store:
    is_master = info.rank == 0
    return dist.TCPStore(
        info.master_addr, info.master_port, is_master=is_master, wait_for_workers=False, timeout=timeout, multi_tenant=True
    )


def _look(info: RankInfo) -> Literal["listens", "nothing", "unknown"]:
    """Whether a program listens at rank 0's address, nothing does, or the address is unknown."""
    try:
        socket.create_connection((info.master_addr, info.master_port), timeout=_LOOK_S).close()
    except socket.gaierror:
        return "unknown"
    except OSError:
        return "nothing"
    return "listens"


def _check_port(info: RankInfo) -> None:
    """Refuse a port that another process holds, before the other ranks wait for rank 0, which serves the store."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", info.master_port))
        except OSError as error:
            raise LauncherEnvironmentError(
                f"rank 0 cannot serve on MASTER_PORT={info.master_port}: {error.strerror}. Set MASTER_PORT to a free port "
                "on all ranks, or start with `echelon run`, which finds one itself."
            ) from error
