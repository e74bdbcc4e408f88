"""`echelon run`: start a script on ranks of this machine, show its progress, leave a run folder and a report."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.cli import traces
from echelon.cli.parser import runs_folder
from echelon.cli.script import check_module, check_script
from echelon.common.errors import CommandError, EchelonError, require
from echelon.common.files import working_folder
from echelon.common.machine import DEVICE_VARIABLE, missing_interface, package_version
from echelon.common.redact import redacted_words
from echelon.common.terminal import one_line, printable, say
from echelon.contracts.events import read_lines
from echelon.contracts.overrides import Overrides
from echelon.contracts.records import exit_record
from echelon.contracts.run_dir import TRACK_VARIABLE, RunDir, write_json
from echelon.contracts.stopping import REQUEUE
from echelon.contracts.version import __version__
from echelon.launcher.job import JobSpec, Outcome, parse_duration, parse_hang_timeout, parse_rank_range

__all__ = [
    "add_arguments",
    "add_shared",
    "checks_in_env",
    "decided",
    "describe",
    "device_in_env",
    "execute",
    "finish",
    "plan_first",
    "stem_of",
    "track_in_env",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        default="auto",
        metavar="N|auto|MIN:MAX",
        help="processes to start; auto: one per GPU, else per core; MIN:MAX starts MAX, and restarts with the ranks left",
    )
    parser.add_argument(
        "--bind",
        default="none",
        metavar="cores|devices|both|none",
        choices=("cores", "devices", "both", "none"),
        help="cores: each rank has its own cores, on its GPU's NUMA node, for a machine without other jobs; devices: each rank "
        "sees only its GPU, by CUDA_VISIBLE_DEVICES (default: none: it sees all, and LOCAL_RANK picks one)",
    )
    parser.add_argument("--name", metavar="NAME", help="the run's folder below runs/; if it exists, it gets one more attempt")
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="S", help="seconds between asking ranks to stop and killing them"
    )
    parser.add_argument(
        "--stop-after",
        metavar="TIME",
        help="save and end with exit code 75 after this time, such as 55m; the same command continues",
    )
    parser.add_argument(
        "--restart", action="store_true", help="start over even if the run's folder has progress, and set that aside"
    )
    parser.add_argument(
        "--find-batch",
        action="store_true",
        help="first find the largest micro-batch that fits, by trying, and train with it; the global batch stays the same",
    )
    parser.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="serve the run's numbers to Prometheus at /metrics; 0 takes a free port"
    )
    parser.add_argument(
        "--metrics-bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address for --metrics-port; the default serves this machine only (default: 127.0.0.1)",
    )
    add_shared(parser)


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` and `submit` share. Call it last: it also adds the script and its arguments."""
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="restart all ranks up to N times after a failure"
    )
    parser.add_argument(
        "--stall-after",
        metavar="TIME",
        help="without a step for so long, say which rank is behind and where (default: $ECHELON_STALL_AFTER, else 60s; longer "
        "for slow steps, first ones, checkpoints)",
    )
    parser.add_argument(
        "--hang-timeout",
        metavar="TIME|none",
        help="end the ranks as failed after this time without any progress (default: $ECHELON_HANG_TIMEOUT, else 10m; longer "
        "for slow steps, first ones, evaluations, checkpoints)",
    )
    parser.add_argument(
        "--layout",
        metavar="LAYOUT",
        help="layout of the model over the ranks, instead of the script's: a word such as fsdp, or axes such as dp_shard=2,tp=4; "
        "modules that the script wraps by hand stay as they are",
    )
    parser.add_argument("--strategy", dest="layout", help=argparse.SUPPRESS)  # the older word
    parser.add_argument(
        "--plan",
        metavar="DEVICE",
        help="first plan a rank's memory on this device (h100-sxm, FILE.toml, a size such as 80GiB); start only if it fits",
    )
    parser.add_argument("--bitwise", action="store_true", help="bit-equal parameters on any number of ranks that divides --parts")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device of every rank, whatever the script asks for (default: the script's choice, else one GPU per rank, if "
        "there are GPUs)",
    )
    traces.add_arguments(parser)
    parser.add_argument(
        "--track",
        metavar="NAMES",
        help="also send the run's numbers to tensorboard, wandb, mlflow, trackio or csv; several with commas between them",
    )
    parser.add_argument(
        "--check-collectives",
        action="store_true",
        help="before every collective, compare the calls of the ranks: a mismatch that would hang or give wrong numbers silently "
        "becomes an error that names the ranks; a collective takes about ten times as long (TORCH_DISTRIBUTED_DEBUG=DETAIL)",
    )
    parser.add_argument("--parts", type=int, default=4, metavar="N", help="with --bitwise: micro-batches per update (default: 4)")
    parser.add_argument(
        "--runs", type=runs_folder, default="runs", metavar="FOLDER", help="folder in which run folders are made (default: runs)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in `python -m`")
    parser.add_argument("script", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's arguments")


def stem_of(arguments: argparse.Namespace) -> str:
    """First part of the name of a run that was given none."""
    return str(arguments.script).rpartition(".")[2] if arguments.module else Path(arguments.script).stem


def execute(arguments: argparse.Namespace) -> int:
    least, ranks = parse_rank_range(arguments.ranks)
    planned = plan_first(arguments, ranks, least=least)  # before the environment is set: the plan neither tracks nor traces
    os.environ.update(device_in_env(arguments.device) | track_in_env(arguments.track) | traces.in_env(arguments, ranks))
    require(arguments.max_restarts >= 0, "--max-restarts", "at least 0", arguments.max_restarts, kind=CommandError)
    if least is not None and arguments.max_restarts == 0:
        raise CommandError(
            f"--ranks {arguments.ranks} allows fewer ranks after a restart, but --max-restarts is 0. Give --max-restarts N too, "
            f"or --ranks {ranks}."
        )
    job = _job(arguments, least, ranks)
    over_its_head = decided(arguments, ranks if least is not None else None)
    if arguments.find_batch:
        over_its_head = replace(over_its_head, accumulation=_found_batch(arguments, ranks))
    if over_its_head != Overrides():
        os.environ.update(over_its_head.to_env())
    with _endpoint(arguments) as serve:  # before the run's folder: a port in use must leave no folder behind
        if wrong := missing_interface(os.environ):
            say(wrong)  # only a warning: a script may open no connection
        run = RunDir.create(arguments.runs, arguments.name, stem=stem_of(arguments), begin=False)
        run.hold()
        run = run.next_attempt()
        write_json(run.run_json, describe(job, run, planned=planned))
        serve(run)
        outcome = _outcome(job, run)

    from echelon.diagnosis.failure import render
    from echelon.observe.sinks.model import short_path

    if outcome.failure is not None:
        shown = render(outcome.failure, ranks)
        _say(shown)
        _say_why(run, shown)
        if saved := _latest(run, "checkpoint_saved").get("path"):
            same = _same_command(run, named=arguments.name is not None, restart=job.restart)
            _say(f"echelon: last saved as {one_line(short_path(str(saved)))}; {same} goes on from there")
    if outcome.note:
        _say(f"echelon: {outcome.note}")
    if outcome.exit_code == REQUEUE and outcome.failure is None:
        _say_why(run, "")  # a rank may have got the signal, not the launcher
        _say_how_to_go_on(run, named=arguments.name is not None, restart=job.restart)
    finish(run)
    return outcome.exit_code


@contextlib.contextmanager
def _endpoint(arguments: argparse.Namespace) -> Iterator[Callable[[RunDir], None]]:
    """Serve metrics in this context, if --metrics-port is given. Yields a function that takes the run's folder."""
    if arguments.metrics_port is None:
        yield lambda _: None
        return
    from echelon.observe.endpoint import Endpoint

    endpoint = Endpoint(arguments.metrics_port, arguments.metrics_bind)

    def serve(run: RunDir) -> None:
        endpoint.serve(run)
        _say(f"echelon: metrics at {endpoint.address}")

    try:
        yield serve
    finally:
        endpoint.close()


def _outcome(job: JobSpec, run: RunDir) -> Outcome:
    from echelon.launcher.local.hang import hang_timeout

    hang_s, is_given = hang_timeout(job.hang_timeout_s)
    if job.ranks == 1 and job.max_restarts == 0 and job.stop_after_s is None and not (is_given and hang_s):
        from echelon.launcher.local.in_process import run_here

        return run_here(job, run)
    from echelon.launcher.local.run import run_local
    from echelon.observe.sinks.progress import RunScreen

    return run_local(job, run, screen=RunScreen(run))


def _job(arguments: argparse.Namespace, least: int | None, ranks: int) -> JobSpec:
    if not 0 <= arguments.grace < math.inf:
        raise CommandError(f"--grace must be a number of seconds of at least 0, got {arguments.grace:g}.")
    working_folder()  # before there is a run's folder
    if arguments.module:
        check_module(arguments.script)
    else:
        check_script(arguments.script)
    return JobSpec(
        arguments.script,
        "module" if arguments.module else "script",
        tuple(arguments.args),
        ranks,
        arguments.max_restarts,
        arguments.grace,
        least,
        parse_duration(arguments.stop_after, "--stop-after") if arguments.stop_after is not None else None,
        arguments.restart,
        bind=arguments.bind in ("cores", "both"),
        own_device=arguments.bind in ("devices", "both"),
        stall_after_s=parse_duration(arguments.stall_after, "--stall-after") if arguments.stall_after is not None else None,
        env=checks_in_env(arguments),
        hang_timeout_s=parse_hang_timeout(arguments.hang_timeout, "--hang-timeout")
        if arguments.hang_timeout is not None
        else None,
    )


def _say_why(run: RunDir, shown: str) -> None:
    """Print the `explained` line of exit.json, the cause found in the evidence of all ranks, unless `shown` has it."""
    explained = (exit_record(run.exit_json) or {}).get("explained")
    if explained and explained not in shown:
        _say(f"why: {one_line(explained)}")


def _say_how_to_go_on(run: RunDir, *, named: bool, restart: bool) -> None:
    same, stopped = _same_command(run, named=named, restart=False), _latest(run, "stopped")
    where = f" after update {stopped['step']}" if "step" in stopped else ""
    if "step" in stopped and not stopped.get("saved", True) and isinstance(stopped.get("latest"), str):
        _say(
            f"echelon: stopped{where}, last saved as {one_line(stopped['latest'])}: {same} goes on from there if the script "
            "restores it"
        )
    elif "step" in stopped and not stopped.get("saved", True):
        _say(f"echelon: stopped{where}, and nothing was saved (no DistributedCheckpointSaver): {same} starts over")
    else:
        _say(f"echelon: stopped{where}; go on with {_same_command(run, named=named, restart=restart)}")


def _same_command(run: RunDir, *, named: bool, restart: bool) -> str:
    return "the same command" + ("" if named else f" and --name {run.name}") + (", without --restart" if restart else "")


def plan_first(
    arguments: argparse.Namespace, ranks: int, nodes: int = 1, *, least: int | None = None
) -> dict[str, object] | None:
    """Plan memory as --plan asks, before there is a run folder or a job. None without --plan.

    Args:
        ranks: on all nodes.
        least: the fewest ranks with which the run may continue after a restart.
    """
    if arguments.plan is None:
        return None
    require(not arguments.module, "--plan", "given with the file of a script", "-m", kind=CommandError)
    check_script(arguments.script)
    from echelon.cli.plan import refuse_unfit

    given = (arguments.script, arguments.args)
    planned = refuse_unfit(arguments.plan, arguments.layout, ranks, nodes, *given)
    if least not in (None, ranks):
        assert least is not None
        refuse_unfit(arguments.plan, arguments.layout, least, nodes, *given, planned_ranks=ranks)
    return planned


def _found_batch(arguments: argparse.Namespace, ranks: int) -> int:
    """Find the accumulation of the largest micro-batch that fits, before there is a run folder."""
    fits = not (arguments.module or arguments.bitwise)
    require(fits, "--find-batch", "given with the file of a script, and without --bitwise", True, kind=CommandError)
    from echelon.cli.plan import found_batch

    many = found_batch(arguments.layout, ranks, arguments.script, arguments.args)
    _say(f"echelon: the largest micro-batch that fits needs accumulate={many}")
    return many


def decided(arguments: argparse.Namespace, planned_ranks: int | None = None) -> Overrides:
    """The settings of --layout, --bitwise and --parts, which override the script's own.

    Raises:
        UsageError: the number of parts is not a power of two.
    """
    if arguments.bitwise and (arguments.parts < 1 or arguments.parts & (arguments.parts - 1)):
        raise CommandError(f"--parts must be a power of two, such as 4, got {arguments.parts}.")
    return Overrides(layout=arguments.layout, parts=arguments.parts if arguments.bitwise else None, planned_ranks=planned_ranks)


def device_in_env(device: str | None) -> dict[str, str]:
    """The variable that carries --device to the ranks."""
    return {} if device is None else {DEVICE_VARIABLE: device}


def track_in_env(track: str | None) -> dict[str, str]:
    """The variable that carries --track to the ranks.

    Raises:
        UsageError: an unknown tracker.
    """
    if track is None:
        return {}
    from echelon.observe.sinks.trackers import names_of

    return {TRACK_VARIABLE: ",".join(names_of(track))}


def checks_in_env(arguments: argparse.Namespace) -> dict[str, str]:
    """The variable that makes torch check collectives in the ranks, for --check-collectives."""
    return {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if arguments.check_collectives else {}


def describe(
    job: JobSpec, run: RunDir, launcher: str = "local", *, planned: dict[str, object] | None = None
) -> dict[str, object]:
    """The contents of run.json.

    Args:
        planned: the result of --plan.
    """
    versions = {"python": platform.python_version(), "echelon": __version__}
    versions |= {name: package_version(name) for name in ("torch", "numpy")}
    return {
        "name": run.name,
        "command": ["echelon", *redacted_words(sys.argv[1:])],
        "script": job.target,
        "args": redacted_words(job.args),
        "ranks": job.ranks * job.nodes,
        "launcher": launcher,
        "host": socket.gethostname(),
        "cwd": working_folder(),
        "started": time.time(),
        "versions": versions,
        "git": _git(Path(job.target).resolve().parent),
        **({} if planned is None else {"planned": planned}),
    }


def _git(folder: Path) -> dict[str, object] | None:
    """The commit, and whether files differ from it; None outside a repository or without git."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5, check=True)
        status = subprocess.run(
            ["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())}


def _latest(run: RunDir, name: str) -> dict[str, Any]:
    """The last event of this name that rank 0 wrote in the last attempt; empty if there is none."""
    attempts = run.attempts()
    events = read_lines(attempts[-1] / run.events(0).name) if attempts else []
    return next((event for event in reversed(list(events)) if event.get("event") == name), {})


def finish(run: RunDir) -> None:
    """Print the paths of the run, its checkpoint and its report. A report that cannot be written does not fail the run."""
    from echelon.observe import report

    lines = [f"run        {run.path}"]
    newest = max(run.checkpoints.glob("step-*"), default=None)
    if newest is not None:
        lines.append(f"checkpoint {newest}")
    lines += traces.written(run)
    try:
        lines.append(f"report     {report.write(run)}")
    except (OSError, EchelonError) as error:
        lines.append(f"report     not written: {error}")
    except Exception as error:  # a bug in the report must not cost the run's exit code
        lines.append(
            f"report     not written: {error!r}. Nothing of the run is lost. `echelon report {run.path}` tries again: report "
            "its error as a bug."
        )
    _say("\n".join(lines))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(printable(text), file=sys.stderr, flush=True)
