"""`--profile` and `--memory-snapshot` of `run` and `submit`: what they say to the ranks, and where these have written it."""

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
        help="trace these steps, of rank 0 or of these ranks or of all: profiles/ in the run's folder",
    )
    parser.add_argument(
        "--memory-snapshot", action="store_true", help="write down what each GPU's memory was used for: profiles/, too"
    )


def in_env(arguments: argparse.Namespace, ranks: int) -> dict[str, str]:
    """The variables by which they reach the ranks.

    Raises:
        UsageError: steps or ranks that there are not.
    """
    variables = {MEMORY_VARIABLE: "1"} if arguments.memory_snapshot else {}
    if arguments.profile is not None:
        wanted = Profile.parse(arguments.profile)
        wanted.check_ranks(ranks)
        variables[VARIABLE] = str(wanted)
    return variables


def written(run: RunDir) -> list[str]:
    """A line on the files of the latest attempt; none if nothing was asked for."""
    if not os.environ.get(VARIABLE) and not os.environ.get(MEMORY_VARIABLE):
        return []
    attempts = run.attempts()
    folder = run.profiles / (attempts[-1] if attempts else run.attempt_path).name
    count = len(list(folder.glob("[!.]*")))
    none = "none: training through echelon did not come to these steps, or the rank's log says what went wrong"
    return [f"profiles   {f'{folder} ({count} files)' if count else none}"]
