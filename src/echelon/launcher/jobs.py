"""Jobs that were submitted before, found again by their folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from echelon.contracts.errors import UsageError
from echelon.contracts.run_dir import RunDir
from echelon.launcher.background import LocalJob
from echelon.launcher.kubernetes import KubernetesJob
from echelon.launcher.protocol import FolderJob, read_spec
from echelon.launcher.slurm.job import SlurmJob

__all__ = ["find_run", "job_of", "jobs_below", "tasks_of"]

_LAUNCHERS: dict[str, type[FolderJob]] = {
    "local": LocalJob,
    "dragon": LocalJob,
    "slurm": SlurmJob,
    "kubernetes": KubernetesJob,
}


def job_of(run: RunDir) -> FolderJob:
    """
    Raises:
        UsageError: no job was submitted into this folder.
    """
    _, said = read_spec(run)
    return _LAUNCHERS[str(said["launcher"])](run)


def tasks_of(path: Path) -> list[Path]:
    """The run folders of a sweep, in order; none if the folder is not one's."""
    return sorted((p.parent.parent for p in path.glob("tasks/*/job/job.json")), key=lambda p: int(p.name))


def jobs_below(root: Path) -> Iterator[FolderJob]:
    """The jobs of all runs in a folder of runs, those that were submitted last at the end."""
    found = [p for p in root.glob("*/job") if p.is_dir()]
    for folder in sorted(found, key=lambda p: p.stat().st_mtime):
        paths = tasks_of(folder.parent) or ([folder.parent] if (folder / "job.json").exists() else [])
        yield from (job_of(RunDir(path)) for path in paths)


def find_run(name: str, root: Path) -> Path:
    """The folder of a run, given as a path or as a name below `root`.

    Raises:
        UsageError: there is none.
    """
    for path in (Path(name), root / name):
        if (path / "job").is_dir() or (path / "attempts").is_dir():
            return path
    raise UsageError(f"run {name!r}: there is no such folder, neither here nor in {root}.")
