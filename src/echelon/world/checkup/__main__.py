"""`python -m echelon.world.checkup`: one rank's part of `echelon doctor`, under any launcher.

It writes each result at once, as a line of JSON with rank, name and value: results from before a hang or crash are not lost. A
part that fails writes its error, and the next part follows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from echelon.common.errors import EchelonError
from echelon.common.files import open_to_append
from echelon.common.redact import redacted
from echelon.contracts.rank import RankInfo
from echelon.world.checkup import host

__all__ = ["main"]

MARK = "echelon-doctor "  # begins each line, to tell it from other output
_LONGEST = 400  # characters of an error: srun cuts longer lines in two


class Teller:
    """Writes a rank's results into a file of its own, or to standard output."""

    def __init__(self, rank: int, folder: str | None) -> None:
        self.rank = rank
        self._file = 1 if folder is None else open_to_append(Path(folder) / f"rank{rank}.jsonl")

    def __call__(self, name: str, value: Any) -> None:
        os.write(self._file, f"{MARK}{json.dumps([self.rank, name, value])}\n".encode())

    def close(self) -> None:
        if self._file != 1:
            os.close(self._file)

    def attempt(self, name: str, find: Callable[[], Any]) -> bool:
        """Write a part's value, or its error. Returns whether it has a value."""
        self("doing", name)
        try:
            self(name, find())
        except Exception as error:  # any error: the other parts must still run
            text = str(error) if isinstance(error, EchelonError) else f"{type(error).__name__}: {error}"
            if os.environ.get("ECHELON_FULL_TRACEBACK"):
                traceback.print_exc()
            self("error", [name, redacted(" ".join(text.split()))[:_LONGEST]])
            return False
        return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m echelon.world.checkup")
    parser.add_argument("--to", metavar="FOLDER", help="folder for each rank's lines; default: standard output")
    parser.add_argument(
        "--wait", type=float, default=30.0, metavar="S", help="time limit of each step that waits for other ranks"
    )
    parser.add_argument("--quick", action="store_true", help="small messages and matrices")
    parser.add_argument("--script", metavar="FILE", help="report a checksum of this script")
    arguments = parser.parse_args(argv)
    info = RankInfo.from_env()
    tell = Teller(info.rank, arguments.to)
    tell("here", {"host": host.name(), "node": info.node_rank, "size": info.world_size})
    for name, find in host.PARTS.items():
        tell.attempt(name, find)
    if arguments.script:
        tell.attempt("script", lambda: host.code_of(arguments.script))

    from echelon.world.checkup import ranks  # torch, whose import may fail

    tell.attempt("torch", ranks.versions)
    wait = timedelta(seconds=arguments.wait)
    if tell.attempt("joined", lambda: ranks.join(info, wait)):
        for name, measure in ranks.PARTS.items():
            # A rank that lost another one in a collective would wait for it in the next.
            if not tell.attempt(name, lambda measure=measure: measure(quick=arguments.quick)):  # type: ignore[misc]
                break
        else:
            tell.attempt("left", ranks.leave)
    tell("end", True)
    tell.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
