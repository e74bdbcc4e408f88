"""`echelon report`: read a run folder and write its report.html."""

from __future__ import annotations

import argparse
from pathlib import Path

from echelon.contracts.errors import UsageError
from echelon.contracts.run_dir import RunDir
from echelon.contracts.terminal import printable

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run's folder, such as runs/NAME")


def execute(arguments: argparse.Namespace) -> int:
    from echelon.observe import report

    folder = Path(arguments.run)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a run folder.")
    print(printable(str(report.write(RunDir(folder)))))
    return 0
