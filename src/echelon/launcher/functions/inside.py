"""In a rank that a launch command started: the user's script runs once more, and here is the call that it was started for.

The node's launcher says in one variable which call of the script that is; nothing of it ever is in the submitter's own
environment. Calls before it are jobs of their own and are not made again; the one itself runs here, leaves its value or its
error by rank, and ends the process: what follows in the script is the submitter's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from echelon.common.errors import LaunchError
from echelon.common.files import open_to_append
from echelon.contracts.expected_world import ExpectedWorld
from echelon.contracts.rank import RankInfo
from echelon.contracts.run_dir import write_json
from echelon.contracts.stopping import REQUEUE, SIGNALS, leave
from echelon.launcher.local.server import die_with_parent
from echelon.launcher.local.start import Start
from echelon.launcher.local.worker import end, leave_value, run_recorded

__all__ = ["VARIABLE", "CallSite", "call_site"]

VARIABLE = "ECHELON_CALL"
T = TypeVar("T")


@dataclass(frozen=True)
class CallSite:
    """Which call of a script this process was started for.

    Args:
        folder: of the attempt, for values, records and logs.
        node: this node's index.
        number: how many jobs the script had submitted before.
        function: the name of what it called.
        task: of an array, which.
        earlier: the run folders of the jobs that it had submitted before.
        key: of the job, for the values.
    """

    folder: str
    node: int
    number: int
    function: str
    task: int
    earlier: Sequence[Sequence[str]]
    key: str

    def to_env(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


_begun = False


def call_site() -> CallSite | None:
    """Where this process is, if a launch command started it and its call has not begun."""
    text = os.environ.get(VARIABLE)
    if not text or _begun:
        return None
    try:
        return CallSite(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise LaunchError(f"{VARIABLE}={text!r} cannot be read: {error}. The launcher sets it; unset it.") from error


def run_call(at: CallSite, name: str, function: Callable[[], Any]) -> NoReturn:
    """Call `function`, leave its value and a record, and end this process.

    Raises:
        UsageError: the script did not come to the call for which it was started, but to another.
    """
    global _begun
    if name != at.function:
        raise LaunchError(
            f"job {at.number + 1} of this script called {at.function} when it was submitted, and calls {name} here. "
            "A launch command runs the script again on the nodes, where it must make the same calls."
        )
    _begun = True
    info, folder = RankInfo.from_env(), Path(at.folder)
    record, log = folder / f"exit.rank{info.rank}.json", folder / f"rank{info.rank}.log"
    record.unlink(missing_ok=True)  # of an earlier try, where the command starts its ranks again by itself
    die_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until `run_recorded` hears them
    signal.signal(signal.SIGUSR1, leave)  # ignored so far: the command got it from Slurm, too
    _log_to(log)
    start = Start(
        "call",
        name,
        (),
        {},
        os.getcwd(),
        (),
        log=str(log),
        record=str(record),
        result=str(folder / f"value.rank{info.rank}.pkl"),
        flight=str(folder.parents[1] / "dumps" / folder.name / f"flight.rank{info.rank}.json"),
    )

    def program() -> None:
        # From here on the node's launcher can ask this rank to save and end: it has a handler now.
        about = {"rank": info.rank, "local_world_size": info.local_world_size, "pid": os.getpid()}
        write_json(folder / f"pid.node{at.node}.rank{info.rank}.json", about)
        asked = ExpectedWorld.from_env()
        if asked is None:
            leave_value(function, str(start.result), name, at.key)
            return
        asked.check(info)
        ExpectedWorld.forget()
        leave_value(lambda: _in_one_world(function(), asked), str(start.result), name, at.key)

    code = run_recorded(start, program)
    # A rank that saved to resume later has done its work: with 75, torchrun would kill the others, who are about to save.
    end(0 if code == REQUEUE else code)


def _in_one_world(value: T, asked: ExpectedWorld) -> T:
    """The function's value, unless it joined fewer ranks than the job has, as a library may that reads other variables.

    Raises:
        LauncherEnvironmentError: this rank trained with fewer others than were asked for.
    """
    joined: dict[str, int] = {}
    dist, accelerate = sys.modules.get("torch.distributed"), sys.modules.get("accelerate.state")
    if dist is not None and dist.is_available() and dist.is_initialized():
        joined["torch.distributed"] = dist.get_world_size()
    if accelerate is not None and accelerate.is_initialized():
        joined["Accelerate"] = accelerate.PartialState().num_processes
    for library, size in joined.items():
        if size != asked.ranks:
            raise asked.error(f"{library} had joined {size} rank{'s' if size > 1 else ''} here when the function returned")
    return value


def _log_to(path: Path) -> None:
    """Standard output and error of this process go to the rank's log, line by line."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = open_to_append(path)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
