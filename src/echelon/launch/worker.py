"""A rank's first lines: it takes on its environment and output, runs the user's program, and records how that ended."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import random
import runpy
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from echelon.contracts.errors import EchelonError

__all__ = ["Start", "run", "run_program", "user_frames"]

# Registered only for ranks with a time limit of their own: a training script may want the signal for itself.
STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Start:
    """What a rank is told: who it is, what to run, and where its output and its record go."""

    kind: str
    target: str
    args: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    sys_path: Sequence[str]
    log: str | None = None
    record: str | None = None
    result: str | None = None
    stacks: str | None = None
    preparation: Mapping[str, Any] = field(default_factory=dict)


def run(start: Start, fds: Sequence[int]) -> NoReturn:
    """Become the rank described by `start`. Never returns: the process ends with the program's exit code."""
    os.environ.clear()
    os.environ.update(start.env)
    os.chdir(start.cwd)
    _redirect(start.log, fds)
    stacks = None
    if start.stacks:
        stacks = open(start.stacks, "w")  # noqa: SIM115 - held open for the life of the process
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    faulthandler.enable(file=sys.stderr)
    _fresh_state()
    code = run_program(start)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End like an ordinary Python process: threads joined, atexit run; but without tearing the shared interpreter down."""
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon and code == 0:
                thread.join()
        atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
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
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    # New objects: the server's may hold another encoding or buffer. Lines are flushed, so a kill loses none.
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


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
    failure: dict[str, Any] | None = None
    code = 0
    try:
        if start.kind == "call":
            _call(start)
        elif start.kind == "module":
            sys.path[:] = ["", *start.sys_path]
            runpy.run_module(start.target, run_name="__main__", alter_sys=True)
        else:
            # As `python script.py` does: the script's own folder comes first.
            sys.path[:] = [str(Path(start.target).resolve().parent), *start.sys_path]
            runpy.run_path(start.target, run_name="__main__")
    except SystemExit as stop:
        code, failure = _system_exit(stop)
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        failure = describe(error)
        text = failure["traceback"]
        if start.log:  # the launcher shows the first failure itself; the log has them all, whole
            with contextlib.suppress(OSError), open(start.log, "a", encoding="utf-8") as log:
                log.write(text)
        else:
            sys.stderr.write(text)
    if start.record:
        record = {
            "exit_code": code,
            "time_ns": time.monotonic_ns() if failure is None else failure.pop("time_ns"),
            **(failure or {}),
        }
        temporary = f"{start.record}.{os.getpid()}"
        with contextlib.suppress(OSError):
            Path(temporary).write_text(json.dumps(record))
            os.replace(temporary, start.record)
    return code


def _system_exit(stop: SystemExit) -> tuple[int, dict[str, Any] | None]:
    if stop.code is None:
        return 0, None
    if isinstance(stop.code, int):
        code, message = stop.code & 0xFF, ""
    else:
        code, message = 1, str(stop.code)
        sys.stderr.write(message + "\n")
    if code == 0:
        return 0, None
    return code, {"time_ns": time.monotonic_ns(), "kind": "SystemExit", "message": message or f"exit code {code}"}


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain values, its frames in the user's own files apart from those of libraries."""
    trace = _skip_launcher(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trace))
    return {
        "time_ns": time.monotonic_ns(),
        "kind": type(error).__name__,
        "message": str(error),
        "ours": isinstance(error, EchelonError),
        "user_frames": user_frames(trace),
        "traceback": text,
    }


def _skip_launcher(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames that lead into the user's program: ours and runpy's say nothing about it."""
    entry = trace
    while entry is not None:
        name = entry.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            return entry
        entry = entry.tb_next
    return trace


def user_frames(trace: TracebackType | None) -> list[str]:
    """The frames in files that belong to no library, outermost first, as a traceback prints them."""
    libraries = {os.path.realpath(p) for p in sysconfig.get_paths().values()}
    libraries |= {str(Path(__file__).resolve().parents[1]), os.path.dirname(os.__file__)}
    # A project's own .venv lies inside the project; the project's files lie outside site-packages, though under its parent.
    libraries = {p for p in libraries if p != os.path.realpath(sys.prefix)}
    frames = []
    for frame in traceback.extract_tb(trace):
        path = os.path.realpath(frame.filename)
        if frame.filename.startswith("<") or any(path.startswith(lib + os.sep) for lib in libraries):
            continue
        frames.append(f'File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line or ""}'.rstrip())
    return frames


def _call(start: Start) -> None:
    """Call the pickled function and leave its value for the launcher."""
    from multiprocessing import spawn

    sys.path[:] = list(start.sys_path)
    if start.preparation:
        spawn.prepare(dict(start.preparation))  # makes the caller's `__main__` importable, as multiprocessing does
    assert start.result is not None
    with open(start.target, "rb") as file:
        function, args, kwargs = pickle.load(file)
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        with contextlib.suppress(Exception):  # not every exception can be pickled; its text arrives in any case
            _dump(error, f"{start.result}.error")
        raise
    _dump(value, start.result)


def _dump(value: Any, path: str) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "wb") as file:
        pickle.dump(value, file)
    os.replace(temporary, path)
