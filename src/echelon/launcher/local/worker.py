"""A rank's first lines: set up its environment and output, run the user's program, and record how it ended."""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import gc
import logging
import os
import random
import resource
import runpy
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from echelon.common.errors import LaunchError
from echelon.common.files import open_to_append
from echelon.common.redact import redacted, secret_values
from echelon.contracts import pulse
from echelon.contracts.run_dir import write_json
from echelon.contracts.stopping import REQUEUE, SIGNALS, heard, is_ours, leave
from echelon.launcher.calls import load_call, write_value
from echelon.launcher.local import responder
from echelon.launcher.local.alone import has_trained_alone
from echelon.launcher.local.flight_recorder import flight_record, last_calls, write_flight
from echelon.launcher.local.output import redirect
from echelon.launcher.local.raised import cut, describe
from echelon.launcher.local.start import Handed, Start
from echelon.launcher.workarounds import keep_process_groups, run_exit_functions, write_open_files

__all__ = [
    "SLOW_MODULES",
    "STACK_SIGNAL",
    "end",
    "leave_value",
    "may_be_preloaded",
    "run",
    "run_program",
    "run_recorded",
    "set_threads",
]

logger = logging.getLogger(__name__)

# Modules that ranks probably need and that are slow to import.
SLOW_MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "echelon.loop.auto.auto",
    "echelon.loop.run",
    "echelon.loop.checkpointing.saver",
)


def may_be_preloaded(name: str) -> bool:
    """Whether the server may import a module for the ranks of later calls.

    True for echelon's modules and torch's slow ones: importing them starts no thread, and reads no variable of a rank.
    """
    return name in SLOW_MODULES or name.startswith("echelon.")


# Asks a rank for its stack. A real-time signal, since a training script may use SIGUSR2 itself.
STACK_SIGNAL = signal.SIGRTMAX - 3


def run(start: Start, handed: Handed) -> NoReturn:
    """Become the rank described by `start`. Never returns: the process ends with the program's exit code."""
    try:
        _take_on(start, handed)
    except Exception as error:  # a missing folder, a log that cannot be written: the launcher shows it
        _record(start, 1, describe(error))
        os._exit(1)
    pid = os.getpid()
    code = run_program(start, handed.log)
    if os.getpid() == pid:
        end(code)
    os._exit(code)  # a child that the program forked returned to here


def _take_on(start: Start, handed: Handed) -> None:
    os.environ.clear()
    os.environ.update(start.env)
    rank = start.env.get("RANK", "")
    with contextlib.suppress(OSError):  # shown by `ps` and `top`, which cut it after 15 characters
        Path("/proc/self/comm").write_text(f"{'echelon:' if len(rank) < 4 else ''}rank{rank}")
    if handed.pulse is not None:
        os.set_inheritable(handed.pulse, False)
        pulse.join(handed.pulse)
        faulthandler.register(STACK_SIGNAL, file=handed.pulse, all_threads=True)
    if handed.asked is not None:
        os.set_inheritable(handed.asked, False)
        responder.begin(handed.asked, start.flight)
    if handed.log is not None:
        os.set_inheritable(handed.log, False)
    redirect(start.log, handed.output, handed.error)
    os.chdir(start.cwd)
    faulthandler.enable(file=sys.stderr)
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    _fresh_state()


def end(code: int) -> NoReturn:
    """End like an ordinary Python process: join threads, run atexit, flush files; but do not finalize the interpreter.

    A rank that failed does not wait for its threads, since the other ranks wait for it to end.
    """
    try:
        run_exit_functions(join_threads=code in (0, REQUEUE))
    except BaseException:  # Python has shown the exit function's error, and would end, too
        logger.debug("the end of this rank raised", exc_info=True)
    write_open_files()
    os._exit(code)


def _fresh_state() -> None:
    """Undo effects of forking: RNG states equal on all ranks, and a thread count read before this rank's environment was set."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():
        set_threads(int(threads))
    if "torch" in sys.modules and os.environ.get(
        "TORCH_DISTRIBUTED_DEBUG"
    ):  # torch read it when it was imported, before it was set
        sys.modules["torch"].distributed.set_debug_level_from_env()


def set_threads(count: int) -> None:
    """Set the number of threads of this process. Without torch loaded, OpenMP reads the variable later."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


def run_program(start: Start, log: int | None = None) -> int:
    """Run the user's program in this process, and write the rank's record. Returns the exit code."""
    sys.argv = [start.target, *start.args]
    keep_process_groups()  # before modules are imported, which may import the function by name
    return run_recorded(start, partial({"script": _run_script, "module": _run_module, "call": _call}[start.kind], start), log)


def run_recorded(start: Start, program: Callable[[], None], log: int | None = None) -> int:
    """Run `program` in this process, and write the record of `start`. Returns the exit code.

    The traceback goes into the rank's log; through `log` if the launcher writes that file, to keep the order of lines.
    """
    failure: dict[str, Any] | None = None
    code, pid, finished = 0, os.getpid(), False
    try:
        with _leaving_when_asked(), _telling_of_data_workers():
            program()
        gc.disable()
        finished = _has_no_group()
    except SystemExit as stop:
        gc.disable()
        code, failure = _system_exit(stop)
    except BaseException as error:
        # From here on nothing needs collecting, and collecting can hang: freeing a process group joins its threads while it holds
        # the GIL, for which one of them may be waiting (gloo, torch 2.13).
        gc.disable()
        _hear_no_more_of_data_workers()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        sys.last_type = type(error)  # as in plain Python, for functions that run at exit
        _leave_room_for_files()
        failure = describe(error)
        text = failure["traceback"]
        if start.log:  # the launcher shows only the first failure; the logs have them all, whole
            with (
                contextlib.suppress(OSError),
                open(log or open_to_append(start.log), "a", encoding="utf-8", errors="backslashreplace") as file,
            ):
                file.write(text)
        else:
            sys.stderr.write(text)
    if os.getpid() == pid:  # otherwise this is a child that the program forked
        # Keep a flight record that the launcher asked for before it ended this rank: it shows where the rank was; a new one would
        # not.
        keeps = failure is None or start.flight is None or os.path.lexists(start.flight)
        flight = flight_record() if keeps else write_flight(Path(str(start.flight)))
        _record(start, code, failure, last_calls(flight), finished=finished)
    return code


# The sockets of a dying process close shortly before its parent is notified.
_UNTOLD_S = 0.5


@contextlib.contextmanager
def _telling_of_data_workers() -> Iterator[None]:
    """After a broken connection, wait for torch to report a dead data worker: its handler of SIGCHLD raises in here."""
    try:
        yield
    except (ConnectionError, EOFError):
        if _hears_of_data_workers():
            time.sleep(_UNTOLD_S)
        raise


def _hears_of_data_workers() -> bool:
    return getattr(signal.getsignal(signal.SIGCHLD), "__module__", "").startswith("torch.utils.data")


def _hear_no_more_of_data_workers() -> None:
    """Remove torch's SIGCHLD handler: it raises anywhere, and would interrupt the report of this rank's failure."""
    if _hears_of_data_workers():
        with contextlib.suppress(ValueError):  # not the main thread: handlers run in the main thread only
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _leave_room_for_files() -> None:
    """Free a file descriptor, so that a rank that reached its limit of open files can still write its record."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        with contextlib.suppress(OSError):  # the program may have closed it
            os.close(0)  # standard input is no longer read


def _has_no_group() -> bool:
    """Whether the program destroyed its process group, as programs do at their own end."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and not distributed.is_initialized()


@contextlib.contextmanager
def _leaving_when_asked() -> Iterator[None]:
    """Let SIGUSR1 end the program with exit code 75 at any moment, and SIGTERM and SIGHUP from `init_from_env` on.

    After the program's end all are ignored. The parent blocks `SIGNALS` before it starts a rank: a signal that came before there
    was a handler is delivered here instead of lost.
    """
    if signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN:
        signal.signal(signal.SIGUSR1, leave)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        yield
    finally:  # a signal at this very line raises here, and is caught like the others
        for number in SIGNALS:
            if number == signal.SIGUSR1 or is_ours(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)


def _run_module(start: Start) -> None:
    sys.path[:] = [start.code or start.cwd, *start.sys_path]
    runpy.run_module(start.target, run_name="__main__", alter_sys=True)


def _run_script(start: Start) -> None:
    """Run as `python script.py` does. Unlike with `runpy`, `__main__` stays: threads and atexit functions still need it."""
    path = os.path.abspath(start.target)
    sys.path[:] = [str(Path(start.target).resolve().parent), *start.sys_path]
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=path, __builtins__=builtins, __cached__=None, __loader__=SourceFileLoader("__main__", path), __annotations__={}
    )
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _record(
    start: Start,
    code: int,
    failure: dict[str, Any] | None,
    collectives: Mapping[str, str] = MappingProxyType({}),
    *,
    finished: bool = False,
) -> None:
    """Write how this rank ended, for the launcher; whole or not at all.

    Args:
        collectives: the last call of each group.
        finished: the program reached its end, and had destroyed its process group.
    """
    if start.record:
        ending = {"exit_code": code, "time_ns": time.monotonic_ns(), "collectives": dict(collectives)}
        ending |= {"loaded": list(filter(may_be_preloaded, list(sys.modules)))} if start.kind == "call" else {}
        if start.kind != "call" and has_trained_alone(Path(start.target), failed=failure is not None):
            ending["alone"] = True
        ending |= ({"finished": True} if finished else {}) | ({"heard": asked} if (asked := heard()) else {})
        record = {**ending, **(failure or {})}
        with contextlib.suppress(OSError):
            if failure is not None:  # record a failure even if its folder was removed meanwhile
                Path(start.record).parent.mkdir(parents=True, exist_ok=True)
            write_json(Path(start.record), record)


def _system_exit(stop: SystemExit) -> tuple[int, dict[str, Any] | None]:
    if stop.code is None:
        return 0, None
    if isinstance(stop.code, int):
        code, message = stop.code & 0xFF, ""
    else:
        code, message = 1, redacted(cut(str(stop.code)), secret_values(sys.argv, os.environ))
        sys.stderr.write(message + "\n")
    if code == 0:
        return 0, None
    # `except RuntimeError: sys.exit(1)`: the handled error shows whether this rank or its peer failed first.
    return code, {**describe(stop), "kind": "SystemExit", "message": message or f"exit code {code}"}


def _call(start: Start) -> None:
    """Call the function that was sent here, and write its value for the sender."""
    sys.path[:] = list(start.sys_path)
    assert start.result is not None and start.sha256 is not None
    call = load_call(start.target, start.sha256)
    args, kwargs = call.arguments[start.task]
    name = getattr(call.function, "__name__", "the function")
    leave_value(lambda: call.function(*args, **kwargs), start.result, name, start.key)


def leave_value(function: Callable[[], Any], result: str, name: str, key: str) -> None:
    """Call `function` and write its value, or beside it the exception that it raised; both sealed with the job's key.

    Raises:
        UsageError: the value cannot be pickled.
    """
    keep_process_groups()
    try:
        value = function()
    except Exception as error:
        try:
            write_value(error, f"{result}.error", key)
        except Exception:  # not every exception can be pickled; its text reaches the caller anyway
            logger.debug("the exception cannot be sent to the caller", exc_info=True)
        raise
    try:
        write_value(value, result, key)
    except Exception as error:
        raise LaunchError(
            f"the value that {name} returned, of type {type(value).__name__}, "
            f"cannot be sent to the caller ({error}). Return plain values, arrays or tensors."
        ) from error
