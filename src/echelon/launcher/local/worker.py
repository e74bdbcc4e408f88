"""A rank's first lines: it takes on its environment and output, runs the user's program, and records how that ended."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import functools
import gc
import io
import os
import random
import runpy
import signal
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from echelon.contracts import pulse
from echelon.contracts.errors import EchelonError, UsageError
from echelon.contracts.files import open_to_append
from echelon.contracts.redact import redacted, secret_values
from echelon.contracts.run_dir import FULL_DISK, write_json
from echelon.contracts.stopping import REQUEUE, SIGNALS, is_ours, leave
from echelon.launcher.calls import load_call, write_value

__all__ = [
    "SLOW_MODULES",
    "STACK_SIGNAL",
    "Start",
    "end",
    "forgive_output",
    "in_library",
    "leave_value",
    "output_to",
    "run",
    "run_program",
    "run_recorded",
    "user_frames",
]

# What ranks are likely to need, slow to import.
SLOW_MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "echelon.loop.auto",
)

# By which a rank is asked for its stack. Real-time signals are nobody's: a training script may want SIGUSR2 for itself.
STACK_SIGNAL = signal.SIGRTMAX - 3


_LONGEST = 1 << 18
_MOST_FRAMES = 100


@dataclass(frozen=True)
class Start:
    """What a rank is told: who it is, what to run, and where its output and its record go.

    With `pulse`, the last descriptor that it is given is that of its pulse, where its stack is written, too.
    """

    kind: str
    target: str
    args: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    sys_path: Sequence[str]
    log: str | None = None
    record: str | None = None
    result: str | None = None
    pulse: bool = False
    cores: Sequence[int] = ()
    code: str = ""
    sha256: str | None = None
    task: int = 0
    key: str = ""


def run(start: Start, fds: Sequence[int]) -> NoReturn:
    """Become the rank described by `start`. Never returns: the process ends with the program's exit code."""
    try:
        _take_on(start, fds)
    except Exception as error:  # a folder that has gone, a log that cannot be written: the launcher shows it
        _record(start, 1, describe(error))
        os._exit(1)
    pid = os.getpid()
    code = run_program(start)
    if os.getpid() == pid:
        end(code)
    os._exit(code)  # a child that the program forked and that came back here


def _take_on(start: Start, fds: Sequence[int]) -> None:
    os.environ.clear()
    os.environ.update(start.env)
    if start.pulse:
        *fds, shared = fds
        os.set_inheritable(shared, False)
        pulse.join(shared)
        faulthandler.register(STACK_SIGNAL, file=shared, all_threads=True)
    _redirect(start.log, fds)
    os.chdir(start.cwd)
    faulthandler.enable(file=sys.stderr)
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    _fresh_state()


def end(code: int) -> NoReturn:
    """End like an ordinary Python process: threads joined, atexit run, files flushed; but without tearing the interpreter down.

    A rank that failed does not wait for its threads: the others wait for it to end.
    """
    with contextlib.suppress(BaseException):
        if code in (0, REQUEUE):
            threading._shutdown()  # type: ignore[attr-defined]  # also ends idle executors, whose threads nobody else would
        atexit._run_exitfuncs()
    for thing in gc.get_objects():  # files that the program left open; Python flushes them when it collects them at its end
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(Exception):
                thing.flush()
    os._exit(code)


def _redirect(log: str | None, fds: Sequence[int]) -> None:
    """Point standard input at nothing, output and error at the two descriptors given, else at the log."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if fds:
        os.dup2(fds[0], 1)
        os.dup2(fds[-1], 2)
        for fd in fds:
            os.close(fd)
    elif log:
        fd = _open_log(log)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    # New objects: the server's may hold another encoding or buffer. Lines are flushed, so a kill loses none.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    forgive_output()


def forgive_output() -> None:
    """From here on, what cannot be written to standard output and error does not end this process."""
    sys.stdout = sys.__stdout__ = _line_writer(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _line_writer(2)  # type: ignore[misc]


class _Output(io.FileIO):
    """A descriptor to write to whose trouble is not the program's: a full disk costs lines of output, never the run.

    What could not be written is counted, and said where writing goes on.
    """

    _lost = 0

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        try:
            if self._lost:
                super().write(f"\n(echelon: {self._lost} bytes of output could not be written here)\n".encode())
                self._lost = 0
            written = super().write(data)
        except OSError:
            self._lost += size
            return size
        return size if written is None else written  # None: a pipe that is full and does not block


def _open_log(path: str | Path) -> int:
    try:
        return open_to_append(path)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        return os.open(os.devnull, os.O_WRONLY)


def output_to(log: Path) -> io.TextIOWrapper:
    """The log of this process's rank, to write to."""
    return _line_writer(_open_log(log), closes=True)


def _line_writer(fd: int, *, closes: bool = False) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Output(fd, "w", closefd=closes))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _fresh_state() -> None:
    """Undo what forking copies: random states equal on all ranks, and a thread count read before our environment."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdigit():
        sys.modules["torch"].set_num_threads(int(threads))


def run_program(start: Start) -> int:
    """Run the user's program in this process; returns its exit code and writes the rank's record."""
    sys.argv = [start.target, *start.args]
    return run_recorded(start, lambda: _program(start))


def _program(start: Start) -> None:
    if start.kind == "call":
        _call(start)
    elif start.kind == "module":
        sys.path[:] = [start.code or start.cwd, *start.sys_path]
        runpy.run_module(start.target, run_name="__main__", alter_sys=True)
    else:
        sys.path[:] = [str(Path(start.target).resolve().parent), *start.sys_path]
        _run_script(start.target)


def run_recorded(start: Start, program: Callable[[], None]) -> int:
    """Run `program` in this process; returns its exit code and writes the record of `start`."""
    failure: dict[str, Any] | None = None
    code, pid = 0, os.getpid()
    try:
        with _leaving_when_asked():
            program()
        gc.disable()
    except SystemExit as stop:
        gc.disable()
        code, failure = _system_exit(stop)
    except BaseException as error:
        # From here on nothing needs collecting, and collecting can hang: a process group that is freed joins its threads
        # while it holds the interpreter's lock, for which one of them may be waiting (gloo, torch 2.13).
        gc.disable()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        failure = describe(error)
        text = failure["traceback"]
        if start.log:  # the launcher shows the first failure itself; the log has them all, whole
            with (
                contextlib.suppress(OSError),
                open(open_to_append(start.log), "a", encoding="utf-8", errors="backslashreplace") as log,
            ):
                log.write(text)
        else:
            sys.stderr.write(text)
    if os.getpid() == pid:  # else a child that the program forked
        _record(start, code, failure)
    return code


@contextlib.contextmanager
def _leaving_when_asked() -> Iterator[None]:
    """SIGUSR1 ends the program with exit code 75 at any moment of it, SIGTERM from `init_from_env` on; and neither does
    anything once it has ended.

    Whoever starts a rank blocks `SIGNALS` before: what came while it had no handler yet is delivered here instead of lost.
    """
    if signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN:
        signal.signal(signal.SIGUSR1, leave)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        yield
    finally:  # what comes in this very line is raised by it, and caught like the rest
        for number in SIGNALS:
            if number == signal.SIGUSR1 or is_ours(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)


def _run_script(script: str) -> None:
    """As `python script.py` does. Unlike with `runpy`, `__main__` stays: threads and atexit functions still need it."""
    path = os.path.abspath(script)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=path, __builtins__=builtins, __cached__=None, __loader__=SourceFileLoader("__main__", path), __annotations__={}
    )
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _record(start: Start, code: int, failure: dict[str, Any] | None) -> None:
    """Leave how this rank ended for the launcher: whole or not at all."""
    if start.record:
        loaded = [name for name in SLOW_MODULES if name in sys.modules]
        record = {"exit_code": code, "time_ns": time.monotonic_ns(), "loaded": loaded, **(failure or {})}
        with contextlib.suppress(OSError):
            write_json(Path(start.record), record)


def _system_exit(stop: SystemExit) -> tuple[int, dict[str, Any] | None]:
    if stop.code is None:
        return 0, None
    if isinstance(stop.code, int):
        code, message = stop.code & 0xFF, ""
    else:
        code, message = 1, redacted(_cut(str(stop.code)), secret_values(sys.argv, os.environ))
        sys.stderr.write(message + "\n")
    if code == 0:
        return 0, None
    # `except RuntimeError: sys.exit(1)`: what was being handled tells whether this rank or its peer failed first.
    chain = describe(stop) if stop.__context__ is not None else {"time_ns": time.monotonic_ns()}
    return code, {**chain, "kind": "SystemExit", "message": message or f"exit code {code}"}


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain values, its frames in the user's own files apart from those of libraries."""
    trace = _skip_launcher(error.__traceback__)
    known = secret_values(sys.argv, os.environ)
    text = redacted(_cut("".join(traceback.format_exception(type(error), error, trace))), known)
    return {
        "time_ns": time.monotonic_ns(),
        "kind": type(error).__name__,
        "message": redacted(_cut(_text_of(error)), known),
        "ours": isinstance(error, EchelonError),
        "user_frames": [redacted(frame, known) for frame in user_frames(trace)[-_MOST_FRAMES:]],
        "traceback": text,
    }


def _cut(text: str) -> str:
    """The beginning and the end: an exception may hold a whole tensor, and whoever reads a record reads no more than a few MB."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}\n[...]\n{text[-_LONGEST // 2 :]}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as bad:
        return f"(its text cannot be shown: {type(bad).__name__})"


def _skip_launcher(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames that lead into the user's program: ours and runpy's say nothing about it."""
    entry, ours = trace, str(Path(__file__).parents[1]) + os.sep
    while entry is not None:
        file = entry.tb_frame.f_code.co_filename
        if not file.startswith(ours) and file not in (runpy.__file__, "<frozen runpy>"):
            return entry
        entry = entry.tb_next
    return trace


def user_frames(trace: TracebackType | None) -> list[str]:
    """The frames in files that belong to no library, outermost first, as a traceback prints them."""
    frames = []
    for frame in traceback.extract_tb(trace):
        if frame.filename.startswith("<") or in_library(frame.filename):
            continue
        frames.append(f'File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line or ""}'.rstrip())
    return frames


def in_library(file: str) -> bool:
    """Whether a file belongs to Python, to what is installed in it, or to echelon."""
    # Not the prefix, which is among these paths too: a project may lie below it, and often does in a container.
    libraries = {os.path.realpath(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    libraries |= {str(Path(__file__).resolve().parents[2]), os.path.dirname(os.path.realpath(os.__file__))}
    return any(os.path.realpath(file).startswith(lib + os.sep) for lib in libraries)


_groups: list[Any] = []


def _keep_groups() -> None:
    """Have process groups that the function ends live on until this process does.

    One that is freed joins its threads while it holds the interpreter's lock, for which one of them may be waiting (gloo, torch
    2.13): a function that returns, and with it its last reference to a wrapped model, would hang now and then.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or hasattr(dist.destroy_process_group, "__wrapped__"):
        return
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def end(group: Any = None) -> None:
        _groups.append(group if group is not None else dist.group.WORLD)
        destroy(group)

    dist.destroy_process_group = end  # type: ignore[attr-defined]


def _call(start: Start) -> None:
    """Call the function that was sent here, and leave its value for whoever sent it."""
    sys.path[:] = list(start.sys_path)
    assert start.result is not None and start.sha256 is not None
    _keep_groups()  # before modules are imported, which may take the function by its name
    call = load_call(start.target, start.sha256)
    args, kwargs = call.arguments[start.task]
    name = getattr(call.function, "__name__", "the function")
    leave_value(lambda: call.function(*args, **kwargs), start.result, name, start.key)


def leave_value(function: Callable[[], Any], result: str, name: str, key: str) -> None:
    """Call `function` and write its value, or beside it the exception that it raised, sealed with the job's key.

    Raises:
        UsageError: the value cannot be pickled.
    """
    _keep_groups()
    try:
        value = function()
    except Exception as error:
        with contextlib.suppress(Exception):  # not every exception can be pickled; its text arrives in any case
            write_value(error, f"{result}.error", key)
        raise
    try:
        write_value(value, result, key)
    except Exception as error:
        raise UsageError(
            f"the value that {name} returned, of type {type(value).__name__}, "
            f"cannot be sent to the caller ({error}). Return plain values, arrays or tensors."
        ) from error
