"""A rank's first lines: it takes on its environment and output, runs the user's program, and records how that ended."""

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

# What ranks are likely to need, slow to import.
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
    """Whether the server may import a module for the ranks of later calls: ours and the slow ones of torch, which start no thread
    as they are imported, and read no variable of a rank's.
    """
    return name in SLOW_MODULES or name.startswith("echelon.")


# By which a rank is asked for its stack. Real-time signals are nobody's: a training script may want SIGUSR2 for itself.
STACK_SIGNAL = signal.SIGRTMAX - 3


def run(start: Start, handed: Handed) -> NoReturn:
    """Become the rank described by `start`. Never returns: the process ends with the program's exit code."""
    try:
        _take_on(start, handed)
    except Exception as error:  # a folder that has gone, a log that cannot be written: the launcher shows it
        _record(start, 1, describe(error))
        os._exit(1)
    pid = os.getpid()
    code = run_program(start, handed.log)
    if os.getpid() == pid:
        end(code)
    os._exit(code)  # a child that the program forked and that came back here


def _take_on(start: Start, handed: Handed) -> None:
    os.environ.clear()
    os.environ.update(start.env)
    rank = start.env.get("RANK", "")
    with contextlib.suppress(OSError):  # by which `ps` and `top` show it, in 15 letters: of more the end would be missing
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
    """End like an ordinary Python process: threads joined, atexit run, files flushed; but without tearing the interpreter down.

    A rank that failed does not wait for its threads: the others wait for it to end.
    """
    try:
        run_exit_functions(join_threads=code in (0, REQUEUE))
    except BaseException:  # Python shows what an exit function raises, and ends all the same
        logger.debug("the end of this rank raised", exc_info=True)
    write_open_files()
    os._exit(code)


def _fresh_state() -> None:
    """Undo what forking copies: random states equal on all ranks, and a thread count read before our environment."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():
        set_threads(int(threads))
    if "torch" in sys.modules and os.environ.get("TORCH_DISTRIBUTED_DEBUG"):  # read as torch was imported, before it was set
        sys.modules["torch"].distributed.set_debug_level_from_env()


def set_threads(count: int) -> None:
    """For this process, whether it has torch loaded or not: OpenMP reads the variable when it is."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


def run_program(start: Start, log: int | None = None) -> int:
    """Run the user's program in this process; returns its exit code and writes the rank's record."""
    sys.argv = [start.target, *start.args]
    keep_process_groups()  # before modules are imported, which may take the function by its name
    return run_recorded(start, partial({"script": _run_script, "module": _run_module, "call": _call}[start.kind], start), log)


def run_recorded(start: Start, program: Callable[[], None], log: int | None = None) -> int:
    """Run `program` in this process; returns its exit code and writes the record of `start`.

    What it raised goes into the rank's log; through `log` where the launcher writes that, which keeps what came first, first.
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
        # From here on nothing needs collecting, and collecting can hang: a process group that is freed joins its threads
        # while it holds the interpreter's lock, for which one of them may be waiting (gloo, torch 2.13).
        gc.disable()
        _hear_no_more_of_data_workers()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        sys.last_type = type(error)  # as in plain Python, for functions that run at exit
        _leave_room_for_files()
        failure = describe(error)
        text = failure["traceback"]
        if start.log:  # the launcher shows the first failure itself; the log has them all, whole
            with (
                contextlib.suppress(OSError),
                open(log or open_to_append(start.log), "a", encoding="utf-8", errors="backslashreplace") as file,
            ):
                file.write(text)
        else:
            sys.stderr.write(text)
    if os.getpid() == pid:  # else a child that the program forked
        # What the launcher has asked for before it ended this rank says where the rank was; what came since, only how it ended.
        keeps = failure is None or start.flight is None or os.path.lexists(start.flight)
        flight = flight_record() if keeps else write_flight(Path(str(start.flight)))
        _record(start, code, failure, last_calls(flight), finished=finished)
    return code


# The sockets of a process that dies are closed a moment before its parent is told.
_UNTOLD_S = 0.5


@contextlib.contextmanager
def _telling_of_data_workers() -> Iterator[None]:
    """Where a connection broke, wait for torch to say that it was a data worker's: its handler of SIGCHLD raises in here."""
    try:
        yield
    except (ConnectionError, EOFError):
        if _hears_of_data_workers():
            time.sleep(_UNTOLD_S)
        raise


def _hears_of_data_workers() -> bool:
    return getattr(signal.getsignal(signal.SIGCHLD), "__module__", "").startswith("torch.utils.data")


def _hear_no_more_of_data_workers() -> None:
    """What comes from here on must not break off what this rank has to say; torch's handler raises wherever the program is."""
    if _hears_of_data_workers():
        with contextlib.suppress(ValueError):  # not in the main thread, where no handler runs
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _leave_room_for_files() -> None:
    """A rank that has opened as many files as it may is still to say so, which takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        with contextlib.suppress(OSError):  # the program may have closed it
            os.close(0)  # nobody reads any more


def _has_no_group() -> bool:
    """Whether the program destroyed its process group, as one does that has come to its own end."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and not distributed.is_initialized()


@contextlib.contextmanager
def _leaving_when_asked() -> Iterator[None]:
    """SIGUSR1 ends the program with exit code 75 at any moment of it, SIGTERM and SIGHUP from `init_from_env` on; and none does
    anything once it has ended.

    The parent blocks `SIGNALS` before it starts a rank: what came while it had no handler yet is delivered here instead of lost.
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


def _run_module(start: Start) -> None:
    sys.path[:] = [start.code or start.cwd, *start.sys_path]
    runpy.run_module(start.target, run_name="__main__", alter_sys=True)


def _run_script(start: Start) -> None:
    """As `python script.py` does. Unlike with `runpy`, `__main__` stays: threads and atexit functions still need it."""
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
    """Leave how this rank ended for the launcher: whole or not at all.

    Args:
        collectives: the last that it called, by group.
        finished: it came to its program's end, and had destroyed its process group.
    """
    if start.record:
        ending = {"exit_code": code, "time_ns": time.monotonic_ns(), "collectives": dict(collectives)}
        ending |= {"loaded": list(filter(may_be_preloaded, list(sys.modules)))} if start.kind == "call" else {}
        if start.kind != "call" and has_trained_alone(Path(start.target), failed=failure is not None):
            ending["alone"] = True
        ending |= ({"finished": True} if finished else {}) | ({"heard": asked} if (asked := heard()) else {})
        record = {**ending, **(failure or {})}
        with contextlib.suppress(OSError):
            if failure is not None:  # it is told all the same, if its folder was removed meanwhile
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
    # `except RuntimeError: sys.exit(1)`: what was being handled tells whether this rank or its peer failed first.
    return code, {**describe(stop), "kind": "SystemExit", "message": message or f"exit code {code}"}


def _call(start: Start) -> None:
    """Call the function that was sent here, and leave its value for the sender."""
    sys.path[:] = list(start.sys_path)
    assert start.result is not None and start.sha256 is not None
    call = load_call(start.target, start.sha256)
    args, kwargs = call.arguments[start.task]
    name = getattr(call.function, "__name__", "the function")
    leave_value(lambda: call.function(*args, **kwargs), start.result, name, start.key)


def leave_value(function: Callable[[], Any], result: str, name: str, key: str) -> None:
    """Call `function` and write its value, or beside it the exception that it raised, sealed with the job's key.

    Raises:
        UsageError: the value cannot be pickled.
    """
    keep_process_groups()
    try:
        value = function()
    except Exception as error:
        try:
            write_value(error, f"{result}.error", key)
        except Exception:  # not every exception can be pickled; its text arrives in any case
            logger.debug("the exception cannot be sent to the caller", exc_info=True)
        raise
    try:
        write_value(value, result, key)
    except Exception as error:
        raise LaunchError(
            f"the value that {name} returned, of type {type(value).__name__}, "
            f"cannot be sent to the caller ({error}). Return plain values, arrays or tensors."
        ) from error
