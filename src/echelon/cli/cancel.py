"""`echelon cancel`: end a submitted job. It saves if it can, and is not started again."""

from __future__ import annotations

import argparse
from pathlib import Path

from echelon.contracts.run_dir import RunDir

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the name or the folder of a run or of a sweep")
    parser.add_argument("--runs", default="runs", metavar="FOLDER", help="the folder of runs (default: runs)")


def execute(arguments: argparse.Namespace) -> int:
    from echelon.launcher.jobs import find_run, job_of, tasks_of

    path = find_run(arguments.run, Path(arguments.runs))
    for each in tasks_of(path) or [path]:
        job = job_of(RunDir(each))
        state = job.state()
        if state.has_ended:
            print(f"job {job.id} has ended: {state.value}")
        else:
            job.cancel()
            print(f"job {job.id} is cancelled")
    return 0
