"""Run a part in a process of its own: whatever becomes of it is rows, and nothing of it is left.

A part is forked from this process, which has torch loaded but never touches the device: a context cannot be shared with a
child. So a part costs no second import of torch, and dies alone.
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
ROWS = "rows"  # of a part, in its folder
_POLL_S = 0.02
_STACKS_BEFORE_END = 0.9  # of the limit: when the stacks of a part that may hang are written to its log


@dataclass(frozen=True)
class Setting:
    """Where a day is run.

    Args:
        device: "cuda" or "cpu".
        small: the reduced form: every part to its end, in a second or two, with figures that mean nothing.
        folder: for a part's files.
        limit_s: after which the part is killed; it may end by itself before, and say what it left out.
        fresh: a new interpreter for each part, where a fork cannot use the device.
    """

    device: str
    small: bool
    folder: Path
    limit_s: float = 0.0
    fresh: bool = False


@dataclass(frozen=True)
class Part:
    """One part of the day.

    Args:
        run: called in the part's own process; writes rows as it finds them.
        limit_s: after which it is killed.
        needs_s: of the budget; with less left it is not begun.
    """

    name: str
    run: Callable[[Setting, Notes], None]
    limit_s: float
    needs_s: float = 10.0


def run_part(part: Part, setting: Setting, limit_s: float) -> list[Row]:
    """Its rows, of which the last says how it ended if it did not end well.

    Raises:
        KeyboardInterrupt: with the rows so far as its argument; the part has ended then, too.
    """
    folder = setting.folder / folder_of(part.name)
    folder.mkdir(parents=True)
    rows_file, log = folder / ROWS, folder / "log"
    _prctl(_SET_CHILD_SUBREAPER, 1)  # whatever a part leaves behind becomes this process's child, and is ended
    others = set(_children())  # as of a shell that has become this process
    sys.stdout.flush()
    sys.stderr.flush()
    # What Python calls at a fork swallows a KeyboardInterrupt that comes in it.
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
    """Its name, where its log is `log`."""
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
    """The innermost of our own lines in the last stack of the log: where a part hung or crashed."""
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
        os.setsid()  # Ctrl-C is the parent's business
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
    """Run a part in this process, which ends with it: rows and a traceback say how."""
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
    """Its exit code, or minus the signal that ended it; None if it runs still."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    return None


def _end(pid: int, others: set[int]) -> None:
    """End what a part has left: its process group, and descendants in groups of their own, which are our children now."""
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
    """Empty where the kernel does not tell (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
