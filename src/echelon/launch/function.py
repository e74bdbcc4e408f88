"""Run a function on ranks of this machine and get each rank's value back."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn as mp_spawn
from pathlib import Path
from typing import Any, TypeVar

from echelon.contracts.errors import RankFailedError, UsageError
from echelon.contracts.run_dir import RunDir
from echelon.launch.failure import render
from echelon.launch.job import JobSpec, parse_ranks
from echelon.launch.local import run_local
from echelon.launch.server import ForkServer

__all__ = ["launch", "spawn"]

T = TypeVar("T")

# What ranks are likely to need, slow to import. Loaded once in the server if the caller has loaded it too.
_SLOW_MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "echelon.loop.auto",
)

_server: ForkServer | None = None


def _shared_server() -> ForkServer:
    """One server for all launches of this process: the first pays for importing torch, the others take milliseconds."""
    global _server
    if _server is None or not _server.alive():
        _server = ForkServer.start([m for m in _SLOW_MODULES if m == "torch" or m in sys.modules])
    return _server


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
) -> list[T]:
    """Call `fn(*args, **kwargs)` on every rank and return the values, by rank.

    The ranks find torchrun's variables in their environment, so `init_from_env()` and `env://` work in `fn`. Rank 0's
    output is shown; that of the others goes to files.

    Args:
        fn: a function that can be pickled: defined at the top of a module or script. With `cloudpickle` installed, any.
        ranks: how many processes; "auto" is one per GPU, else one per core.
        max_restarts: how often the group is started again after a rank failed.
        timeout_s: after so long the job is stopped and the stacks of all ranks are shown.
        env: more environment variables for the ranks.
        run_dir: where logs go. By default a temporary folder, which is kept only if a rank fails.
    Raises:
        RankFailedError: with the text of the first failing rank's traceback; the exception itself is its `__cause__`.
        RankTimeoutError: with the stacks of all ranks.
        UsageError: `fn` cannot be sent to another process, or `ranks` makes no sense.
    """
    count = parse_ranks(ranks)
    payload = _pickle((fn, tuple(args), dict(kwargs or {})), fn)
    temporary = run_dir is None
    folder = Path(tempfile.mkdtemp(prefix="echelon-") if run_dir is None else run_dir)
    run = RunDir.create(folder, "launch" if temporary else None, stem=getattr(fn, "__name__", "launch"))
    call = run.path / "call.pkl"
    with open(os.open(call, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(payload)
    job = JobSpec(str(call.absolute()), "call", ranks=count, max_restarts=max_restarts, grace_s=5.0, env=dict(env or {}))
    fields = {
        "result": lambda attempt, info: str(attempt.folder.absolute() / f"value.rank{info.rank}.pkl"),
        # spawn's own description of how to make the caller's `__main__` importable elsewhere.
        "preparation": {
            k: v for k, v in mp_spawn.get_preparation_data("rank").items() if k in ("init_main_from_name", "init_main_from_path")
        },
    }
    outcome = run_local(job, run, server=_shared_server(), start_fields=fields, timeout_s=timeout_s)
    results = [run.attempt_path / f"value.rank{rank}.pkl" for rank in range(count)]
    if outcome.failure is not None:
        failure = outcome.failure
        text = f"{render(failure, count)}\n\n{failure.traceback}".rstrip()
        error = RankFailedError(text, rank=failure.rank, exit_code=failure.exit_code, logs=str(run.attempt_path))
        raise error from _load_exception(run.attempt_path / f"value.rank{failure.rank}.pkl.error")
    if outcome.exit_code:
        raise KeyboardInterrupt
    values = [_load(path) for path in results]
    if temporary:
        shutil.rmtree(folder, ignore_errors=True)
    return values


def spawn(fn: Callable[..., T], nprocs: int | str = 1, args: Sequence[Any] = (), **options: Any) -> list[T]:
    """`torch.multiprocessing.spawn`'s call: `fn(rank, *args)` on `nprocs` ranks; returns each rank's value.

    `options` are those of `launch`. `join`, `daemon` and `start_method` of the original are accepted where they change
    nothing: joining is what this does, and ranks never outlive the caller.
    """
    for name, harmless in (("join", (True,)), ("daemon", (True, False)), ("start_method", ("spawn", "forkserver"))):
        if options.pop(name, harmless[0]) not in harmless:
            raise UsageError(f"spawn({name}=...): only {' or '.join(map(repr, harmless))} is possible here.")
    return launch(_WithRank(fn), ranks=nprocs, args=args, **options)


class _WithRank:
    """Passes the rank as the first argument."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "spawn")

    def __call__(self, *args: Any) -> Any:
        return self.fn(int(os.environ["RANK"]), *args)


def _pickle(call: Any, fn: Callable[..., Any]) -> bytes:
    try:
        return pickle.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if importlib.util.find_spec("cloudpickle") is not None:
            import cloudpickle  # type: ignore[import-not-found,unused-ignore]

            data: bytes = cloudpickle.dumps(call)
            return data
        name = getattr(fn, "__qualname__", repr(fn))
        raise UsageError(
            f"{name} cannot be sent to other processes ({error}). Define it at the top level of a module, "
            "with arguments that can be pickled, or `pip install cloudpickle`."
        ) from error


def _load(path: Path) -> Any:
    with open(path, "rb") as file:
        return pickle.load(file)


def _load_exception(path: Path) -> BaseException | None:
    with contextlib.suppress(Exception):
        value = _load(path)
        if isinstance(value, BaseException):
            return value
    return None
