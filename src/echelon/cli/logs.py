"""`echelon logs`: the output of a rank, in the newest attempt, on whatever node it ran."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from echelon.contracts.errors import UsageError
from echelon.contracts.run_dir import RunDir
from echelon.launcher.protocol import FolderJob

__all__ = ["add_arguments", "execute"]

_ASK_EVERY_S = 2.0
# What would do more to a terminal than show text: everything but colours, tabs, line ends and carriage returns.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\x1b(?!\[[0-9;:]*m)|\xc2[\x80-\x9f]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's name or its folder")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="whose output (default: 0)")
    parser.add_argument("--job", action="store_true", help="the output of the batch script instead, and the launchers' own words")
    parser.add_argument("--follow", action="store_true", help="go on showing until the job has ended, through all of its starts")
    parser.add_argument("--runs", default="runs", metavar="FOLDER", help="the folder of runs (default: runs)")


def execute(arguments: argparse.Namespace) -> int:
    from echelon.launcher.jobs import find_run, job_of, tasks_of

    path = find_run(arguments.run, Path(arguments.runs))
    tasks = tasks_of(path)
    if tasks:
        raise UsageError(f"run {path.name} is a sweep: name one of its runs, such as {tasks[0]}.")
    job = job_of(RunDir(path))
    job.log(arguments.rank)  # a rank that does not exist is refused before anything is waited for

    def file() -> Path:
        return path / "job" / "output.log" if arguments.job else job.log(arguments.rank)

    if arguments.follow:
        return _follow(job, file)
    if not file().exists():
        raise UsageError(f"job {job.id} is {job.state().value} and has written no {file()} yet. --follow waits for it.")
    _copy(file(), 0)
    return 0


def _follow(job: FolderJob, file: Callable[[], Path]) -> int:
    """Show what comes until the job has ended; a new start begins a new file."""
    at, offset, ask_at = file(), 0, 0.0
    while True:
        ended = False
        if time.monotonic() > ask_at:
            ended = job.state().has_ended
            ask_at = time.monotonic() + _ASK_EVERY_S
        offset = _copy(at, offset)
        if (newest := file()) != at:
            _copy(at, offset)
            print(f"echelon: {newest}", file=sys.stderr)
            at, offset = newest, 0
        elif ended:
            return 0
        else:
            time.sleep(0.2)


def _copy(path: Path, offset: int) -> int:
    """Show a file from `offset` on; where it ended."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            while block := file.read(1 << 20):
                sys.stdout.buffer.write(_CONTROL.sub(b"?", block) if sys.stdout.isatty() else block)
                offset += len(block)
    except FileNotFoundError:
        return offset
    sys.stdout.flush()
    return offset
