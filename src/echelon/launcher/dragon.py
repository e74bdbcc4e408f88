"""Ranks on Dragon's runtime: its own CollectiveGroup, with what it leaves to its users.

It wants a list of policies with host names, sets none of the variables that torch reads, has one fixed port, gives neither
values nor tracebacks back, and raises a rank's failure once more instead of closing. All of that is dealt with here.
Tested with dragonhpc 0.15.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.contracts.errors import RankFailedError, RankTimeoutError
from echelon.contracts.rank import RankInfo
from echelon.contracts.run_dir import read_json, write_json
from echelon.launcher import worker
from echelon.launcher.failure import render
from echelon.launcher.group import set_threads
from echelon.launcher.job import Failure, usable_cores

__all__ = ["DragonRanks"]

# After Dragon has said that a rank failed: until the others have written down how they fell, so that the first is found.
_HEAR_OUT_S = 0.5


class DragonRanks:
    """One group. Ranks leave their values and failures in a folder that all nodes must see; on one node, any temporary one.

    Args:
        placed: the function, `take_place` included.
        policies: with or without host names.
        port: of the group's store; None finds a free one.
    """

    def __init__(
        self, placed: Any, args: Sequence[Any], kwargs: Mapping[str, Any], policies: Sequence[Any], port: int | None
    ) -> None:
        from dragon.ai.collective_group import CollectiveGroup
        from dragon.native.machine import Node, System

        hosts = [Node(number).hostname for number in System().nodes]
        self._ranks = len(policies)
        # Several nodes meet in the folder where the program was started, as Dragon's own files do.
        self._folder = Path(tempfile.mkdtemp(prefix="echelon-dragon-", dir=os.getcwd() if len(hosts) > 1 else None))
        self._failed = False
        self._group: Any = CollectiveGroup(
            _run_rank,
            (str(self._folder), placed, tuple(args), dict(kwargs)),
            None,
            hide_stderr=placed.hide_stderr,
            port=port or _free_port(),
            policies=[_dragons(policy, hosts[rank * len(hosts) // self._ranks]) for rank, policy in enumerate(policies)],
        )
        self._group.init()

    def start(self) -> None:
        self._group.start()

    def join(self, timeout: float | None) -> list[Any]:
        try:
            self._group.join(timeout)
        except TimeoutError:
            raise RankTimeoutError(f"the ranks had not finished after {timeout:g} s.", rank=0, exit_code=124) from None
        except Exception as error:  # Dragon's own class, with exit codes and no more
            self._failed = True
            raise self._failure(str(error)) from None
        if failures := self._reported():
            self._failed = True
            raise self._error(failures)
        return [_load(self._folder / f"value.rank{rank}.pkl") for rank in range(self._ranks)]

    def close(self) -> None:
        try:
            if not self._failed:
                self._group.close()
                return
        except Exception:  # a rank's failure that nobody joined: `close` raises it instead of closing
            pass
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        # The same without raising what `join` has raised already. It has no public name.
        with contextlib.suppress(Exception):
            self._group._close_no_decorator()

    def _reported(self) -> list[Failure]:
        records = {rank: read_json(self._folder / f"exit.rank{rank}.json") for rank in range(self._ranks)}
        return [
            Failure.from_record(rank, int(record["exit_code"]), 0, record, self._folder / f"rank{rank}")
            for rank, record in records.items()
            if record and record["exit_code"]
        ]

    def _failure(self, text: str) -> RankFailedError:
        until = time.monotonic() + _HEAR_OUT_S
        while time.monotonic() < until and len(self._reported()) < self._ranks:
            time.sleep(0.02)
        if failures := self._reported():
            return self._error(failures)
        return RankFailedError(f"a rank ended without a word, as when it is killed. Dragon says: {text}", rank=-1, exit_code=1)

    def _error(self, failures: Sequence[Failure]) -> RankFailedError:
        first = Failure.first(failures)
        first = replace(first, log=None)  # Dragon shows what ranks write, as they write it
        text = f"{render(first, self._ranks)}\n\n{first.traceback}".rstrip()
        return RankFailedError(text, rank=first.rank, exit_code=first.exit_code)


def _run_rank(folder: str, placed: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """What Dragon starts: torch's variables, the place, the function, and a record of how it ended."""
    info = _known_to_torch(RankInfo())
    record = Path(folder) / f"exit.rank{info.rank}.json"
    try:
        value = placed(*args, **kwargs)
        temporary = Path(folder) / f"value.rank{info.rank}.tmp"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            pickle.dump(value, file)
        temporary.replace(Path(folder) / f"value.rank{info.rank}.pkl")
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = RuntimeError("the function called sys.exit(), which leaves nothing to return. Return instead.")
        write_json(record, {"exit_code": 1, **worker.describe(error)})
        # Not an exception: Dragon would print it without saying whose it is. And at once: the others wait.
        os._exit(1)


def _known_to_torch(info: RankInfo) -> RankInfo:
    """The rank's facts under torchrun's names; on one node over loopback, whatever the host's name resolves to."""
    env = info.to_env()
    if info.local_world_size == info.world_size:
        env["MASTER_ADDR"] = os.environ["_DRAGON_CG_MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(env)
    if "OMP_NUM_THREADS" not in os.environ:
        set_threads(max(1, usable_cores() // info.local_world_size))
    return RankInfo()


def _dragons(policy: Any, host: str) -> Any:
    """A policy as Dragon's group needs it: by host name."""
    from dragon.infrastructure.policy import Policy

    return Policy(
        placement=Policy.Placement.HOST_NAME,
        host_name=policy.host_name or host,
        cpu_affinity=list(policy.cpu_affinity),
        gpu_affinity=list(policy.gpu_affinity),
        gpu_env_str=policy.gpu_env_str,
    )


def _free_port() -> int:
    """Free on this node now; rank 0 usually runs here. A port can be taken before it is used, but not two groups' alike."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _load(path: Path) -> Any:
    with open(path, "rb") as file:
        return pickle.load(file)
