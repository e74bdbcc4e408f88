"""Commit a checkpoint so that a kill at any moment leaves the old ones and either the new one or nothing of it.

Each rank writes and syncs its own files in a private folder `.staged-step-N`. When all have, rank 0 writes `manifest.json`
with every file's size and checksums, syncs the folder, and publishes it as `step-N` by one rename. An object store cannot
rename: there, ranks write to `step-N` itself, and the manifest, written last, is the commit. A folder without a manifest
is no checkpoint. Nothing is ever overwritten or removed before something newer is committed.
Functions are collective unless they say otherwise: only rank 0 looks at the folder, and tells the other ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from echelon.checkpoint import checksum, structure
from echelon.checkpoint import manifest as manifests
from echelon.checkpoint.layout import this_rank
from echelon.checkpoint.location import (
    Location,
    Remote,
    create,
    exists,
    explain,
    location,
    make_folder,
    remove_tree,
    replace_file,
    sync,
)
from echelon.checkpoint.manifest import MANIFEST, committed, is_whole, named, named_folders, step_of
from echelon.common import errors
from echelon.common.errors import CheckpointCorruptError, CheckpointError
from echelon.common.terminal import rank_ranges
from echelon.world import agree, rank0

__all__ = [
    "candidates",
    "commit",
    "committed",
    "discard",
    "is_saved",
    "latest",
    "note_metrics",
    "on_rank0",
    "publish",
    "set_aside",
    "stage",
    "step_of",
    "verify",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_SHOWN = 8  # names of files
_STAGED, _REMOVED = ".staged-", ".staged-removed-"


def on_rank0(act: Callable[[], T], folder: Location | None = None, group: dist.ProcessGroup | None = None) -> T:
    """Like `agree.from_rank0`, but every rank raises rank 0's CheckpointError; an OSError becomes a CheckpointWriteError.

    Args:
        folder: where `act` works; it is named in the text of an OSError.
        group: its first rank acts; by default all ranks.
    """

    def guarded() -> Any:
        try:
            return {"value": act()}
        except CheckpointError as error:
            return {"error": agree.in_json(error)}
        except OSError as error:
            return {"error": ["CheckpointWriteError", f"rank 0: {explain(error, folder) if folder is not None else error}", {}]}

    answer = agree.from_rank0(guarded, group)
    if "error" in answer:
        kind, text, fields = answer["error"]
        raise getattr(errors, kind)(text, **fields)
    value: T = answer["value"]
    return value


def sweep(dirpath: Location) -> None:
    """Remove what killed saves left. Rank 0 alone, and only while it holds the folder's lease, which protects live saves.

    What cannot be removed stays, with a warning: leftovers never keep a run from starting.
    """
    if not dirpath.is_dir():
        return
    names = {path.name for path in named_folders(dirpath)} if isinstance(dirpath, Remote) else set()
    leftovers: list[Location] = list(dirpath.iterdir())
    for leftover in leftovers:
        try:
            if leftover.name.startswith(_STAGED) or (leftover.name in names and not (leftover / MANIFEST).exists()):
                remove_tree(leftover)
        except OSError as error:
            logger.warning("could not remove %s; it stays: %s", leftover, error)


def is_saved(dirpath: Location, step: int, name: str | None = None) -> bool:
    """Whether a step is committed already, the same on all ranks. Writes nothing.

    Args:
        name: the checkpoint's folder, here and below; by default it is named after the step.
    """
    return on_rank0(lambda: is_whole(dirpath / (name or named(step))), dirpath)


def stage(dirpath: Location, step: int, name: str | None = None) -> Location | None:
    """Make an empty folder for the ranks to write to. Returns None if this step is committed already."""
    called = name or named(step)

    def prepare() -> str | None:
        make_folder(dirpath)
        final = dirpath / called
        if is_whole(final):
            return None
        if isinstance(final, Remote):
            final.mkdir()
            return final.name
        return _fresh(dirpath / f"{_STAGED}{called}").name

    staged = on_rank0(prepare, dirpath)
    return None if staged is None else dirpath / staged


def _fresh(staged: Location) -> Location:
    """Make an empty folder of that name; with a random suffix if the present owner of the name cannot be removed."""
    for name in (staged.name, f"{staged.name}-{secrets.token_hex(8)}"):
        path = staged.parent / name
        try:
            if exists(path):
                remove_tree(path)
        except OSError as error:
            logger.warning("could not remove %s; it stays: %s", path, error)
            continue
        path.mkdir()
        break
    return path


def publish(staged: Location, step: int, files: dict[str, Any], facts: dict[str, Any], name: str | None = None) -> Location:
    """Make a staged folder the checkpoint of its step. All ranks have finished writing when this returns.

    Args:
        files: this rank's files, by name: size and checksums.
    """
    files_of_all = rank0.gather(files)
    joined = {file: entry for each in files_of_all[0] for file, entry in each.items()} if files_of_all is not None else {}
    on_rank0(lambda: commit(staged, step, joined, facts, name) and None, staged)
    return staged.parent / (name or named(step))


def commit(staged: Location, step: int, files: dict[str, Any], facts: dict[str, Any], name: str | None = None) -> Location:
    """The last steps of a save, by rank 0 alone: manifest, sync, rename."""
    final: Location = staged.parent / (name or named(step))
    text = manifests.render({"step": step, "time": time.time(), **facts, "files": dict(sorted(files.items()))})
    if isinstance(staged, Remote):
        (staged / MANIFEST).write_bytes(text)
        return final
    path = staged / MANIFEST
    with create(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(staged)
    if exists(final):  # it is not whole: otherwise `stage` had returned None
        set_aside(final, "corrupt")
    os.rename(staged, str(final))
    sync(staged.parent)
    return final


def note_metrics(folder: Location, metrics: dict[str, float]) -> None:
    """Write numbers into the manifest of a checkpoint that was committed without them. Rank 0 alone, while it holds the lease.

    The manifest is replaced atomically: a kill leaves the old or the new one. Metrics that it has already keep their values.
    """
    note(folder, "metrics", {**metrics, **manifests.read(folder).get("metrics", {})})


def note(folder: Location, name: str, value: Any) -> None:
    """Add a fact to the manifest of a checkpoint that was committed without it. As in `note_metrics`."""
    facts = manifests.read(folder)
    facts.pop("format")
    if facts.get(name) != value:
        replace_file(folder / MANIFEST, manifests.render({**facts, name: value}), durable=True)


def discard(staged: Location) -> None:
    """Give up a staged folder. Rank 0 alone; what cannot be removed now is swept later."""
    try:
        if exists(staged):  # if it does not, it was renamed, and something later failed
            remove_tree(staged)
    except OSError as error:
        logger.warning("could not remove %s: %s", staged, error)


def set_aside(path: Location, why: str) -> None:
    """Rename a folder that is not a valid checkpoint, so that it stays for inspection but is never restored. Rank 0 alone."""
    if isinstance(path, Remote):
        with contextlib.suppress(FileNotFoundError):
            (path / MANIFEST).unlink()
        logger.warning("%s is %s: its manifest was removed, so it is no longer a checkpoint", path, why)
        return
    to = path.with_name(f"{why}-{path.name}")
    again = 1
    while exists(to):
        to = path.with_name(f"{why}-{path.name}.{again}")
        again += 1
    os.rename(path, to)
    sync(path.parent)
    logger.warning("%s was set aside as %s", path, to.name)


def candidates(dirpath: Location) -> list[Location]:
    """All folders named like a checkpoint, newest first, the same on all ranks.

    Raises:
        CheckpointUnreadableError: the folder exists but cannot be read.
    """
    names = on_rank0(lambda: [p.name for p in reversed(named_folders(dirpath))])
    return [dirpath / name for name in names]


def latest(dirpath: Path | str | Location) -> Location | None:
    """The newest whole checkpoint, the same on all ranks; None if there is none. Does not read its files."""
    folder = location(dirpath)
    newest = on_rank0(lambda: [p.name for p in committed(folder)][-1:])
    return folder / newest[0] if newest else None


def verify(folder: Location) -> dict[str, Any]:
    """Check all files against their checksums and against the format; ranks share the work. Returns the manifest.

    Raises:
        CheckpointNotFoundError, CheckpointUnreadableError, CheckpointCorruptError: names the file.
    """
    manifest = on_rank0(lambda: manifests.read(folder))
    rank, size = this_rank()
    unreadable = None
    wrong: list[str] = []
    try:
        wrong = manifests.problems(folder, manifest, rank, size, threads=checksum.threads())
        wrong += structure.problems(folder, manifest, rank, size)
    except errors.CheckpointUnreadableError as error:
        unreadable = str(error)
    except Exception as error:  # object stores' libraries have their own errors; other ranks must not wait
        unreadable = f"{folder} is there but cannot be read: {error!r}."
    problems = agree.kinds([unreadable, wrong])
    for text, _ in problems:
        if text is not None:
            raise errors.CheckpointUnreadableError(text)
    lines = list(dict.fromkeys(line for _, each in problems for line in each))
    if lines:
        _refuse_other_storage(folder, manifest)
        raise CheckpointCorruptError(
            f"{'; '.join(lines[:_MOST_SHOWN])}{'; ...' if len(lines) > _MOST_SHOWN else ''}.", path=str(folder)
        )
    return manifest


def _refuse_other_storage(folder: Location, manifest: dict[str, Any]) -> None:
    """Refuse an incomplete checkpoint that is whole for other ranks, because machines see different folders. Collective.

    Raises:
        CheckpointCorruptError: on all ranks, if they do not see the same files.
    """
    missing: list[list[str]] = agree.gather([name for name in manifest["files"] if not (folder / name).exists()][:_MOST_SHOWN])
    if all(each == missing[0] for each in missing):
        return
    nowhere: set[str] = min(map(set, missing), key=len)
    lost = {r: sorted(set(each) - nowhere) for r, each in enumerate(missing) if set(each) - nowhere}
    raise CheckpointCorruptError(
        f"{folder} must be the same folder for all ranks, but is another one for {rank_ranges(lost)}, without files that others "
        f"see: {', '.join(next(iter(lost.values())))}. Put it on storage that all machines share, or copy it to each.",
        path=str(folder),
    )


def retire(dirpath: Location, to_delete: list[str]) -> None:
    """Remove checkpoints by name. Rank 0 alone, after a newer one is committed."""
    for name in to_delete:
        path = dirpath / name
        if isinstance(path, Remote):
            (path / MANIFEST).unlink()  # first: half a removal is no checkpoint
            path.remove_tree()
            continue
        # Renamed first: a removal that is killed leaves no half checkpoint under a valid name.
        hidden = path.with_name(f"{_REMOVED}{path.name}")
        os.rename(path, hidden)
        remove_tree(hidden)
