"""What lies in a folder of TorchTNT's checkpoints: echelon's own ones by TorchTNT's names, and those that TorchTNT wrote."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from echelon.checkpoint import commit, manifest
from echelon.checkpoint.location import Location, Remote, location
from echelon.common.errors import CheckpointUnreadableError
from echelon.compat.torchtnt.utils.checkpoint_path import CheckpointPath

__all__ = ["at", "exists", "has_metadata", "hide", "parsed", "paths"]

logger = logging.getLogger(__name__)

# Whole checkpoints of TorchTNT's savers have one of these; ours have a manifest in their place.
_THEIRS = (".metadata", ".snapshot_metadata")
_HIDDEN = ".staged-removed-"


def at(path: str, file_system: Any = None) -> Location:
    """A path, or what an fsspec file system has there."""
    if file_system is None:
        return location(path)
    protocol = file_system.protocol if isinstance(file_system.protocol, str) else file_system.protocol[0]
    return Remote(file_system, path.removeprefix(f"{protocol}://"), protocol)


def paths(
    dirpath: str,
    metadata_fname: str | Sequence[str] | None = None,
    metric_name: str | None = None,
    file_system: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[CheckpointPath]:
    """The checkpoints in a folder, oldest first, as the group's first rank sees them. Collective."""
    names = [metadata_fname] if isinstance(metadata_fname, str) else list(metadata_fname or [])
    folder = at(dirpath, file_system)
    found = commit.on_rank0(lambda: [p.path for p in _paths(dirpath, folder, names, metric_name)], folder, process_group)
    return [CheckpointPath.from_str(path) for path in found]


def _paths(dirpath: str, folder: Location, metadata: list[str], metric_name: str | None) -> list[CheckpointPath]:
    parent = os.path.abspath(dirpath) if isinstance(folder, Path) else dirpath.rstrip("/")
    try:
        if not folder.exists():
            logger.warning("Input dirpath doesn't exist: %s", dirpath)
            return []
        names = [each.name for each in folder.iterdir() if each.is_dir()]
    except OSError as error:
        raise CheckpointUnreadableError(f"{dirpath} is there but cannot be read: {error.strerror or error}.") from error
    if not names:
        logger.warning("Input dirpath doesn't contain any subdirectories: %s", dirpath)
    found = []
    for path in parsed(parent, names):
        if metric_name and (path.metric_data is None or path.metric_data.name != metric_name):
            continue
        if metadata and not has_metadata(folder / path.path.rpartition("/")[2], metadata):
            logger.warning("Snapshot metadata (%s) missing from %s! Skipping this path", metadata, path)
            continue
        found.append(path)
    return found


def parsed(parent: str, names: Sequence[str]) -> list[CheckpointPath]:
    """Those of the names that are names of checkpoints, oldest first."""
    found = []
    for name in names:
        with contextlib.suppress(ValueError):
            found.append(CheckpointPath.from_str(f"{parent}/{name}"))
    return sorted(found)


def exists(
    path: str,
    metadata_fname: str | Sequence[str] | None,
    file_system: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> bool:
    """Whether a checkpoint is there, as the group's first rank sees it. Collective."""
    names = [metadata_fname] if isinstance(metadata_fname, str) else list(metadata_fname or [])
    if not names:
        return False
    folder = at(path, file_system)
    return commit.on_rank0(lambda: has_metadata(folder, names), folder, process_group)


def has_metadata(folder: Location, names: Sequence[str]) -> bool:
    """Whether a folder has one of these files. A checkpoint of echelon's counts as one that has TorchTNT's."""
    ours = manifest.MANIFEST if any(name in _THEIRS for name in names) else None
    return any((folder / name).exists() for name in [*names, *([ours] if ours else [])])


def hide(path: Location, remove: Callable[[Location], None]) -> None:
    """Remove a checkpoint so that a kill leaves no half of it under a valid name. Rank 0 alone."""
    if isinstance(path, Remote):
        if (path / manifest.MANIFEST).exists():
            (path / manifest.MANIFEST).unlink()
        remove(path)
        return
    hidden = path.with_name(f"{_HIDDEN}{path.name}")
    os.rename(path, hidden)
    remove(hidden)
