"""Run a function on ranks of this machine and return each rank's value."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from echelon.common.arguments import flags, is_path, mapping, several
from echelon.common.errors import EchelonError, LaunchError, RankFailedError, require
from echelon.common.files import working_folder
from echelon.common.numbers import number, whole
from echelon.common.terminal import printable
from echelon.contracts.overrides import overrides
from echelon.contracts.records import rank_record
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE
from echelon.diagnosis.failure import render
from echelon.launcher.calls import Call, load_exception, load_values, pack, refuse_in_bootstrap, write_call
from echelon.launcher.job import JobSpec, parse_ranks
from echelon.launcher.local.relay import SilentScreen
from echelon.launcher.local.server import ForkServer
from echelon.launcher.local.start import CallFile
from echelon.launcher.local.worker import SLOW_MODULES, may_be_preloaded

__all__ = ["launch", "preload", "running_server", "shared_server", "spawn"]

T = TypeVar("T")


_server: ForkServer | None = None
_loaded_by_ranks: set[str] = set()
_one_at_a_time = threading.Lock()  # the server serves one caller


def shared_server() -> ForkServer:
    """One server for all launches of this process: only the first launch waits for the import of torch."""
    global _server
    if _server is None or not _server.alive():
        _server = ForkServer.start(_needed())
    return _server


def running_server() -> ForkServer | None:
    """The shared server, if one is running."""
    return _server


def _needed() -> list[str]:
    """Modules for the server to import, so that ranks need not: those loaded here, and those that earlier ranks loaded."""
    modules = [m for m in SLOW_MODULES if m == "torch" or m in sys.modules]
    return [*modules, *sorted(_loaded_by_ranks.difference(modules))]


@contextlib.contextmanager
def _one_server(*, wait: bool) -> Iterator[ForkServer]:
    """The shared server; or a new one if another call uses it and this one must not wait."""
    if _one_at_a_time.acquire(blocking=wait):
        try:
            yield shared_server()
        finally:
            _one_at_a_time.release()
    else:
        server = ForkServer.start(_needed())
        try:
            yield server
        finally:
            server.close()


def preload(*modules: str) -> None:
    """Start the server of this process's launches now; it imports these modules while the caller continues."""
    global _server
    if _server is None or not _server.alive():
        _server = ForkServer.start(modules)


def launch(
    fn: Callable[..., T],
    *,
    ranks: int | str = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> list[T]:
    """Call `fn(*args, **kwargs)` on every rank and return the values, by rank.

    The ranks have torchrun's variables in their environment, so `init_from_env()` and `env://` work in `fn`. Rank 0's output is
    shown; the output of other ranks goes to files.

    Args:
        fn: a function that can be sent: by name if a module or script defines it; by value (cloudpickle) if it is a lambda, a
            closure or defined in a notebook.
        ranks: number of processes; "auto" is one per GPU, else one per core.
        max_restarts: how often all ranks are started again after a failure.
        timeout_s: seconds after which the job is stopped, and the stacks of all ranks are shown.
        env: further environment variables for the ranks, such as {"ECHELON_DEVICE": "cpu"} for more ranks than GPUs.
        quiet: rank 0's output goes to its log only.
        run_dir: folder for logs. By default a temporary folder, which is kept only if a rank fails.
    Raises:
        RankFailedError: with the text of the first failing rank's traceback; the exception itself is its `__cause__`.
        RankTimeoutError: with the stacks of all ranks.
        SystemExit: with code 75, if the ranks were asked to stop, and saved.
        UsageError: `fn` cannot be sent to another process, or `ranks` is invalid.
    """
    _refuse_under_prove()
    return call(
        fn,
        ranks=ranks,
        args=args,
        kwargs=kwargs,
        max_restarts=max_restarts,
        timeout_s=timeout_s,
        env=env,
        run_dir=run_dir,
        quiet=quiet,
    )


def _refuse_under_prove() -> None:
    if overrides().observes:
        raise LaunchError(
            "the script starts ranks itself, with launch or spawn, but `echelon prove` and `echelon plan` run it in ranks of "
            "their own. Let it call train or fit in every process, as under `echelon run`; or call echelon.prove with the "
            "functions that make its unit and its data."
        )


class Cancel:
    """Ends a `call` from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._wanted = False

    def now(self) -> None:
        """Kill the server; the kernel then kills its ranks. The next launch starts another server."""
        with self._lock:
            self._wanted = True
            if self._server is not None:
                self._server.kill()

    def begun(self, server: ForkServer | None) -> None:
        """The call has this server to itself from now on; None: no longer.

        Raises:
            EchelonError: the call was cancelled.
        """
        with self._lock:
            if server is not None and self._wanted:
                raise EchelonError("cancelled before it began.")
            self._server = server


def call(
    fn: Callable[..., T],
    *,
    ranks: int | str = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    cancel: Cancel | None = None,
) -> list[T]:
    """`launch`, which another thread may cancel."""
    count = parse_ranks(ranks)
    check_function("fn", fn)
    given = (several("args", args, "a list or tuple of arguments", kind=LaunchError), mapping("kwargs", kwargs, kind=LaunchError))
    max_restarts = whole("max_restarts", max_restarts, at_least=0, kind=LaunchError)
    if timeout_s is not None:
        number("timeout_s", timeout_s, "above 0 seconds, or None for no limit", lambda seconds: seconds > 0, kind=LaunchError)
    require(run_dir is None or is_path(run_dir), "run_dir", "a folder or None", run_dir, kind=LaunchError)
    flags(quiet=quiet, kind=LaunchError)
    refuse_in_bootstrap("launch()")
    check_environment(env or {}, "env")
    working_folder()
    payload = pack(Call(fn, [given], argv=sys.argv))
    _loaded_by_ranks.update(filter(may_be_preloaded, [str(getattr(fn, "__module__", ""))]))
    with _run_of(fn, run_dir) as run:
        job = JobSpec(
            str((run.path / "call.pkl").absolute()),
            "call",
            ranks=count,
            max_restarts=max_restarts,
            grace_s=5.0,
            env=dict(env or {}),
        )
        return _values(job, payload, run, timeout_s, SilentScreen() if quiet else None, cancel)


@contextlib.contextmanager
def _run_of(fn: Callable[..., Any], run_dir: str | os.PathLike[str] | None) -> Iterator[RunDir]:
    """The run's folder. A temporary one is kept only if a rank fails, since the error names logs in it."""
    if run_dir is not None:
        yield RunDir.create(run_dir, None, stem=str(getattr(fn, "__name__", "launch")))
        return
    folder, keep = Path(tempfile.mkdtemp(prefix="echelon-")), False
    try:
        yield RunDir.create(folder, "launch")
    except RankFailedError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _values(
    job: JobSpec, payload: bytes, run: RunDir, timeout_s: float | None, screen: SilentScreen | None, cancel: Cancel | None
) -> list[Any]:
    """The values that the ranks returned."""
    from echelon.launcher.local.run import run_local  # here: ranks import this module, but never run a job

    key = secrets.token_hex(32)
    call = CallFile(write_call(Path(job.target), payload), key)
    with _one_server(wait=cancel is None) as server, _cancellable(cancel, server):
        server.preload(_needed())
        outcome = run_local(job, run, screen=screen, server=server, call=call, timeout_s=timeout_s)
    _loaded_by_ranks.update(filter(may_be_preloaded, (rank_record(run.rank_exit(0)) or {}).get("loaded", ())))
    if outcome.failure is not None:
        failure = outcome.failure
        text = f"{render(failure, job.ranks)}\n\n{printable(failure.traceback)}".rstrip()
        error = RankFailedError(text, rank=failure.rank, exit_code=failure.exit_code, logs=str(run.attempt_path))
        raise error from load_exception(run.attempt_path / f"value.rank{failure.rank}.pkl.error", key)
    if outcome.exit_code == REQUEUE:  # the ranks saved and ended on request: so does their caller
        raise SystemExit(REQUEUE)
    if outcome.exit_code:
        # A signal that was meant for this process: the ranks have ended, so it takes its ordinary course.
        signal.raise_signal(outcome.exit_code - 128)
        raise KeyboardInterrupt
    return load_values([run.attempt_path / f"value.rank{rank}.pkl" for rank in range(job.ranks)], key)


@contextlib.contextmanager
def _cancellable(cancel: Cancel | None, server: ForkServer) -> Iterator[None]:
    if cancel is None:
        yield
        return
    cancel.begun(server)
    try:
        yield
    finally:
        cancel.begun(None)


def check_function(name: str, fn: Any) -> None:
    require(callable(fn), name, "a function", fn, kind=LaunchError)


def check_environment(env: Mapping[str, str], what: str) -> None:
    require(isinstance(env, Mapping), what, "a dict from names of variables to strings", env, kind=LaunchError)
    for name, value in env.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            kind = type(value).__name__  # not the value: it may be a secret
            raise LaunchError(f"{what}[{name!r}] must be a string, as all environment variables, got {kind}.")


def spawn(fn: Callable[..., T], args: Sequence[Any] = (), nprocs: int | str = 1, **options: Any) -> list[T]:
    """The signature of `torch.multiprocessing.spawn`: `fn(rank, *args)` on `nprocs` ranks; returns each rank's value.

    `options` are those of `launch`. `join`, `daemon` and `start_method` of the original are accepted with values that change
    nothing: spawn always joins, and ranks never outlive the caller.
    """
    for name, harmless in (("join", (True,)), ("daemon", (True, False)), ("start_method", ("spawn", "forkserver"))):
        if options.pop(name, harmless[0]) not in harmless:
            raise LaunchError(f"{name} of spawn must be {' or '.join(map(repr, harmless))} here.")
    check_function("fn", fn)
    for name in options.keys() - _OPTIONS:
        instead = " It takes nprocs." if name == "ranks" else ""
        raise TypeError(f"spawn() got an unexpected keyword argument {name!r}.{instead}")
    return launch(_WithRank(fn), ranks=nprocs, args=args, **options)


_OPTIONS = {"kwargs", "max_restarts", "timeout_s", "env", "run_dir", "quiet"}


class _WithRank:
    """Passes the rank as the first argument."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "spawn")

    def __call__(self, *args: Any) -> Any:
        return self.fn(int(os.environ["RANK"]), *args)
