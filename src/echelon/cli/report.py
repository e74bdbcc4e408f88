"""`echelon report`: read a run folder and write its report.html, or one page that compares several runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from echelon.cli.parser import runs_folder
from echelon.common.errors import CommandError, EchelonError
from echelon.common.terminal import printable
from echelon.contracts.run_dir import RunDir, find_run

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", metavar="RUN", help="a run's name or its folder; several are compared")
    parser.add_argument("--runs", type=runs_folder, default="runs", metavar="FOLDER", help="the folder of runs (default: runs)")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the page to write (default: the run's report.html; for several runs comparison.html in the folder of the first)",
    )


def execute(arguments: argparse.Namespace) -> int:
    from echelon.observe import report

    folders = [find_run(name, arguments.runs) for name in arguments.run]
    runs = [RunDir(folder) for folder in folders]
    page = runs[0].report if len(runs) == 1 else folders[0] / "comparison.html"
    if arguments.output is not None:
        page = Path(arguments.output)
        # Writing replaces the file of this name, even if that is a device or standard output.
        special = os.path.abspath(page).startswith(("/dev/", "/proc/")) or (os.path.lexists(page) and not page.is_file())
        if not page.parent.is_dir() or special:
            raise CommandError(f"--output must be a file in a folder that exists, got {page}.")
    try:
        if len(runs) == 1 and arguments.output is None:
            report.write(runs[0])
        else:
            report.compare(runs, page)
    except OSError as error:  # another user's folder, a read-only mount, a full disk
        raise EchelonError(f"{page} cannot be written: {error.strerror}. --output FILE writes the page elsewhere.") from None
    print(printable(str(page)))
    return 0
