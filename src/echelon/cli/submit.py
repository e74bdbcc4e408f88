"""`echelon submit`: run a script on a cluster or in the background of this machine. Leaves a folder with the batch script."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.cli import traces
from echelon.cli.run import (
    add_shared,
    checks_in_env,
    decided,
    describe,
    device_in_env,
    plan_first,
    stem_of,
    track_in_env,
)
from echelon.cli.script import check_module, check_script
from echelon.common.errors import CommandError, EchelonError, require
from echelon.common.files import private_folder
from echelon.common.terminal import printable, say
from echelon.common.trust import check_parents, why_untrusted
from echelon.contracts.overrides import Overrides
from echelon.contracts.run_dir import RunDir, write_json
from echelon.launcher.job import JobSpec, parse_duration, parse_hang_timeout
from echelon.launcher.protocol import FolderJob

if TYPE_CHECKING:
    from echelon.launcher.cluster.slurm.job import SlurmLauncher

__all__ = ["add_arguments", "execute"]

_SLURM = ("partition", "account", "qos", "constraint", "nodelist", "exclude", "reservation", "mem")
_HELP = {
    "mem": "memory of each node, such as 64G",
    "nodelist": "these nodes",
    "exclude": "not these nodes",
    "constraint": "features that the nodes must have",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", choices=("slurm", "local", "dragon"), default="slurm", help="where it runs (default: slurm)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="processes on each (default: one per GPU, else 1)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="devices of each node")
    parser.add_argument("--cpus-per-rank", type=int, metavar="N", help="cores of each process (default: 4 with GPUs, else 1)")
    parser.add_argument("--time", metavar="TIME", help="limit of each start, such as 2h or 1d12h; then the job is queued again")
    parser.add_argument("--warn", default="2m", metavar="TIME", help="save this long before the limit (default: 2m)")
    parser.add_argument(
        "--no-requeue", action="store_true", help="do not queue the job again after the limit, preemption or a lost node"
    )
    parser.add_argument("--exclusive", action="store_true", help="share no node with other jobs")
    for name in _SLURM:
        parser.add_argument(f"--{name}", metavar=name[0].upper(), help=_HELP.get(name, f"Slurm's {name}"))
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME", help="a variable of your environment to pass to the job as well"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="one run for each value, passed as --KEY; repeated: all combinations",
    )
    parser.add_argument("--name", metavar="NAME", help="the run's folder below runs/; if it exists, the run continues")
    parser.add_argument("--no-snapshot", action="store_true", help="do not copy the code: run it as it is when the job starts")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, and Slurm's answer to it; submit nothing")
    add_shared(parser)


def execute(arguments: argparse.Namespace) -> int:
    from echelon.launcher.cluster.slurm.render import SlurmOptions, exported

    if arguments.module:
        check_module(arguments.script)
    else:
        check_script(arguments.script)
    for name in arguments.env:
        if name not in os.environ:
            raise CommandError(f"--env must name a variable of your environment, got {name}.")
    options = SlurmOptions(
        **{name: getattr(arguments, name) for name in _SLURM},
        time_s=parse_duration(arguments.time, "--time") if arguments.time is not None else None,
        warn_s=parse_duration(arguments.warn, "--warn"),
        cpus_per_rank=arguments.cpus_per_rank,
        gpus_per_node=arguments.gpus_per_node,
        requeue=not arguments.no_requeue,
        exclusive=arguments.exclusive,
        export=exported(list(os.environ), arguments.env),
    )
    options.check()
    spec = job_spec(arguments, arguments.script if arguments.module else str(Path(arguments.script).absolute()))
    planned = plan_first(arguments, spec.ranks * spec.nodes, spec.nodes)
    if arguments.to in ("local", "dragon"):
        return _submit_here(spec, arguments, planned)
    sweep = parse_sweep(arguments.sweep)
    from echelon.launcher.cluster.slurm.job import SlurmLauncher

    launcher = SlurmLauncher(options)
    if arguments.dry_run:
        return _dry_run(launcher, spec, sweep, arguments)
    with _folder(arguments) as (run, new):
        try:
            placed = _with_copy(spec, run, arguments)
            write_json(run.run_json, describe(spec, run, "slurm", planned=planned))
            jobs = launcher.submit_all(placed, sweep, run) if sweep else [launcher.submit(placed, run)]
        except EchelonError:
            if new:
                shutil.rmtree(run.path, ignore_errors=True)
            raise
    return _say_where(run, jobs, arguments)


def job_spec(arguments: argparse.Namespace, target: str) -> JobSpec:
    ranks = arguments.ranks_per_node if arguments.ranks_per_node is not None else arguments.gpus_per_node or 1
    for name, value in (("--nodes", arguments.nodes), ("--ranks-per-node", ranks)):
        require(value >= 1, name, "at least 1", value, kind=CommandError)
    require(arguments.max_restarts >= 0, "--max-restarts", "at least 0", arguments.max_restarts, kind=CommandError)
    return JobSpec(
        target,
        "module" if arguments.module else "script",
        args=tuple(arguments.args),
        ranks=ranks,
        env={
            **(given.to_env() if (given := decided(arguments)) != Overrides() else {}),
            **device_in_env(arguments.device),
            **track_in_env(arguments.track),
            **checks_in_env(arguments),
            **traces.in_env(arguments, ranks * arguments.nodes),
        },
        nodes=arguments.nodes,
        max_restarts=arguments.max_restarts,
        stall_after_s=parse_duration(arguments.stall_after, "--stall-after") if arguments.stall_after is not None else None,
        hang_timeout_s=parse_hang_timeout(arguments.hang_timeout, "--hang-timeout")
        if arguments.hang_timeout is not None
        else None,
    )


def parse_sweep(given: Sequence[str]) -> list[tuple[tuple[str, str], ...]]:
    """All combinations of the values of each "KEY=A,B"; the last key changes fastest. Empty without a sweep.

    Raises:
        UsageError: no key, no value, or a key twice.
    """
    axes = []
    for text in given:
        key, equals, values = text.partition("=")
        key = key.removeprefix("--")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", key) or not all(values.split(",")):
            raise CommandError(f"--sweep must be a key and its values, such as lr=1e-3,3e-4, got {text!r}.")
        axes.append([(key, value) for value in dict.fromkeys(values.split(","))])
    keys = [axis[0][0] for axis in axes]
    if len(set(keys)) < len(keys):
        raise CommandError(f"--sweep must name each key once, got {' and '.join(keys)}. Give all values of a key at once.")
    return list(product(*axes)) if axes else []


@contextlib.contextmanager
def _folder(arguments: argparse.Namespace) -> Iterator[tuple[RunDir, bool]]:
    """Reserve the run's folder for this submission. Yields the folder, and whether it is new.

    Raises:
        UsageError: a run is active in it, or one was submitted and has not ended.
    """
    named = Path(arguments.runs) / arguments.name if arguments.name else None
    made = named is None or not named.exists()
    run = RunDir.create(arguments.runs, arguments.name, stem=stem_of(arguments), begin=False)
    check_parents(run.path)
    if why := why_untrusted(run.path, run.path.stat()):
        raise CommandError(why)
    with run.submitting():
        # Another submission may have created its job since `made` was read.
        new = made and not (run.path / "job").exists() and not (run.path / "attempts").exists()
        if not new:
            _refuse_unless_ended(run, arguments)
        try:
            private_folder(run.path / "job", 0o700)
        except OSError as error:
            raise CommandError(f"{error.filename} {error.strerror}. Choose another --name.") from error
        yield run, new


def _refuse_unless_ended(run: RunDir, arguments: argparse.Namespace) -> None:
    from echelon.launcher.cluster.jobs import job_of, tasks_of

    if tasks_of(run.path) or arguments.sweep:
        raise CommandError(f"run {run.name} exists, and a sweep cannot be continued. Choose another --name.")
    if os.path.lexists(run.path / "job" / "job.json"):
        job = job_of(run)
        job.verified()
        if not job.state().has_ended:
            raise CommandError(
                f"run {run.name} has not ended: job {job.id} is {job.state().value}. To end it: `echelon cancel {run.name}`."
            )
        (run.path / "job" / "cancelled").unlink(missing_ok=True)


def _with_copy(spec: JobSpec, run: RunDir, arguments: argparse.Namespace) -> JobSpec:
    """The job with its code copied into the run's folder. An installed module is not copied."""
    from echelon.launcher.cluster.snapshot import snapshot

    if arguments.no_snapshot:
        return spec
    folder = run.path.absolute() / "job" / "code"
    if not arguments.module:
        return replace(spec, target=str(snapshot(Path(arguments.script), folder)))
    module = Path(*arguments.script.split("."))
    for file in (module.with_suffix(".py"), module / "__main__.py"):
        if file.is_file():
            return replace(spec, code=str(snapshot(file, folder, Path.cwd()).parents[len(file.parts) - 1]))
    return spec


def _submit_here(spec: JobSpec, arguments: argparse.Namespace, planned: dict[str, object] | None) -> int:
    from echelon.launcher.cluster.background import LocalLauncher
    from echelon.launcher.dragon.launcher import DragonLauncher

    if other := [n for n in (*_SLURM, "time", "exclusive", "no_requeue", "sweep", "dry_run") if getattr(arguments, n)]:
        option = other[0].replace("_", "-")
        raise CommandError(f"--{option} is for Slurm only; --to {arguments.to} starts one run at once, in this session.")
    launcher = DragonLauncher() if arguments.to == "dragon" else LocalLauncher()
    launcher.check(spec)
    with _folder(arguments) as (run, _):
        placed = _with_copy(spec, run, arguments)
        write_json(run.run_json, describe(spec, run, arguments.to, planned=planned))
        jobs = [launcher.submit(placed, run)]
    return _say_where(run, jobs, arguments)


def _dry_run(launcher: SlurmLauncher, spec: JobSpec, sweep: Sequence[object], arguments: argparse.Namespace) -> int:
    from echelon.launcher.cluster.slurm import commands

    name = arguments.name or f"{re.sub(r'[^A-Za-z0-9_-]', '_', stem_of(arguments))[:40]}-{time.strftime('%Y%m%d-%H%M%S')}"
    RunDir.check_name(name)
    script = launcher.script(spec, RunDir(Path(arguments.runs).absolute() / name), len(sweep) or None)
    print(script, end="")
    sys.stdout.flush()
    if commands.available():
        say(f"Slurm: {commands.would_start(script, launcher.options.export)}")
    else:
        say("there is no sbatch here to ask; this is the script that would be submitted")
    return 0


def _say_where(run: RunDir, jobs: Sequence[FolderJob], arguments: argparse.Namespace) -> int:
    where = "" if arguments.runs == "runs" else f" --runs {arguments.runs}"
    number = jobs[0].id.partition("_")[0]
    many = f", {len(jobs)} runs" if len(jobs) > 1 else ""
    follow = f"echelon logs{where} {run.name} --follow\n" if len(jobs) == 1 else ""
    with contextlib.suppress(OSError):  # the job is submitted, even if nothing can be printed
        print(printable(f"job {number}{many}: {run.path}"), flush=True)
        print(printable(f"{follow}echelon jobs{where}\nechelon cancel{where} {run.name}"), file=sys.stderr)
    return 0
