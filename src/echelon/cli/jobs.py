"""`echelon jobs`: list submitted jobs with state and progress; for a sweep, a table of its results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from echelon.cli.parser import runs_folder
from echelon.common.errors import CommandError, EchelonError
from echelon.common.files import parse_object, read_end
from echelon.common.terminal import columns, one_line, printable
from echelon.contracts.run_dir import RunDir, find_run
from echelon.launcher.protocol import FolderJob

__all__ = ["add_arguments", "execute"]

_WIDEST = 300
_AT_ONCE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="only this run or sweep: its name or its folder")
    parser.add_argument("--runs", type=runs_folder, default="runs", metavar="FOLDER", help="the folder of runs (default: runs)")


def execute(arguments: argparse.Namespace) -> int:
    from echelon.launcher.cluster.jobs import folders_below, tasks_of

    root = Path(arguments.runs)
    if arguments.run is None:
        paths = list(folders_below(root))
    else:
        path = find_run(arguments.run, arguments.runs)
        paths = tasks_of(path) or [path]
    if not paths:
        print(printable(f"no job was submitted into {root}"), file=sys.stderr)
        return 0
    jobs = [_job(path) for path in paths]
    if arguments.run is not None and len(jobs) == 1 and isinstance(jobs[0], str):
        raise CommandError(jobs[0])
    keys = list(dict.fromkeys(key for job in jobs if not isinstance(job, str) for key, _ in job.said.get("sweep", ())))
    shown = [["run", "job", "state", "ranks", "starts", *keys, "step", "loss", ""]]
    with ThreadPoolExecutor(_AT_ONCE) as pool:  # Slurm's controller may be slow, and serves all users
        shown += pool.map(lambda path, job: _row(path, job, keys), paths, jobs)
    print("\n".join(columns([[_cell(text) for text in row] for row in shown])))
    return 0


def _job(path: Path) -> FolderJob | str:
    """The job of a folder, or its error as text, so that one bad folder does not hide the other jobs."""
    from echelon.launcher.cluster.jobs import job_of

    try:
        return job_of(RunDir(path))
    except (EchelonError, OSError) as error:
        return str(error)


def _row(path: Path, job: FolderJob | str, keys: Sequence[str]) -> list[str]:
    name = f"{path.parents[1].name}/{path.name}" if path.parent.name == "tasks" else path.name
    if isinstance(job, str):
        return [name, "", "?", "", "", *("" for _ in keys), "", "", job]
    values = dict(job.said.get("sweep", ()))
    try:
        job_state, why = job.look()
        state = job_state.value
    except (EchelonError, OSError) as error:  # the controller does not answer: the other columns come from the folder
        state, why = "?", str(error)
    last = _last_record(job.run)
    ranks = f"{job.spec.nodes}x{job.spec.ranks}" if job.spec.nodes > 1 else str(job.spec.ranks)
    loss = last.get("loss")
    shown = f"{loss:.6g}" if isinstance(loss, float) else ""
    row = [name, job.id, state, ranks, str(len(job.attempts)), *(str(values.get(key, "")) for key in keys)]
    return [*row, str(last.get("step", "")), shown, "" if state == "done" else why]


def _cell(text: str) -> str:
    """One line of limited length: the files may be another user's."""
    text = one_line(text)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _last_record(run: RunDir) -> dict[str, object]:
    """The newest training record of metrics.jsonl. Reads the end of the file only, as it may be large."""
    try:
        tail = read_end(run.metrics)
    except OSError:
        return {}
    for line in reversed(tail.splitlines()):
        record = parse_object(line)  # None for a line that is cut off
        if record is not None and "loss" in record:
            return record
    return {}
