"""Ranks on Dragon's runtime: its own CollectiveGroup, with the features that it lacks.

Dragon's group wants a list of policies with host names, sets none of torch's variables, has one fixed port, and returns neither
values nor tracebacks; its `close` raises a rank's failure again instead of closing. This module handles all of that.
Tested with dragonhpc 0.15.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.common.errors import ClusterError, RankFailedError, RankTimeoutError
from echelon.common.lock import HeldError, Lock, look
from echelon.common.machine import usable_cores
from echelon.common.terminal import printable
from echelon.contracts.rank import RankInfo
from echelon.contracts.records import rank_record
from echelon.contracts.run_dir import write_json
from echelon.diagnosis.failure import Failure, render
from echelon.launcher.calls import load_exception, load_values
from echelon.launcher.dragon.runtime import FOLDER_VARIABLE
from echelon.launcher.local.nodes import free_port
from echelon.launcher.local.raised import describe
from echelon.launcher.local.worker import leave_value, set_threads
from echelon.launcher.workarounds import close_failed, look_for_failures_with_pauses, serve_dragon_on_loopback

__all__ = ["DragonRanks"]

logger = logging.getLogger(__name__)

# Seconds, after Dragon reports a failed rank, for other ranks to record their failures, so that the first can be found.
_HEAR_OUT_S = 0.5
# Time that Dragon gives ranks that it interrupts because another has failed.
_INTERRUPT_S = 5.0
_INTERRUPTED = "KeyboardInterrupt"
_LOOK_S = 0.2


class DragonRanks:
    """One group. Ranks leave values and failures in a folder that all nodes must see; on one node, any temporary folder.

    Args:
        placed: the function with `take_place`.
        policies: with or without host names.
        port: of the group's store; None for a free one.
    """

    def __init__(
        self, placed: Any, args: Sequence[Any], kwargs: Mapping[str, Any], policies: Sequence[Any], port: int | None
    ) -> None:
        from dragon.ai.collective_group import CollectiveGroup
        from dragon.native.machine import Node, System

        hosts = [Node(number).hostname for number in System().nodes]
        self._ranks = len(policies)
        for rank, policy in enumerate(policies):
            if policy.host_name and policy.host_name not in hosts:
                raise ClusterError(
                    f"policies[{rank}].host_name must be one of Dragon's nodes, {', '.join(hosts)}, got {policy.host_name!r}."
                )
        # `echelon dragon` removes its folder in any case. Under plain `dragon`, all nodes see the folder where it was started.
        shared = os.environ.get(FOLDER_VARIABLE) or (os.getcwd() if len(hosts) > 1 else None)
        self._folder = Path(tempfile.mkdtemp(prefix="echelon-group-", dir=shared))
        self._failed = False
        self._closed, self._closing = threading.Event(), threading.Lock()
        theirs = [_dragons(policy, hosts[rank * len(hosts) // self._ranks]) for rank, policy in enumerate(policies)]
        self._key = secrets.token_hex(32)
        call = (str(self._folder), self._key, placed, tuple(args), dict(kwargs))
        try:
            self._group: Any = CollectiveGroup(
                _run_rank, call, None, hide_stderr=placed.hide_stderr, port=port or free_port(), policies=theirs
            )
            self._group.init()
            look_for_failures_with_pauses(self._group)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def start(self) -> None:
        self._group.start()
        threading.Thread(target=self._close_at_the_end, name="echelon-group").start()

    def join(self, timeout: float | None) -> list[Any]:
        failure = self._wait(timeout)
        if failure or self._reported():
            self._failed = True
            failed = self._failure(failure)
            raise failed from load_exception(self._value(failed.rank, ".error"), self._key)
        return load_values([self._value(rank) for rank in range(self._ranks)], self._key)

    def _wait(self, timeout: float | None) -> str:
        """Dragon's text about a failure; empty if there is none."""
        try:
            self._group.join(timeout)
            # A thread that polls reports failures to `join`, which may be after the ranks' end.
            codes = [code for _, code in self._group.exit_status if code]
        except TimeoutError:
            raise RankTimeoutError(f"the ranks had not finished after {timeout:g} s.", rank=0, exit_code=124) from None
        except Exception as error:  # Dragon's own class, which has exit codes only
            return str(error)
        return f"exit codes {codes}" if codes else ""

    def close(self) -> None:
        with self._closing:
            if self._closed.is_set():
                return
            try:
                self._close()
            finally:
                self._closed.set()
                shutil.rmtree(self._folder, ignore_errors=True)

    def _close(self) -> None:
        if not self._failed:
            try:
                self._group.close()
                return
            except Exception as error:  # instead of closing, it raises a rank's failure that was not joined
                logger.warning("a rank of the group failed, and join() was not called to see it: %s", error)
        close_failed(self._group)

    def _close_at_the_end(self) -> None:
        """Close the group of a script that ends without closing it, as after an error: Dragon's thread would keep it alive."""
        while not self._closed.wait(_LOOK_S):
            if not threading.main_thread().is_alive():
                self.close()

    def _value(self, rank: int, error: str = "") -> Path:
        return self._folder / f"value.rank{rank}.pkl{error}"

    def _lives(self, rank: int) -> bool:
        try:
            look(_lock(self._folder, rank))
        except HeldError:
            return True
        except OSError:  # the rank did not get so far
            pass
        return False

    def _reported(self) -> list[Failure]:
        records = {rank: rank_record(self._folder / f"exit.rank{rank}.json") for rank in range(self._ranks)}
        return [
            Failure.from_record(rank, int(record["exit_code"]), 0, record, self._folder / f"rank{rank}")
            for rank, record in records.items()
            if record and record["exit_code"]
        ]

    def _hear_out(self) -> list[Failure]:
        """Wait for the other ranks' failures: after one has failed, Dragon interrupts the rest. A killed rank records nothing."""
        began = time.monotonic()
        while True:
            failures = self._reported()
            heard = len(failures) + sum(self._value(rank).exists() for rank in range(self._ranks))
            own = any(f.kind != _INTERRUPTED for f in failures)
            patience_s = _HEAR_OUT_S if own or heard >= self._ranks - 1 else _INTERRUPT_S
            if heard == self._ranks or time.monotonic() - began > patience_s:
                return failures
            time.sleep(0.02)

    def _failure(self, text: str) -> RankFailedError:
        # Check before Dragon's signals end ranks that ignore them: ranks that are gone by now failed first.
        gone = [rank for rank in range(self._ranks) if not self._lives(rank)]
        failures = self._hear_out()
        if own := [f for f in failures if f.kind != _INTERRUPTED]:
            return self._error(own)
        heard = {f.rank for f in failures}
        silent = [r for r in range(self._ranks) if r not in heard and not self._value(r).exists()]
        if not silent and failures:
            return self._error(failures)
        silent = [rank for rank in silent if rank in gone] or silent
        which = f"rank {' or '.join(map(str, silent))}" if silent else "a rank"
        rank = silent[0] if len(silent) == 1 else -1
        return RankFailedError(f"{which} ended without a word, as when it is killed. Dragon says: {text}", rank=rank, exit_code=1)

    def _error(self, failures: Sequence[Failure]) -> RankFailedError:
        first = Failure.first(failures)
        first = replace(first, log=None)  # Dragon shows the ranks' output itself
        text = f"{render(first, self._ranks)}\n\n{printable(first.traceback)}".rstrip()
        return RankFailedError(text, rank=first.rank, exit_code=first.exit_code)


def _run_rank(folder: str, key: str, placed: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A rank's process under Dragon: set torch's variables, take the place, run the function, and record how it ended."""
    info = _known_to_torch(RankInfo())
    Lock.take(_lock(Path(folder), info.rank))  # held until this process ends, in whatever way
    record = Path(folder) / f"exit.rank{info.rank}.json"
    try:
        leave_value(lambda: placed(*args, **kwargs), f"{folder}/value.rank{info.rank}.pkl", placed.__name__, key)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = RuntimeError("the function called sys.exit(), so there is no value to return. Use return instead.")
        write_json(record, {"exit_code": 1, **describe(error)})
        # Not an exception: Dragon would print it without the rank. And at once, since the others wait.
        os._exit(1)


def _lock(folder: Path, rank: int) -> Path:
    return folder / f"lives.rank{rank}"


def _known_to_torch(info: RankInfo) -> RankInfo:
    """Set the rank's facts under torchrun's names; on one node over loopback, whatever the host's name resolves to."""
    env = info.to_env()
    if info.local_world_size == info.world_size:
        serve_dragon_on_loopback()
        env["MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(env)
    if "OMP_NUM_THREADS" not in os.environ:
        set_threads(max(1, usable_cores() // info.local_world_size))
    return RankInfo()


def _dragons(policy: Any, host: str) -> Any:
    """A policy in the form that Dragon's group needs: by host name."""
    from dragon.infrastructure.policy import Policy

    return Policy(
        placement=Policy.Placement.HOST_NAME,
        host_name=policy.host_name or host,
        cpu_affinity=list(policy.cpu_affinity),
        gpu_affinity=list(policy.gpu_affinity),
        gpu_env_str=policy.gpu_env_str,
    )
