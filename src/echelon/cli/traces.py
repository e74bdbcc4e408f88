"""`--profile` and `--memory-snapshot` of `run` and `submit`: the variables for the ranks, and where the files are."""

from __future__ import annotations

import argparse
import os

from echelon.contracts.profile import MEMORY_VARIABLE, VARIABLE, Profile
from echelon.contracts.run_dir import RunDir

__all__ = ["add_arguments", "in_env", "written"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        metavar="steps=A:B[,ranks=0+3]",
        help="trace these steps, on rank 0 or on these ranks or all; into profiles/ of the run's folder",
    )
    parser.add_argument(
        "--memory-snapshot", action="store_true", help="record what each GPU's memory is used for, into profiles/"
    )


def in_env(arguments: argparse.Namespace, ranks: int) -> dict[str, str]:
    """The variables that carry both options to the ranks.

    Raises:
        UsageError: steps or ranks that do not exist.
    """
    variables = {MEMORY_VARIABLE: "1"} if arguments.memory_snapshot else {}
    if arguments.profile is not None:
        wanted = Profile.parse(arguments.profile)
        wanted.check_ranks(ranks)
        variables[VARIABLE] = str(wanted)
    return variables


def written(run: RunDir) -> list[str]:
    """A line about the files of the latest attempt; empty if neither option is set."""
    if not os.environ.get(VARIABLE) and not os.environ.get(MEMORY_VARIABLE):
        return []
    attempts = run.attempts()
    folder = run.profiles / (attempts[-1] if attempts else run.attempt_path).name
    count = len(list(folder.glob("[!.]*")))
    none = "none: training through echelon did not reach these steps, or tracing failed, as the rank's log says"
    return [f"profiles   {f'{folder} ({count} files)' if count else none}"]
