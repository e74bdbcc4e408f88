"""Why the batch system ended a job, by the job's output: its daemons write there when no process of the job can any more."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from echelon.common.files import read_end
from echelon.contracts.run_dir import RunDir

__all__ = ["OUT_OF_MEMORY", "why_ended"]

OUT_OF_MEMORY = "OUT OF MEMORY"
_LAST_BYTES, _LAST_LINES = 1 << 14, 20
# All starts of a job share the output. A line belongs to the last attempt if that wrote nothing long after the line.
_LATER_S = 300.0
# Only lines that give a reason: without one, a user cancelled the job, or one of its processes failed.
_ENDED = re.compile(
    r"^slurmstepd(?:-\S{1,255})?: (?:error: )?\*\*\* (?:JOB|STEP) .{1,300}?"
    r"CANCELLED AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) DUE TO ([A-Z]{2,20}(?: [A-Z]{2,20}){0,3})"
)
_NO_MEMORY = re.compile(r"^slurmstepd(?:-\S{1,255})?: error: Detected \d{1,9} oom[-_]kill event")


def why_ended(run: RunDir) -> str:
    """The last reason in the job's output for its end, such as "TIME LIMIT" in Slurm's words; empty if there is none.

    Args:
        run: with the attempt in question, the run's last.
    """
    try:
        text = read_end(run.path / "job" / "output.log", _LAST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    for line in reversed(text.splitlines()[-_LAST_LINES:]):
        if _NO_MEMORY.search(line):
            return OUT_OF_MEMORY
        if (match := _ENDED.search(line)) and _is_of(run.attempt_path, match[1]):
            return match[2]
    return ""


def _is_of(attempt: Path, when: str) -> bool:
    newest = 0.0
    for path in (attempt, attempt / "rank0.log"):
        with contextlib.suppress(OSError):
            newest = max(newest, os.lstat(path).st_mtime)
    try:
        return time.mktime(time.strptime(when, "%Y-%m-%dT%H:%M:%S")) + _LATER_S > newest
    except (ValueError, OverflowError):
        return False
