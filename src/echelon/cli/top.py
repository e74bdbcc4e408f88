"""`echelon top`: show a run live, redrawn until `q`. It reads the run's folder, so the run may be on a cluster."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import shutil
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path

from echelon.cli.parser import runs_folder
from echelon.common.errors import CommandError, EchelonError, require
from echelon.common.terminal import one_line
from echelon.contracts.run_dir import RunDir, find_run, read_json

__all__ = ["add_arguments", "execute"]

_ASK_EVERY_S = 10.0  # a scheduler serves many users


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's name or its folder")
    parser.add_argument("--once", action="store_true", help="print the present state and exit; the default without a terminal")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="S", help="seconds between updates of the screen (default: 1)"
    )
    parser.add_argument(
        "--rank", type=int, metavar="R", help="rank whose output is shown (default: the rank that failed, else 0)"
    )
    parser.add_argument("--runs", type=runs_folder, default="runs", metavar="FOLDER", help="the folder of runs (default: runs)")


def execute(arguments: argparse.Namespace) -> int:
    from echelon.observe.top import Watch, lines

    if not 0.1 <= arguments.every < math.inf:
        raise CommandError(f"--every must be a number of seconds of at least 0.1, got {arguments.every:g}.")
    require(arguments.rank is None or arguments.rank >= 0, "--rank", "at least 0", arguments.rank, kind=CommandError)
    path = find_run(arguments.run, arguments.runs)
    watch, job = Watch(RunDir(path), arguments.rank), _Job(path)
    if arguments.once or not sys.stdout.isatty():
        wide = shutil.get_terminal_size((100, 40))
        print("\n".join(lines(watch.look(), width=wide.columns, height=10_000, job=job.state(), gone=_is_left(path))))
        return 0
    with _screen():
        while True:
            wide = shutil.get_terminal_size()
            now = watch.look()
            shown = lines(now, width=wide.columns, height=wide.lines - 1, job=job.state(), gone=_is_left(path))
            # Overwrite line by line and clear the rest: clearing the screen first would flicker.
            sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in [*shown, "q leaves"][: wide.lines]) + "\x1b[J")
            sys.stdout.flush()
            if _left(arguments.every):
                break
    return 0


def _is_left(path: Path) -> bool:
    """Whether the launcher of a run on this machine has ended, so that its lock is free. False for a run on another machine."""
    from echelon.diagnosis.folder import is_file

    run, lock = RunDir(path), path / ".lock"
    host = (read_json(run.run_json) or {}).get("host")
    return host == socket.gethostname() and is_file(lock) and os.access(lock, os.R_OK) and not run.is_held()


class _Job:
    """The scheduler's state of a submitted run, asked now and then."""

    def __init__(self, path: Path) -> None:
        self._path, self._said, self._ask_at = path, "", 0.0
        self._is_one = (path / "job" / "job.json").is_file()

    def state(self) -> str:
        if self._is_one and time.monotonic() >= self._ask_at:
            from echelon.launcher.cluster.jobs import job_of

            try:
                job = job_of(RunDir(self._path))
                state, why = job.look()
                self._said = one_line(f"job {job.id} {state.value} {why}".strip())
            except (EchelonError, OSError):  # the scheduler does not answer: the folder tells the rest
                self._said = ""
            self._ask_at = time.monotonic() + _ASK_EVERY_S
        return self._said


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Use the terminal's alternate screen, with keys read at once; restore both afterwards."""
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(keys) if keys is not None else None
    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        if keys is not None:
            tty.setcbreak(keys)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        if keys is not None and before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


def _left(seconds: float) -> bool:
    """Wait `seconds`; returns whether `q` was pressed."""
    until = time.monotonic() + seconds
    while (rest := until - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(rest)
            return False
        if select.select([sys.stdin], [], [], rest)[0]:
            key = os.read(sys.stdin.fileno(), 32)
            if not key or b"q" in key or b"\x03" in key:
                return True
    return False
