"""The batch script of a job, as text. Rendering queries nothing and writes nothing, and no value of the environment appears."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echelon.common.errors import ClusterError, require
from echelon.contracts.stopping import REQUEUE
from echelon.launcher.job import JobSpec, cores_of_a_rank

__all__ = ["SlurmOptions", "exported", "render"]

# Variables that a job needs from the login node to find the same programs and libraries. Names only: Slurm carries the values.
_USUAL = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH")
_PREFIXES = (
    "OMP_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "TRITON_",
    "TORCHINDUCTOR_",
    "FI_",
    "UCX_",
    "CONDA_",
    "MODULE",
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# Slurm's names, node lists, features with operators, and memory sizes. No blank, quote, control character or dollar.
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+=/&|()\[\]*-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_BY_FIELDS = "the number of nodes, ranks, cores and devices has fields of its own"
_BY_FOLDER = "it follows from the run's folder, where the logs are"
# sbatch options on which the script itself relies.
_OURS = {
    **dict.fromkeys(
        ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gpus", "gpus-per-task"), _BY_FIELDS
    ),
    **dict.fromkeys(("output", "error", "input", "open-mode", "chdir", "job-name"), _BY_FOLDER),
    **dict.fromkeys(("array", "dependency", "requeue", "no-requeue", "time", "signal"), "there is a field or a method for it"),
    **dict.fromkeys(("export", "export-file", "get-user-env"), "variables are named one by one"),
    **dict.fromkeys(
        ("wrap", "parsable", "test-only", "wait", "help", "usage", "version"), "it would make sbatch do something else"
    ),
}


@dataclass(frozen=True)
class SlurmOptions:
    """Slurm options besides nodes; None leaves the choice to the cluster.

    Args:
        time_s: limit of each start, in seconds; Slurm counts whole minutes.
        warn_s: seconds before the limit at which the ranks are asked to save and end. Must suffice for a save, and for the half
            minute by which Slurm may be late.
        cpus_per_rank: number of cores; by default `cores_of_a_rank`.
        gpus_per_node: devices.
        mem: memory per node in Slurm's syntax, such as "64G".
        requeue: start again after the time limit, a preemption or the loss of a node.
        export: names of variables that the job gets from the submitting user's environment.
        name: the job's name for Slurm; by default the run's.
        cpus_per_node: number of cores, instead of `cpus_per_rank`.
        dependency: on other jobs, in Slurm's syntax, such as "afterok:12:13".
        parallel: for an array, number of runs at a time.
        setup: shell lines to run before the ranks start, on the first node; their exports reach all nodes.
        more: further options of sbatch, by name; True is an option without a value.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    time_s: float | None = None
    warn_s: float = 120.0
    cpus_per_rank: int | None = None
    gpus_per_node: int | None = None
    mem: str | None = None
    requeue: bool = True
    exclusive: bool = False
    export: Sequence[str] = ()
    name: str | None = None
    cpus_per_node: int | None = None
    dependency: str | None = None
    parallel: int | None = None
    setup: Sequence[str] = ()
    more: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def check(self) -> None:
        """Check the values.

        Raises:
            UsageError: a value that is invalid for Slurm, or that would be more than a value in a script.
        """
        for name in ("partition", "account", "qos", "constraint", "nodelist", "exclude", "reservation", "mem", "dependency"):
            value = getattr(self, name)
            is_word = value is None or _WORD.fullmatch(value) is not None
            require(
                is_word, f"--{name}", "a word of letters, digits and . , : @ + = / & | ( ) [ ] * - _", value, kind=ClusterError
            )
        for name in ("cpus_per_rank", "gpus_per_node", "cpus_per_node", "parallel"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name.replace('_', '-')}", "at least 1", value, kind=ClusterError)
        for line in self.setup:
            _refuse_control(line, "setup")
        for name, value in self.more.items():
            if not _OPTION.fullmatch(name):
                raise ClusterError(f"an option of sbatch must be named in lowercase letters, digits and hyphens, got {name!r}.")
            if name in _OURS:
                raise ClusterError(f"option {name!r} of sbatch is set by echelon: {_OURS[name]}.")
            _refuse_control(str(value), f"--{name}")
        if self.time_s is not None and self.requeue and self.warn_s >= self.time_s:
            raise ClusterError(
                f"--time must be longer than --warn, {self.warn_s:g} s, with which the ranks are asked to save, got "
                f"{self.time_s:g} s. Give more time, a shorter --warn, or --no-requeue."
            )
        for variable in self.export:
            if not _VARIABLE.fullmatch(variable):
                raise ClusterError(
                    f"--env must be the name of a variable, got {variable!r}. Its value comes from your environment."
                )


def exported(environment: Sequence[str], more: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the variables that a job gets: the usual ones in `environment`, and `more`.

    A name that looks like a secret's is passed only if it is in `more`.
    """
    usual = {
        n for n in environment if (n in _USUAL or n.startswith(_PREFIXES)) and _VARIABLE.fullmatch(n) and not _SECRET.search(n)
    }
    return tuple(sorted(usual | set(more)))


def render(
    spec: JobSpec,
    options: SlurmOptions,
    run: Path,
    *,
    python: str,
    cwd: Path,
    tasks: int | None = None,
    sha256: Sequence[str] = (),
) -> str:
    """The batch script.

    Args:
        run: the run's folder, which all nodes see; with `tasks`, the sweep's folder.
        python: the interpreter, on every node.
        cwd: the job's working folder.
        tasks: number of runs of an array, each in a folder of its own below the sweep's; None for a single run.
        sha256: checksums of job.json, one per task or for the single run; another file is not run. Empty trusts the folder's
        owner.
    Raises:
        UsageError: a value that cannot be written into a script, or that is invalid for Slurm.
    """
    options.check()
    array = "" if tasks is None else "/tasks/$SLURM_ARRAY_TASK_ID"
    # The nodes trust only this text, since Slurm keeps a copy of its own.
    written, of_tasks = "", ""
    if tasks is not None and sha256:
        of_tasks = "spec_sha256=(\n" + "".join(f"{each}\n" for each in sha256) + ")\n"
        written = ' --spec-sha256 "${spec_sha256[$SLURM_ARRAY_TASK_ID]}"'
    elif sha256:
        written = f" --spec-sha256 {sha256[0]}"
    call = f" --call-sha256 {spec.sha256}" if spec.kind == "call" and spec.sha256 else ""
    task = ' --task "$SLURM_ARRAY_TASK_ID"' if tasks is not None and spec.kind in ("call", "command") else ""
    return _SCRIPT.format(
        header="\n".join(_header(spec, options, run, cwd, tasks)),
        run=f"{_path(run)}{array}",
        python=_path(Path(python)),
        cpus=_cpus(spec, options),
        setup="".join(f"{line}\n" for line in ("\n# As the submitter wants it.", *options.setup)) if options.setup else "",
        spec=written,
        of_tasks=of_tasks,
        words=f"{call}{task}",
        again=_AGAIN if options.requeue else "",
    )


def _cpus(spec: JobSpec, options: SlurmOptions) -> int:
    return options.cpus_per_node or (options.cpus_per_rank or cores_of_a_rank(options.gpus_per_node)) * spec.ranks


def _header(spec: JobSpec, options: SlurmOptions, run: Path, cwd: Path, tasks: int | None) -> list[str]:
    sbatch: dict[str, object] = {
        "job-name": _sbatch_text(options.name) if options.name is not None else run.name,
        "chdir": _sbatch_path(cwd, escaped=False),
        "nodes": spec.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": _cpus(spec, options),
        "gpus-per-node": options.gpus_per_node,
        "mem": options.mem,
        "time": _slurm_time(options.time_s) if options.time_s is not None else None,
        **{name: getattr(options, name) for name in ("partition", "account", "qos", "constraint", "nodelist", "exclude")},
        "reservation": options.reservation,
        "array": f"0-{tasks - 1}{f'%{options.parallel}' if options.parallel else ''}" if tasks is not None else None,
        "dependency": options.dependency,
        "kill-on-invalid-dep": "yes" if options.dependency is not None else None,  # otherwise the job would wait forever
        "output": _sbatch_path(run, ("" if tasks is None else "/tasks/%a") + "/job/output.log"),
        "open-mode": "append",
        "signal": f"USR1@{math.ceil(options.warn_s)}" if options.requeue else None,
        "export": ",".join(options.export) or "NIL",
    }
    flags = ["requeue" if options.requeue else "no-requeue", *(["exclusive"] if options.exclusive else [])]
    flags += [name for name, value in options.more.items() if value is True]
    sbatch |= {name: _sbatch_text(str(value)) for name, value in options.more.items() if not isinstance(value, bool)}
    header = [f"#SBATCH --{name}={value}" for name, value in sbatch.items() if value is not None]
    return header + [f"#SBATCH --{flag}" for flag in flags]


_SCRIPT = """#!/bin/bash
# Written by `echelon submit`; sbatch has its own copy, so that changing this one changes nothing.
{header}

run={run}
python={python}
umask 077
{of_tasks}trap : TERM  # the nodes are asked to save and end, and this shell waits for them
{setup}
# One launcher on every node starts the node's ranks.
srun --kill-on-bad-exit=1 --export=ALL --cpus-per-task={cpus} "$python" -P -m echelon.launcher.cluster.node "$run"{spec}{words}

# Names the rank that failed first.
"$python" -P -m echelon.launcher.cluster.node "$run"{spec} --conclude $?
code=$?
{again}exit $code
"""

_AGAIN = f"""
# {REQUEUE}: the ranks have saved and want to go on. A job that was cancelled is no longer running.
if [ $code = {REQUEUE} ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


def _slurm_time(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def _refuse_control(text: str, what: str) -> None:
    require(text.isprintable(), what, "free of control characters, such as a line break", text, kind=ClusterError)


def _path(path: Path) -> str:
    """A path as one shell word."""
    text = str(path.absolute())
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ClusterError(f"a path in a batch script must be free of control characters, got {text!r}.")
    return shlex.quote(text)


def _sbatch_text(text: str) -> str:
    """Any printable text as one value in an #SBATCH line, where quotes and backslashes count and nothing is expanded."""
    _refuse_control(text, "value")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _sbatch_path(path: Path, pattern: str = "", *, escaped: bool = True) -> str:
    """A path in an #SBATCH line: quoted, and `escaped` for options that expand patterns such as %j."""
    text = str(path.absolute())
    if any(c in text for c in "'\"\\") or any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ClusterError(f"a path for sbatch must be free of quotes, backslashes and control characters, got {text!r}.")
    text = (text.replace("%", "%%") if escaped else text) + pattern
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else f'"{text}"'
