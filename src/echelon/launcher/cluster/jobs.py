"""Jobs submitted earlier, found by their folders."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from echelon.common.errors import ClusterError
from echelon.contracts.run_dir import RunDir
from echelon.launcher.cluster.background import LocalJob
from echelon.launcher.cluster.slurm.job import SlurmJob
from echelon.launcher.protocol import FolderJob, read_spec

__all__ = ["folders_below", "job_of", "tasks_of"]

_NUMBER = re.compile(r"[0-9]{1,9}")

_LAUNCHERS: dict[str, type[FolderJob]] = {
    "local": LocalJob,
    "dragon": LocalJob,
    "slurm": SlurmJob,
}


def job_of(run: RunDir) -> FolderJob:
    """The job that was submitted into a folder.

    Raises:
        UsageError: no job was submitted into it.
    """
    _, submitted = read_spec(run, believe=False)
    kind = _LAUNCHERS.get(str(submitted.get("launcher")))
    if kind is None:
        raise ClusterError(f"{run.path} holds no submitted job (job/job.json names an unknown launcher).")
    return kind(run)


def tasks_of(path: Path) -> list[Path]:
    """The run folders of a sweep, in order; empty if the folder is not a sweep's."""
    tasks = [p.parents[1] for p in path.glob("tasks/*/job/job.json") if _NUMBER.fullmatch(p.parents[1].name)]
    return sorted(tasks, key=lambda p: int(p.name))


def folders_below(root: Path) -> Iterator[Path]:
    """The run folders of all jobs in a folder of runs, the last submitted at the end."""
    folders = []
    for folder in root.glob("*/job"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            if folder.is_dir():
                folders.append((folder.stat().st_mtime, folder))
    for _, folder in sorted(folders):
        yield from tasks_of(folder.parent) or ([folder.parent] if os.path.lexists(folder / "job.json") else [])
