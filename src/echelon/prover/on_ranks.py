"""What a proof runs in other processes: its target as a row says, and references, with their logs where a run fails."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import RankFailedError, UsageError
from echelon.common.files import read_end
from echelon.launcher.functions.launch import launch
from echelon.loop.target import Target
from echelon.prover.matrix import Row
from echelon.prover.parts import load_records
from echelon.prover.ran import Ran
from echelon.prover.rank import Replay, run_row

__all__ = ["OnRanks"]

_BRIEF = 2  # the second, since an optimizer's first may hide a scale, and has no state yet


@dataclass(frozen=True)
class OnRanks:
    """
    Args:
        folder: for what ranks leave.
        updates: to compare.
        timeout_s: for each launch.
        logs: where those of a run that fails are kept; None is a new temporary folder.
    """

    target: Target
    folder: Path
    updates: int
    seed: int
    timeout_s: float | None
    logs: Path | None

    def row(self, row: Row, here: Path, dtype: torch.dtype) -> Ran:
        """Run the target as `row` says; what its ranks leave goes to `here`."""
        here.mkdir()
        self.launch(run_row, row.ranks, self.target, row, str(here), self.updates_of(row), dtype, self.seed)
        records = load_records([here / f"rank{r}.pt" for r in range(row.ranks)])
        if any(r["wants_constant_draws"] for r in records) and not row.constant_draws:
            shutil.rmtree(here)
            return self.row(replace(row, constant_draws=True), here, dtype)
        ran_as = replace(
            row,
            constant_draws=any(r["constant_draws"] for r in records),
            compiles=any(r["compiles"] for r in records),
            half=next((r["half"] for r in records if r["half"]), None),
        )
        return Ran(ran_as, here, records, dtype)

    def updates_of(self, row: Row) -> int:
        """How many of them are compared."""
        return min(self.updates, _BRIEF) if row.brief else self.updates

    def replay(self, ran: Ran, folder: Path) -> Replay:
        """What a reference on the micro-batches of `ran` needs; what it leaves goes to `folder`."""
        return Replay(self.target, ran.row, ran.files, str(folder), ran.dtype, self.seed)

    def launch(self, fn: Callable[..., dict[str, Any]], ranks: int, *args: Any) -> dict[str, Any]:
        """Run on ranks, and return rank 0's value. Logs are left only if it fails."""
        logs = self.folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        found: dict[str, Any] = launch(fn, ranks=ranks, args=args, quiet=True, timeout_s=self.timeout_s, run_dir=logs)[0]
        return found

    def failure(self, error: RankFailedError, name: str) -> tuple[str, str]:
        """The verdict and the error's text; the logs that it names are put where they stay, under this name."""
        if isinstance(error.__cause__, UsageError):
            return "not possible", str(error.__cause__)
        logs = self.folder / "logs"
        kept = Path(tempfile.mkdtemp(prefix="echelon-")) if self.logs is None else self.logs / name
        shutil.copytree(logs, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pkl"))
        return "failed", f"{self._said_last(error, kept)}{error}".replace(str(logs), str(kept))

    def _said_last(self, error: RankFailedError, logs: Path) -> str:
        """What the script said as it ended by itself, which no traceback has."""
        found = sorted(logs.rglob(f"rank{error.rank}.log"))
        text = read_end(found[-1]).decode("utf-8", "replace").strip() if found else ""
        last = text.rpartition("\n")[2].strip()
        if not last or last in str(error):
            return ""
        hint = " (options of prove stand before the script, those after it are the script's own)" if self.target.args else ""
        return f"the script's last words: {last}{hint}\n"
