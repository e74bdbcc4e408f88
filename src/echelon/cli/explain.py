"""`echelon explain`: say why a run stopped, from its folder alone. The run may still be running, and on another machine."""

from __future__ import annotations

import argparse
import json

from echelon.cli.parser import runs_folder
from echelon.common.error_pages import PAGES, as_text
from echelon.common.errors import CommandError, require
from echelon.contracts.run_dir import RunDir, find_run

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say why a run stopped: which rank failed first, and why. Exit code 0: the cause is known, or the run is well; 1: the "
        "cause is unknown. With an error's code, such as E-LAYOUT, say what the error means."
    )
    parser.add_argument("run", metavar="RUN", help="a run's name or its folder, or the code of an error")
    parser.add_argument("--attempt", type=int, metavar="N", help="only this start of the ranks (default: all, the last in full)")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.add_argument("--runs", type=runs_folder, default="runs", metavar="FOLDER", help="the folder of runs (default: runs)")


def execute(arguments: argparse.Namespace) -> int:
    from echelon.diagnosis import Evidence, explain, show

    if arguments.run in PAGES:
        print(as_text(arguments.run))
        return 0
    folder = find_run(arguments.run, arguments.runs)
    numbers = [int(path.name) for path in RunDir(folder).attempts()]
    if not numbers:
        raise CommandError(f"{folder} has no attempts: nothing was started in it.")
    if arguments.attempt is not None:
        require(arguments.attempt in numbers, "--attempt", f"one of {_ranges(numbers)}", arguments.attempt, kind=CommandError)
        numbers = [arguments.attempt]
    verdicts = [(evidence, explain(evidence)) for evidence in (Evidence.of(folder, number) for number in numbers)]
    if arguments.json:
        print(json.dumps({"run": str(folder), "attempts": show.as_json(verdicts)}, indent=2))
    else:
        print(show.text(verdicts))
    return 0 if verdicts[-1][1].is_known else 1


def _ranges(numbers: list[int]) -> str:
    return (
        f"{numbers[0]} to {numbers[-1]}" if numbers == list(range(numbers[0], numbers[-1] + 1)) else ", ".join(map(str, numbers))
    )
