"""Run a part in a process of its own: every outcome gives rows, and no process is left behind.

A part is forked from this process, which has torch loaded but never touches the device, since a CUDA context cannot be shared
with a child. So a part needs no second import of torch, and a crash ends only the part.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.gpu.rows import LeftOut, Notes, Row, read_rows

__all__ = ["Part", "Setting", "folder_of", "perform", "run_part"]

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl.h
ROWS = "rows"  # file with a part's rows, in its folder
_POLL_S = 0.02
_STACKS_BEFORE_END = 0.9  # at this share of the limit, a part writes its stacks to its log, as it may hang


@dataclass(frozen=True)
class Setting:
    """Where and how the parts run.

    Args:
        device: "cuda" or "cpu".
        small: the reduced form: every part completes in a second or two, with figures that mean nothing.
        folder: for a part's files.
        limit_s: seconds after which the part is killed; it may end before and report what it left out.
        fresh: start a new interpreter for each part, if a fork cannot use the device.
    """

    device: str
    small: bool
    folder: Path
    limit_s: float = 0.0
    fresh: bool = False


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Args:
        run: called in the part's own process; writes rows as it finds them.
        limit_s: seconds after which it is killed.
        needs_s: seconds of the budget; with less left it is not started.
    """

    name: str
    run: Callable[[Setting, Notes], None]
    limit_s: float
    needs_s: float = 10.0


def run_part(part: Part, setting: Setting, limit_s: float) -> list[Row]:
    """Run a part and return its rows. If it failed, the last row says how.

    Raises:
        KeyboardInterrupt: with the rows so far as its argument; the part has ended.
    """
    folder = setting.folder / folder_of(part.name)
    folder.mkdir(parents=True)
    rows_file, log = folder / ROWS, folder / "log"
    _prctl(_SET_CHILD_SUBREAPER, 1)  # processes that a part leaves behind become children of this one, which ends them
    others = set(_children())  # such as those of a shell that has become this process
    sys.stdout.flush()
    sys.stderr.flush()
    # Python's fork hooks swallow a KeyboardInterrupt that arrives while they run.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _be(part, replace(setting, folder=folder, limit_s=limit_s), log)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = _wait(pid, limit_s)
    except KeyboardInterrupt:
        _end(pid, others)
        raise KeyboardInterrupt(
            [*read_rows(rows_file), Row(part.name, part.name, status="left out", remark="interrupted")]
        ) from None
    _end(pid, others)
    rows = list(read_rows(rows_file))
    problem = _problem(code, limit_s, rows)
    return [*rows, Row(part.name, part.name, status="failed", remark=f"{problem}{_where(log)}")] if problem else rows


def folder_of(part: str) -> str:
    """The name of a part's folder, which holds its `log`."""
    return part.replace(" ", "-").replace(":", "").replace(",", "")


def _problem(code: int | None, limit_s: float, rows: list[Row]) -> str:
    if code is None:
        return f"killed after {limit_s:.0f} s, its limit"
    if code < 0:
        return f"died by {signal.Signals(-code).name}"
    if code and not any(row.status == "failed" for row in rows):
        return f"ended with exit code {code}"
    return "" if rows else "ended without a result"


def _where(log: Path) -> str:
    """The innermost of our own lines in the log's last stack, where a part hung or crashed."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    ours = [line.strip() for line in lines if "File " in line and ("/bench/" in line or "/echelon/" in line or "/tests/" in line)]
    if not ours:
        return ""
    # faulthandler writes the innermost frame first, a traceback last; both name file, line and function.
    fields = ours[0 if "most recent call first" in "\n".join(lines) else -1].replace('"', "").split(",")
    file, line = fields[0].removeprefix("File ").strip(), fields[1].strip()
    return f", in {'/'.join(Path(file).parts[-2:])}, {line.split(' in ')[0]}"


def _be(part: Part, setting: Setting, log: Path) -> None:
    """The part's process. Does not return."""
    try:
        os.setsid()  # only the parent gets Ctrl-C
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _into(log)
        if setting.fresh:
            arguments = [part.name, setting.device, str(int(setting.small)), str(setting.folder), str(setting.limit_s)]
            os.execv(sys.executable, [sys.executable, "-m", "bench.gpu.one", *arguments])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    perform(part, setting)


def perform(part: Part, setting: Setting) -> None:
    """Run a part in this process, then end the process. Rows and a traceback tell the outcome."""
    notes, code = Notes(part.name, setting.folder / ROWS), 1
    try:
        faulthandler.enable()
        faulthandler.dump_traceback_later(setting.limit_s * _STACKS_BEFORE_END)
        part.run(setting, notes)
        code = 0
    except LeftOut as reason:
        code = 0
        notes(part.name, remark=str(reason), status="left out")
    except ModuleNotFoundError as error:
        known = str(error.name).partition(".")[0] in ("bench", "echelon", "tests", "torch")
        traceback.print_exc()
        remark = str(error) if known else f"needs the package {error.name}, which is not installed"
        notes(part.name, remark=remark, status="failed" if known else "left out")
        code = int(known)
    except BaseException as error:
        traceback.print_exc()
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        notes(part.name, remark=f"{type(error).__name__}: {text}", status="failed")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _into(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    # The parent's stdin may be a terminal, which a part in another session cannot read.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _wait(pid: int, limit_s: float) -> int | None:
    """The process's exit code, or minus the signal that ended it; None if it still runs."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    return None


def _end(pid: int, others: set[int]) -> None:
    """End the processes that a part left: its process group, and descendants in other groups, which are now our children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        for child in {pid, *_children()} - others:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        children = set(_children()) - others
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(_POLL_S)


def _children() -> list[int]:
    """This process's children; empty if the kernel does not list them (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
