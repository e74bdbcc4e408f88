"""`echelon jobs`: what was submitted, where it is, how far it came; of a sweep, a table of its results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from echelon.contracts.errors import EchelonError
from echelon.contracts.run_dir import RunDir
from echelon.launcher.protocol import FolderJob

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="only this run or sweep: its name or its folder")
    parser.add_argument("--runs", default="runs", metavar="FOLDER", help="the folder of runs (default: runs)")


def execute(arguments: argparse.Namespace) -> int:
    from echelon.launcher.jobs import find_run, job_of, jobs_below, tasks_of

    root = Path(arguments.runs)
    if arguments.run is None:
        jobs = list(jobs_below(root))
    else:
        path = find_run(arguments.run, root)
        jobs = [job_of(RunDir(task)) for task in tasks_of(path) or [path]]
    if not jobs:
        print(f"no job was submitted into {root}", file=sys.stderr)
        return 0
    keys = list(dict.fromkeys(key for job in jobs for key, _ in job.said.get("sweep", ())))
    shown = [["run", "job", "state", "ranks", "starts", *keys, "step", "loss", ""]]
    print("\n".join(_aligned([*shown, *(_row(job, keys) for job in jobs)])))
    return 0


def _row(job: FolderJob, keys: Sequence[str]) -> list[str]:
    values = dict(job.said.get("sweep", ()))
    try:
        state, why = job.state().value, job.why()
    except EchelonError as error:  # a controller that does not answer: the folder still tells the rest
        state, why = "?", str(error)
    last = _last_record(job.run)
    path = job.run.path
    name = f"{path.parents[1].name}/{path.name}" if path.parent.name == "tasks" else path.name
    ranks = f"{job.spec.nodes}x{job.spec.ranks}" if job.spec.nodes > 1 else str(job.spec.ranks)
    loss = last.get("loss")
    shown = f"{loss:.6g}" if isinstance(loss, float) else ""
    row = [name, job.id, state, ranks, str(len(job.attempts)), *(str(values.get(key, "")) for key in keys)]
    row += [str(last.get("step", "")), shown, "" if state == "done" else why]
    return ["".join(c if c.isprintable() else "?" for c in cell) for cell in row]  # the files may be another's: no escapes


def _last_record(run: RunDir) -> dict[str, object]:
    """The newest training record of metrics.jsonl, read from its end: the file may be large."""
    try:
        with open(run.metrics, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 65536))
            tail = file.read()
    except OSError:
        return {}
    import json

    for line in reversed(tail.splitlines()):
        try:
            record = json.loads(line)
        except ValueError:  # cut off at either end
            continue
        if isinstance(record, dict) and "loss" in record:
            return record
    return {}


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
