"""`nntool.slurm`: `slurm_fn` and `SlurmConfig`; calls return what they return in nntool and submitit.

mode "run"     the function's own value
mode "local"   a job that has ended; the call raises its failure
mode "slurm"   a job, without waiting for it
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ParamSpec, TypeVar

from echelon.common.errors import RankFailedError, UsageError, require
from echelon.launcher.cluster import slurm_config
from echelon.launcher.cluster import slurm_fn as core
from echelon.launcher.cluster.slurm.render import SlurmOptions
from echelon.launcher.protocol import JobState

__all__ = ["Job", "SlurmArgs", "SlurmConfig", "SlurmFunction", "slurm_fn", "slurm_function", "slurm_launcher"]

P = ParamSpec("P")
T = TypeVar("T")

# submitit's words, from Slurm. A job that has saved itself to continue later ran out of time or was preempted.
_STATES = {
    JobState.PENDING: "PENDING",
    JobState.RUNNING: "RUNNING",
    JobState.DONE: "COMPLETED",
    JobState.FAILED: "FAILED",
    JobState.STOPPED: "TIMEOUT",
    JobState.CANCELLED: "CANCELLED",
    JobState.LOST: "UNKNOWN",
}


# Options that submitit has names for; other options of sbatch belong in `extra_params_kwargs`.
_SUBMITITS = (
    "account",
    "qos",
    "constraint",
    "reservation",
    "comment",
    "mail_type",
    "mail_user",
    "exclusive",
)


@dataclass(frozen=True)
class _SlurmConfig(slurm_config.SlurmConfig):
    stderr_to_stdout: bool = False
    distributed_env_task: str = "torch"
    extra_submit_kwargs: Mapping[str, Any] = field(default_factory=dict)


class SlurmConfig(_SlurmConfig):
    """`echelon.SlurmConfig` with fields that can be assigned: they are checked when the function is called.

    Args:
        stderr_to_stdout: without effect: a rank's log always holds both.
        distributed_env_task: "torch" is the only one.
        extra_submit_kwargs: options under submitit's names, such as slurm_account.
    """

    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__

    def __post_init__(self) -> None:
        if self.timeout_min == sys.maxsize:  # nntool's default, written out
            object.__setattr__(self, "timeout_min", None)
        require(self.distributed_env_task == "torch", "distributed_env_task", "'torch'", self.distributed_env_task)
        for name in ("array_parallelism", "slurm_array_parallelism"):
            object.__setattr__(self, "array_parallelism", self.extra_submit_kwargs.get(name, self.array_parallelism))
        super().__post_init__()

    @classmethod
    def of(cls, given: slurm_config.SlurmConfig | Mapping[str, Any]) -> SlurmConfig:
        """A config from another one, which may be echelon's own, or from its fields by name."""
        if type(given) is slurm_config.SlurmConfig:
            given = {f.name: getattr(given, f.name) for f in fields(given)}
        done = super().of(given)
        assert isinstance(done, SlurmConfig)
        return done

    def options(self, *, dependency: str | None = None, export: Sequence[str] = ()) -> SlurmOptions:
        """The options for Slurm.

        Raises:
            UsageError: an option is unknown.
        """
        options = super().options(dependency=dependency, export=export)
        more = dict(options.more)
        for name, value in self.extra_submit_kwargs.items():
            plain = re.sub("^slurm_", "", str(name))
            if plain in _SUBMITITS:
                more[plain.replace("_", "-")] = value
            elif plain != "array_parallelism":
                raise UsageError(
                    f"extra_submit_kwargs has {name!r}, and knows slurm_ before array_parallelism, {', '.join(_SUBMITITS)}. "
                    "Options of sbatch go into extra_params_kwargs, variables of the ranks into extra_task_kwargs."
                )
        return replace(options, more=more)

    def set_output_path(self, output_parent_path: Any) -> SlurmConfig:
        """A copy with another parent folder for runs."""
        return replace(self, output_parent_path=str(output_parent_path))


SlurmArgs = SlurmConfig


class Job:
    """A job with submitit's attributes; all other attributes are those of `job`, echelon's own."""

    def __init__(self, job: core.AnyJob) -> None:
        self.job = job

    def __getattr__(self, name: str) -> Any:
        if name == "job":  # not set yet, for example during a copy
            raise AttributeError(name)
        return getattr(self.job, name)

    def __repr__(self) -> str:
        return f"Job({self.job!r})"

    @property
    def job_id(self) -> str:
        return self.job.id

    @property
    def num_tasks(self) -> int:
        return self.job.ranks

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT, CANCELLED or UNKNOWN."""
        return _STATES[self.job.state()]

    def done(self, force_check: bool = False) -> bool:
        """Whether the job has ended. Slurm is always asked, also without `force_check`."""
        return self.job.done()

    def exception(self) -> RankFailedError | None:
        """What `result` would raise; waits for the end."""
        try:
            self.job.results()
        except RankFailedError as error:
            return error
        return None

    def stdout(self) -> str | None:
        """What rank 0 has written so far, to standard error too."""
        log = self.job.log()
        return log.read_text(errors="replace") if log.exists() else None

    stderr = stdout


def slurm_fn(submit_fn: Callable[P, T]) -> SlurmFunction[P, T]:
    """A function that can be submitted: `main[config](...)`."""
    return SlurmFunction(submit_fn)


def slurm_function(submit_fn: Callable[P, T]) -> Callable[..., ConfiguredFunction[P, T]]:
    """nntool's older spelling: `main(config)(...)`."""
    return SlurmFunction(submit_fn).configure


def slurm_launcher(
    ArgsType: type[Any],
    parser: str | Callable[..., Any] = "tyro",
    slurm_key: str = "slurm",
    slurm_params_kwargs: Mapping[str, Any] | None = None,
    slurm_submit_kwargs: Mapping[str, Any] | None = None,
    slurm_task_kwargs: Mapping[str, str] | None = None,
    *extra_args: Any,
    **extra_kwargs: Any,
) -> Callable[[Callable[..., T]], ConfiguredFunction[..., T]]:
    """A decorator that parses the command line. The result has the config, and is the argument of a call without arguments.

    Args:
        ArgsType: a dataclass, one field of which is a SlurmConfig.
        parser: "tyro", or a function that is given `ArgsType` and the extra arguments.
        slurm_key: the name of that field.
    Raises:
        UsageError: `ArgsType` has no such field, or the parser is not installed.
    """
    args = _parser(parser)(ArgsType, *extra_args, **extra_kwargs)
    if not hasattr(args, slurm_key):
        raise UsageError(f"slurm_launcher: {ArgsType.__name__} has no field {slurm_key!r} with a SlurmConfig.")

    def decorate(submit_fn: Callable[..., T]) -> ConfiguredFunction[..., T]:
        more = (slurm_params_kwargs, slurm_submit_kwargs, slurm_task_kwargs)
        return replace(SlurmFunction(submit_fn).configure(getattr(args, slurm_key), *more), default_args=(args,))

    return decorate


def _parser(given: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(given):
        return given
    if given != "tyro":
        raise UsageError(f"parser {given!r}: 'tyro', or a function.")
    try:
        parse: Callable[..., Any] = importlib.import_module("tyro").cli
    except ImportError:
        raise UsageError("slurm_launcher parses with tyro, which is not installed: pip install tyro") from None
    return parse


class SlurmFunction(core.SlurmFunction[P, T]):
    """A function to which a config can be given."""

    def __getitem__(self, given: Any) -> ConfiguredFunction[P, T]:
        return self.configure(*given) if isinstance(given, tuple) else self.configure(given)

    def configure(  # type: ignore[override]
        self,
        slurm_config: slurm_config.SlurmConfig | Mapping[str, Any],
        slurm_params_kwargs: Mapping[str, Any] | None = None,
        slurm_submit_kwargs: Mapping[str, Any] | None = None,
        slurm_task_kwargs: Mapping[str, str] | None = None,
        system_argv: Sequence[str] | None = None,
    ) -> ConfiguredFunction[P, T]:
        """The function with a config, options of sbatch and of submitit, and environment variables of the ranks.

        Raises:
            UsageError: `system_argv` differs from this script's arguments, with which a launch command runs it again.
        """
        if system_argv is not None and list(system_argv) != sys.argv[1:]:
            raise UsageError(
                f"system_argv={list(system_argv)!r}: the script that a launch command runs again has its own arguments. Write "
                "others into distributed_launch_command."
            )
        names = ("extra_params_kwargs", "extra_submit_kwargs", "extra_task_kwargs")
        given = zip(names, (slurm_params_kwargs, slurm_submit_kwargs, slurm_task_kwargs), strict=True)
        done = super().configure(SlurmConfig.of(slurm_config), **{name: dict(value) for name, value in given if value})
        return ConfiguredFunction(self, done.config)


@dataclass(frozen=True)
class ConfiguredFunction(core.ConfiguredFunction[P, T]):
    """A function with its config; calling it gives what nntool gives.

    Args:
        default_args: arguments of a call without arguments.
    """

    default_args: tuple[Any, ...] = ()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        given: Any = args if args or kwargs else self.default_args
        return self._given(super().__call__(*given, **kwargs))

    submit = __call__

    def map_array(self, *columns: Iterable[Any]) -> list[Any]:
        """One job for each element of the columns; in mode "run", their values."""
        return [self._given(job) for job in super().map_array(*columns)]

    map = map_array

    def on_condition(self, jobs: Any, condition: str = "afterok") -> ConfiguredFunction[P, T]:
        """The same function; its job begins when `jobs` have ended with this condition."""
        waited = super().on_condition(_unwrapped(jobs), condition)
        return replace(self, conditions=waited.conditions)

    def is_configured(self) -> bool:
        return True

    def is_distributed(self) -> bool:
        return bool(self.config.distributed_launch_command)

    def _given(self, job: core.AnyJob) -> Any:
        if self.config.mode == "run":
            return job.result()
        if self.config.mode == "local":
            job.results()
        return Job(job)


def _unwrapped(jobs: Any) -> Any:
    if isinstance(jobs, (list, tuple)):
        return [_unwrapped(job) for job in jobs]
    return jobs.job if isinstance(jobs, Job) else jobs


_INSTEAD = {
    "Task": "distributed_launch_command, which is run on every node",
    "DistributedTaskConfig": "echelon.RankInfo()",
    "PyTorchDistributedTask": "distributed_launch_command, which is run on every node",
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise UsageError(f"nntool.slurm.{name} is not part of echelon.compat. Instead: {_INSTEAD[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
