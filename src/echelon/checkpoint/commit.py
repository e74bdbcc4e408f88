"""Commit a checkpoint so that a kill at any moment leaves the old ones and either the new one or nothing of it.

Ranks write into a private folder `.staged-step-N`; when all have, rank 0 syncs it, writes `manifest.json` with every file's
size and checksum, and publishes it as `step-N` by one rename. A folder without a valid manifest is no checkpoint. Nothing is
overwritten.
Collective: every rank calls `stage` and `publish`; only rank 0 looks at the folder, the others believe it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from echelon.contracts.errors import CheckpointError, CheckpointNotFoundError
from echelon.world import agree

__all__ = ["committed", "latest", "manifest_of", "publish", "stage", "step_of", "verify"]

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")


def stage(dirpath: Path, step: int) -> Path | None:
    """A fresh folder for the ranks to write to; None if this step is committed already."""

    def prepare() -> str | None:
        dirpath.mkdir(parents=True, exist_ok=True)
        for leftover in dirpath.glob(".staged-*"):  # of a save that was killed
            shutil.rmtree(leftover)
        if manifest_of(dirpath / _name(step)) is not None:
            return None
        staged = dirpath / f".staged-{_name(step)}"
        staged.mkdir()
        return str(staged)

    staged = agree.from_rank0(prepare)
    return None if staged is None else Path(staged)


def publish(staged: Path, step: int, facts: dict[str, Any]) -> Path:
    """Make a staged folder the checkpoint of its step. All ranks have finished writing when this returns."""
    final = staged.parent / _name(step)
    agree.gather(True)  # every rank's files are complete

    def commit() -> None:
        files = sorted(p for p in staged.rglob("*") if p.is_file())
        for path in files:
            _sync(path)
        manifest = {
            "format": FORMAT,
            "step": step,
            "files": {str(p.relative_to(staged)): [p.stat().st_size, _checksum(p)] for p in files},
            **facts,
        }
        path = staged / MANIFEST
        path.write_text(json.dumps(manifest, indent=1))
        for each in (path, staged):
            _sync(each)
        if final.exists():  # without a manifest, or `stage` would have said so: litter of another program
            shutil.rmtree(final)
        os.rename(staged, final)
        _sync(staged.parent)

    agree.from_rank0(commit)
    return final


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint whose files are all there in full size; None if it is no valid checkpoint."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        whole = all((folder / name).stat().st_size == size for name, (size, _) in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if whole else None


def verify(folder: Path) -> None:
    """Compare every file with the checksum it was committed with. Collective; rank 0 reads.

    Raises:
        CheckpointNotFoundError: no valid checkpoint in the folder.
        CheckpointError: a file is not what was written; names it.
    """

    def check() -> None:
        manifest = manifest_of(folder)
        if manifest is None:
            raise CheckpointNotFoundError(f"{folder} holds no checkpoint: its manifest is missing, or a file is cut off.")
        for name, (_, checksum) in manifest["files"].items():
            if _checksum(folder / name) != checksum:
                raise CheckpointError(f"{folder / name} is not what was written: its checksum differs. Use another checkpoint.")

    agree.from_rank0(check)


def _checksum(path: Path) -> int:
    total = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            total = zlib.crc32(chunk, total)
    return total


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def committed(dirpath: Path) -> list[Path]:
    """All valid checkpoints in a folder, oldest first. Looks at this machine's view of the folder: for rank 0."""
    found = [(int(m[1]), p) for p in (dirpath.iterdir() if dirpath.is_dir() else ()) if (m := _NAME.fullmatch(p.name))]
    return [p for _, p in sorted(found) if manifest_of(p) is not None]


def latest(dirpath: Path) -> Path | None:
    """The newest valid checkpoint, the same on all ranks; None if there is none. Collective."""

    def newest() -> str | None:
        found = committed(dirpath)
        return str(found[-1]) if found else None

    path = agree.from_rank0(newest)
    return None if path is None else Path(path)


def prune(dirpath: Path, keep: int) -> None:
    """Remove all valid checkpoints but the newest `keep`. Collective. A folder that cannot be removed is an error on rank 0."""

    def remove() -> None:
        for path in committed(dirpath)[:-keep]:
            # Renamed first: a removal that is killed leaves no half checkpoint under a valid name.
            doomed = path.with_name(f".staged-removed-{path.name}")
            os.rename(path, doomed)
            shutil.rmtree(doomed)

    if keep < 1:
        raise CheckpointError(f"keep {keep}: at least one checkpoint must stay.")
    agree.from_rank0(remove)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _sync(path: Path) -> None:
    """To the disk, not only to the kernel: a power cut must not undo what the manifest promises."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
