"""`slurm_fn`: a function as a job. `main[config](...)` submits it and returns a job whose `result()` is the function's value.

A job is a run folder like those of `echelon submit`, so `echelon jobs`, `logs` and `cancel` find it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from echelon.common.errors import ClusterError, EchelonError, require
from echelon.common.files import private_folder, write_whole
from echelon.contracts.run_dir import RunDir, write_json
from echelon.launcher.calls import Call, checksum, main_module, owner_only, pack, refuse_in_bootstrap, write_call
from echelon.launcher.cluster.background import LocalLauncher
from echelon.launcher.cluster.function_job import FinishedJob, FunctionJob
from echelon.launcher.cluster.jobs import job_of
from echelon.launcher.cluster.slurm.job import SlurmJob, SlurmLauncher
from echelon.launcher.cluster.slurm.render import exported
from echelon.launcher.cluster.slurm_config import SlurmConfig
from echelon.launcher.cluster.snapshot import Copy, copy_code
from echelon.launcher.functions.inside import call_site, run_call
from echelon.launcher.functions.launch import check_function
from echelon.launcher.functions.launch_command import parse
from echelon.launcher.job import JobSpec
from echelon.launcher.local.raised import in_library
from echelon.launcher.protocol import FolderJob

__all__ = ["ConfiguredFunction", "SlurmFunction", "slurm_fn"]

P = ParamSpec("P")
T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
AnyJob = FunctionJob | FinishedJob

_CONDITIONS = ("afterok", "afterany", "afternotok")

# Run folders of the jobs that this process has submitted, in order. A launch command runs the script again, which finds its own
# call by the number of calls before it.
_submitted: list[list[str]] = []


def slurm_fn(function: Callable[P, T]) -> SlurmFunction[P, T]:
    """Make a function that can be submitted with `main[config](...)`. Without a config, `main(...)` is an ordinary call."""
    return SlurmFunction(function)


class SlurmFunction(Generic[P, T]):
    """A function that can be called here, or configured and submitted."""

    __qualname__: str

    def __init__(self, function: Callable[P, T]) -> None:
        check_function("function", function)
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.function(*args, **kwargs)

    def __getitem__(self, given: Any) -> ConfiguredFunction[P, T]:
        """Configure with a config, or a dict of its fields."""
        return self.configure(given)

    def configure(self, config: SlurmConfig | Mapping[str, Any] | None = None, /, **changes: Any) -> ConfiguredFunction[P, T]:
        """The function with a config, with some fields replaced."""
        return ConfiguredFunction(self, SlurmConfig.of(config if config is not None else {}).changed(**changes))

    def __reduce__(self) -> Any:
        """Pickle by name, like a function; with the function itself if the name does not lead to this object."""
        try:
            known = attrgetter(self.__qualname__)(sys.modules[self.__module__])
        except (AttributeError, KeyError):
            known = None
        if known is self and (self.__module__ != "__main__" or main_module()):
            return self.__qualname__
        return SlurmFunction, (self.function,)


@dataclass(frozen=True)
class ConfiguredFunction(Generic[P, T]):
    """A function with its config; a call submits a job.

    Args:
        conditions: on other jobs: "afterok", "afterany" or "afternotok", and the jobs.
    """

    function: SlurmFunction[P, T]
    config: SlurmConfig
    conditions: tuple[tuple[str, tuple[AnyJob, ...]], ...] = ()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AnyJob:
        """Submit the function, or run it, by the config's mode.

        Raises:
            UsageError: the function cannot be sent, or Slurm refuses the job, with its reason in one line.
        """
        return self._start([(args, kwargs)], array=False)[0]

    submit = __call__

    def map_array(self, *columns: Iterable[Any]) -> list[AnyJob]:
        """One job per element: `map_array(a, b)` calls the function with `a[0], b[0]`, then `a[1], b[1]`, and so on.

        On Slurm the jobs are one array. In the mode "local", each begins when the previous one has ended.

        Raises:
            UsageError: the columns differ in length, or are empty.
        """
        lists = [list(column) for column in columns]
        if not lists or not lists[0] or len({len(column) for column in lists}) > 1:
            lengths = ", ".join(str(len(column)) for column in lists)
            raise ClusterError(f"the columns of map_array must have one length of at least 1, got {lengths or 'none'}.")
        return self._start([(row, {}) for row in zip(*lists, strict=True)], array=True)

    map = map_array

    def afterok(self, *jobs: Any) -> ConfiguredFunction[P, T]:
        """A copy that begins after these jobs have ended well."""
        return self.on_condition(jobs, "afterok")

    def afterany(self, *jobs: Any) -> ConfiguredFunction[P, T]:
        """A copy that begins after these jobs have ended."""
        return self.on_condition(jobs, "afterany")

    def afternotok(self, *jobs: Any) -> ConfiguredFunction[P, T]:
        """A copy that begins after these jobs have failed."""
        return self.on_condition(jobs, "afternotok")

    def on_condition(self, jobs: Any, condition: str = "afterok") -> ConfiguredFunction[P, T]:
        """A new configured function that waits for one job or several; this one stays as it is.

        Raises:
            UsageError: no job, or an unknown condition.
        """
        require(condition in _CONDITIONS, "condition", f"one of {', '.join(_CONDITIONS)}", condition, kind=ClusterError)
        known = tuple(_flat(jobs))
        if not known:
            raise ClusterError(f"{condition} needs at least one job, got none.")
        return replace(self, conditions=(*self.conditions, (condition, known)))

    def script(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """The batch script as it would be submitted, for code that is not copied; nothing is written."""
        folder = self.config.output_path.absolute() / f"{self._stem}-dry-run"
        sent = None if self.config.distributed_launch_command else pack(Call(self.function, [(args, kwargs)], sys.path, sys.argv))
        return self._slurm().script(self._spec(checksum(sent) if sent else None, folder / "job" / "call.pkl"), RunDir(folder))

    @property
    def _stem(self) -> str:
        return re.sub(r"[^A-Za-z0-9_-]+", "_", self.config.job_name).strip("-_") or "job"

    @property
    def _name(self) -> str:
        return str(getattr(self.function, "__qualname__", "function"))

    def _start(self, calls: Sequence[Arguments], *, array: bool) -> list[AnyJob]:
        if self.config.mode in ("run", "debug"):
            self._unmet()
            return [self._inline(args, kwargs) for args, kwargs in calls]
        if array and self.config.mode == "local":  # each call is a job of its own
            return [self._one_after_another(call) for call in calls]
        at = call_site()
        if at is not None:  # started by a launch command: the script runs once more, as far as this call
            if len(_submitted) < at.number:
                _submitted.append(list(at.earlier[len(_submitted)]))
                return [FunctionJob(job_of(RunDir(path))) for path in _submitted[-1]]
            args, kwargs = calls[at.task]
            run_call(at, self._name, lambda: self.function(*args, **kwargs))
        refuse_in_bootstrap(f"{self._name}[...]()")
        return list(self._submit(calls, array=array))

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FinishedJob:
        try:
            return FinishedJob(self.function(*args, **kwargs))
        except Exception as error:
            if self.config.mode == "debug" and sys.stdin is not None and sys.stdin.isatty():
                import pdb

                pdb.post_mortem(error.__traceback__)
            raise

    def _one_after_another(self, call: Arguments) -> AnyJob:
        (job,) = self._start([call], array=False)
        job.wait()
        return job

    def _submit(self, calls: Sequence[Arguments], *, array: bool) -> list[FunctionJob]:
        config, dependency = self.config, self._unmet()
        with owner_only():
            run = RunDir.create(config.output_path.absolute(), None, stem=self._stem, begin=False)
            try:
                private_folder(run.path / "job", 0o700)
                write_json(run.run_json, self._describe(run))
                copy = self._copy(run)
                spec = self._written(calls, run, copy)
                jobs: Sequence[FolderJob]
                if config.mode == "local":
                    jobs = [LocalLauncher().submit(spec, run)]
                elif array:
                    jobs = self._slurm(dependency).submit_all(spec, [()] * len(calls), run)
                else:
                    jobs = [self._slurm(dependency).submit(spec, run)]
            except EchelonError:
                shutil.rmtree(run.path, ignore_errors=True)
                raise
        _submitted.append([str(job.run.path) for job in jobs])
        return [FunctionJob(job) for job in jobs]

    def _written(self, calls: Sequence[Arguments], run: RunDir, copy: Copy | None) -> JobSpec:
        """Write what will run into the run's folder: the call; or for a launch command, the number of the call in the script."""
        copied = copy.path_of if copy is not None and self.config.use_packed_code else str
        file = run.path / "job" / "call.pkl"
        if self.config.distributed_launch_command:
            about = {"number": len(_submitted), "function": self._name, "earlier": _submitted}
            text = json.dumps({"call": about, "argv": sys.argv[1:]}).encode()
            write_whole(file.with_name("call.json"), text)
            return self._spec(checksum(text), file.with_name("call.json"), copied)
        call = Call(self.function, calls, sys.path, [copied(sys.argv[0]), *sys.argv[1:]])
        return self._spec(write_call(file, pack(call, copied)), file)

    def _spec(self, sha256: str | None, file: Path, copied: Callable[[str], str] = str) -> JobSpec:
        config, is_local = self.config, self.config.mode == "local"
        nodes, ranks = (
            (1, config.num_of_node * config.ranks_per_node) if is_local else (config.num_of_node, config.ranks_per_node)
        )
        common: dict[str, Any] = {"ranks": ranks, "nodes": nodes, "env": dict(config.extra_task_kwargs)}
        if not config.distributed_launch_command:
            return JobSpec(str(file), "call", sha256=sha256, **common)
        words = [_word(word, copied) for word in parse(config.distributed_launch_command)]
        return JobSpec(self._name, "command", args=words, code=str(file), sha256=sha256, **common)

    def _slurm(self, dependency: str | None = None) -> SlurmLauncher:
        return SlurmLauncher(self.config.options(dependency=dependency, export=exported(list(os.environ))))

    def _copy(self, run: RunDir) -> Copy | None:
        """A copy of the present code; None without user files, as in a notebook."""
        config = self.config
        script = _own_code(self.function)
        if not config.pack_code or script is None:
            return None
        return copy_code(
            script,
            run.path / "job" / "code",
            root=config.code_root,
            suffixes=config.code_file_suffixes,
            without=config.exclude_code_folders,
        )

    def _describe(self, run: RunDir) -> dict[str, object]:
        config = self.config
        return {
            "name": run.name,
            "command": [self._name],
            "script": str(getattr(sys.modules["__main__"], "__file__", "") or ""),
            "args": [],  # left out: an argument may be a secret
            "ranks": config.num_of_node * config.ranks_per_node,
            "launcher": config.mode,
            "host": socket.gethostname(),
            "cwd": os.getcwd(),
            "started": time.time(),
        }

    def _unmet(self) -> str | None:
        """The conditions for Slurm, in its syntax. Jobs that have ended, or are not Slurm's, are checked here.

        Raises:
            UsageError: a condition that can no longer be met.
        """
        waits: dict[str, list[str]] = {}
        for condition, jobs in self.conditions:
            for job in jobs:
                if self.config.mode == "slurm" and job.backend is SlurmJob and not job.done():
                    waits.setdefault(condition, []).append(job.id)
                    continue
                well = job.wait().exit_code == 0
                if (condition == "afterok" and not well) or (condition == "afternotok" and well):
                    ended = "well" if well else "badly"
                    raise ClusterError(
                        f"{self._name} waits for {condition} of job {job.id}, which ended {ended}, so it will never begin."
                    )
        return ",".join(f"{condition}:{':'.join(ids)}" for condition, ids in waits.items()) or None


def _own_code(function: Any) -> Path | None:
    """The user's main script; if there is none, or it is a library's as under pytest, the function's file."""
    for module in ("__main__", function.__module__):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and Path(file).is_file() and not in_library(file):
            return Path(file)
    return None


def _flat(jobs: Any) -> Iterable[AnyJob]:
    if isinstance(jobs, (FunctionJob, FinishedJob)):
        yield jobs
    elif isinstance(jobs, (list, tuple)):
        for job in jobs:
            yield from _flat(job)
    else:
        raise ClusterError(f"a job must be one that slurm_fn returned, got {jobs!r}.")


def _word(word: str, copied: Callable[[str], str]) -> str:
    """A word of a command; if it names a copied file, also as in --config=FILE, the copy's path."""
    before, equals, value = word.rpartition("=")
    return f"{before}{equals}{copied(value)}" if Path(value).is_file() else word
