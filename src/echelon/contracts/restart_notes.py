"""Notes that the attempts of one run leave for each other and for their launcher, in the attempt's folder and one variable."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from echelon.common.files import open_file
from echelon.contracts.run_dir import RunDir, read_json, write_json

__all__ = ["RESTART_VARIABLE", "begins_anew", "has_begun", "note_begun", "note_loader", "read_loaders"]

RESTART_VARIABLE = "ECHELON_RESTART"


def begins_anew() -> bool:
    """Whether `echelon run --restart` starts this attempt over: checkpoints of earlier runs are not restored."""
    return os.environ.get(RESTART_VARIABLE) == "1"


def note_begun() -> None:
    """Called on one rank once earlier checkpoints are set aside: later attempts of this command resume from its own."""
    run = RunDir.current()
    if run is not None and begins_anew():
        os.close(open_file(run.attempt_path / "begun", os.O_WRONLY | os.O_CREAT))


def has_begun(attempt: Path) -> bool:
    """Whether `note_begun` was called in the attempt with this folder."""
    return (attempt / "begun").exists()


def note_loader(global_batch: int, accumulation: int, *, divisible: int, ranks_per_place: int, fixed: bool = False) -> None:
    """Tell the launcher which numbers of ranks a loader can serve. Called by rank 0 alone; without a launcher it does nothing.

    Args:
        divisible: must be divisible by the number of ranks divided by `ranks_per_place`.
        ranks_per_place: number of ranks with the same samples, as with tensor parallelism.
        fixed: the loader resumes only with the same number of ranks.
    """
    run = RunDir.current()
    if run is None:
        return
    known = read_loaders(run.attempt_path)
    new = {
        "global_batch": global_batch,
        "accumulation": accumulation,
        "divisible": divisible,
        "ranks_per_place": ranks_per_place,
        "fixed": fixed,
    }
    if new not in known:
        with contextlib.suppress(OSError):  # on a full disk, a restart uses all ranks that are left
            write_json(run.attempt_path / "loaders.json", {"loaders": [*known, new]})


def read_loaders(attempt: Path) -> list[dict[str, Any]]:
    """The notes that `note_loader` wrote into the folder of an attempt."""
    loaders = (read_json(attempt / "loaders.json") or {}).get("loaders", [])
    return [loader for loader in loaders if _is_loader(loader)] if isinstance(loaders, list) else []


def _is_loader(value: Any) -> bool:
    numbers = ("global_batch", "accumulation", "divisible", "ranks_per_place")
    return isinstance(value, dict) and all(type(value.get(n)) is int and 0 < value[n] < 1 << 62 for n in numbers)
