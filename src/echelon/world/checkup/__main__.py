"""`python -m echelon.world.checkup`: one rank's part of `echelon doctor`, whoever started it.

It tells what it finds as lines of JSON, each a rank, a name and a value, as soon as it knows them: what a rank that hangs or dies
had said before is not lost. A part that fails tells its error, and the next goes on without it.
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

MARK = "echelon-doctor "  # begins each line: whatever else is printed here is not ours
_LONGEST = 400  # characters of an error: srun cuts longer lines in two


class Teller:
    """Writes what a rank has to say into a file of its own, or to standard output."""

    def __init__(self, rank: int, folder: str | None) -> None:
        self.rank = rank
        self._file = 1 if folder is None else open_to_append(Path(folder) / f"rank{rank}.jsonl")

    def __call__(self, name: str, value: Any) -> None:
        os.write(self._file, f"{MARK}{json.dumps([self.rank, name, value])}\n".encode())

    def close(self) -> None:
        if self._file != 1:
            os.close(self._file)

    def attempt(self, name: str, find: Callable[[], Any]) -> bool:
        """Tell a part's value, or why it has none; whether it has one."""
        self("doing", name)
        try:
            self(name, find())
        except Exception as error:  # whatever it is, the other parts are to be told, too
            text = str(error) if isinstance(error, EchelonError) else f"{type(error).__name__}: {error}"
            if os.environ.get("ECHELON_FULL_TRACEBACK"):
                traceback.print_exc()
            self("error", [name, redacted(" ".join(text.split()))[:_LONGEST]])
            return False
        return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m echelon.world.checkup")
    parser.add_argument("--to", metavar="FOLDER", help="where each rank's lines go; by default to standard output")
    parser.add_argument("--wait", type=float, default=30.0, metavar="S", help="for other ranks, at each step")
    parser.add_argument("--quick", action="store_true", help="small messages and matrices")
    parser.add_argument("--script", metavar="FILE", help="of which each host tells a checksum")
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
            # Whoever lost another in one collective would wait for it in the next.
            if not tell.attempt(name, lambda measure=measure: measure(quick=arguments.quick)):  # type: ignore[misc]
                break
        else:
            tell.attempt("left", ranks.leave)
    tell("end", True)
    tell.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
