"""`echelon cancel`: end a submitted job. The job saves if it can, and is not queued again."""

from __future__ import annotations

import argparse

from echelon.cli.parser import runs_folder
from echelon.common.errors import EchelonError
from echelon.common.terminal import printable
from echelon.contracts.run_dir import RunDir, find_run
from echelon.launcher.protocol import FolderJob

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the name or the folder of a run or of a sweep")
    parser.add_argument("--runs", type=runs_folder, default="runs", metavar="FOLDER", help="the folder of runs (default: runs)")


def execute(arguments: argparse.Namespace) -> int:
    from echelon.launcher.cluster.jobs import job_of, tasks_of

    path = find_run(arguments.run, arguments.runs)
    bad = 0
    for each in tasks_of(path) or [path]:
        try:
            message = _cancel(job_of(RunDir(each)))
        except EchelonError as error:
            if each == path:
                raise
            bad, message = 1, f"{each}: {error}"  # one damaged run of a sweep does not keep the others running
        print(printable(message))
    return bad


def _cancel(job: FolderJob) -> str:
    job.verified()  # before its id is used
    state = job.state()
    if state.has_ended:
        return f"job {job.id} has ended: {state.value}"
    job.cancel()
    return f"job {job.id} is cancelled"
