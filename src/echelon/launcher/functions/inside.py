"""Runs in a rank that a launch command started: the user's script runs again, and executes the submitted call here.

The node's launcher names the call in one variable, which is never in the submitter's own environment. Earlier calls are jobs of
their own and are not made again. The named call runs here, writes its value or error by rank, and ends the process: the rest of
the script is for the submitter alone.
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
from echelon.contracts.expected_world import ExpectedWorld
from echelon.contracts.rank import RankInfo
from echelon.contracts.run_dir import write_json
from echelon.contracts.stopping import REQUEUE, SIGNALS, leave
from echelon.launcher.local.output import redirect
from echelon.launcher.local.server import die_with_parent
from echelon.launcher.local.start import Start
from echelon.launcher.local.worker import end, leave_value, run_recorded

__all__ = ["VARIABLE", "CallSite", "call_site"]

VARIABLE = "ECHELON_CALL"
T = TypeVar("T")


@dataclass(frozen=True)
class CallSite:
    """The call of a script for which this process was started.

    Args:
        folder: of the attempt, for values, records and logs.
        node: this node's index.
        number: how many jobs the script had submitted before this one.
        function: name of the called function.
        task: its index in an array.
        earlier: run folders of the jobs submitted before.
        key: the job's key, which seals the values.
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
    """The call site, if a launch command started this process and the call has not begun."""
    text = os.environ.get(VARIABLE)
    if not text or _begun:
        return None
    try:
        return CallSite(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise LaunchError(f"{VARIABLE}={text!r} cannot be read: {error}. The launcher sets it; unset it.") from error


def run_call(at: CallSite, name: str, function: Callable[[], Any]) -> NoReturn:
    """Call `function`, write its value and a record, and end this process.

    Raises:
        UsageError: the script reached another call than the one for which it was started.
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
    record.unlink(missing_ok=True)  # of an earlier try, if the command restarts its ranks itself
    die_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until `run_recorded` handles them
    signal.signal(signal.SIGUSR1, leave)  # ignored until now, since Slurm sent it to the command, too
    sys.stdout.flush()
    sys.stderr.flush()
    redirect(str(log))
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
    # Exit code 0 for a rank that saved to resume later: at 75, torchrun would kill the others, which are about to save.
    end(0 if code == REQUEUE else code)


def _in_one_world(value: T, asked: ExpectedWorld) -> T:
    """Return the function's value, unless it joined fewer ranks than the job has, as libraries that read other variables may do.

    Raises:
        LauncherEnvironmentError: this rank trained with fewer ranks than the job has.
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
