"""`echelon logs`: show a rank's output of the newest attempt, on whichever node it ran."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from echelon.cli.parser import runs_folder
from echelon.common.errors import CommandError
from echelon.common.files import open_file
from echelon.common.terminal import OutputFilter, printable
from echelon.contracts.run_dir import RunDir, find_run
from echelon.launcher.protocol import FolderJob

__all__ = ["add_arguments", "execute"]

_ASK_EVERY_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's name or its folder")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank whose output is shown (default: 0)")
    parser.add_argument("--job", action="store_true", help="show the output of the batch script and the launchers instead")
    parser.add_argument("--follow", action="store_true", help="keep showing output until the job has ended, across its restarts")
    parser.add_argument("--runs", type=runs_folder, default="runs", metavar="FOLDER", help="the folder of runs (default: runs)")


def execute(arguments: argparse.Namespace) -> int:
    from echelon.launcher.cluster.jobs import job_of, tasks_of

    path = find_run(arguments.run, arguments.runs)
    tasks = tasks_of(path)
    if tasks:
        raise CommandError(f"run {path.name} is a sweep. Give one of its runs, such as {tasks[0]}.")
    if not os.path.lexists(path / "job"):
        return _of_this_machine(RunDir(path), arguments)
    job = job_of(RunDir(path))
    job.log(arguments.rank)  # refuses an unknown rank before waiting

    def file() -> Path:
        return path / "job" / "output.log" if arguments.job else job.log(arguments.rank)

    if arguments.follow:
        return _follow(job, file)
    if not os.path.lexists(file()):
        raise CommandError(f"job {job.id} is {job.state().value} and has written no {file()} yet. --follow waits for it.")
    screen = _Screen()
    screen.copy(file(), 0)
    screen.end()
    return 0


def _of_this_machine(run: RunDir, arguments: argparse.Namespace) -> int:
    """Show a rank's log of a run that was not submitted: its output also went to the terminal."""
    attempts = run.attempts()
    path = (attempts[-1] if attempts else run.attempt_path) / f"rank{arguments.rank}.log"
    if arguments.job or arguments.follow:
        option = "--job" if arguments.job else "--follow"
        raise CommandError(
            f"{option} is for submitted runs, and {run.path} was not submitted. Use `tail -F {path}` to follow rank "
            f"{arguments.rank}."
        )
    if not os.path.lexists(path):
        raise CommandError(f"rank {arguments.rank} of {run.path} has written no {path}.")
    screen = _Screen()
    screen.copy(path, 0)
    screen.end()
    return 0


def _follow(job: FolderJob, file: Callable[[], Path]) -> int:
    """Show output as it comes until the job has ended. A restart begins a new file."""
    at, offset, ask_at, screen = file(), 0, 0.0, _Screen()
    while True:
        ended = False
        if time.monotonic() > ask_at:
            ended = job.state().has_ended
            ask_at = time.monotonic() + _ASK_EVERY_S
        offset = screen.copy(at, offset)
        if (newest := file()) != at:
            screen.copy(at, offset)
            screen.end()
            print(printable(f"echelon: {newest}"), file=sys.stderr)
            at, offset = newest, 0
        elif ended:
            screen.end()
            return 0
        else:
            time.sleep(0.2)


class _Screen:
    """Standard output: unchanged into a file or a pipe; on a terminal, without escape sequences that do more than show text."""

    def __init__(self) -> None:
        self._filter = OutputFilter() if sys.stdout.isatty() else None

    def copy(self, path: Path, offset: int) -> int:
        """Show a file from `offset` on; returns the offset where it ended.

        Raises:
            UsageError: not a readable file.
        """
        try:
            with open(open_file(path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(offset)
                while offset < size and (block := file.read(min(1 << 20, size - offset))):
                    self._show(block)
                    offset += len(block)
        except FileNotFoundError:
            return offset
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CommandError(
                f"{path} cannot be shown: it is a link, not a file, or another user's ({error.strerror})."
            ) from error
        return offset

    def _show(self, block: bytes) -> None:
        sys.stdout.buffer.write(block if self._filter is None else self._filter.feed(block).encode())
        sys.stdout.flush()

    def end(self) -> None:
        """Called after each file."""
        if self._filter is not None:
            sys.stdout.buffer.write(self._filter.end().encode())
            sys.stdout.flush()
            self._filter = OutputFilter()
