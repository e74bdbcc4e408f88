"""The manifest of a checkpoint: what it must consist of, byte by byte. Works without torch.

`manifest.json` is written last. It lists every file with its size and the checksums of its blocks, and ends with a checksum
of itself, so that no byte of a checkpoint is trusted unseen.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from echelon.checkpoint.place import Place, size_of
from echelon.contracts.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
)

__all__ = ["BLOCK_BYTES", "FORMAT", "MANIFEST", "committed", "is_whole", "named", "problems", "read", "render", "step_of"]

MANIFEST = "manifest.json"
FORMAT = 2
# Of a file that one checksum covers: ranks and threads share the verification of a file by blocks.
BLOCK_BYTES = 64 << 20
_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SEAL = ',\n "checksum": "'


def named(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Place) -> int:
    """The step that a checkpoint's folder is named after."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not named like a checkpoint, step-00000100.")
    return int(match[1])


def render(facts: dict[str, Any]) -> bytes:
    """The bytes of a manifest, with a checksum of themselves at the end."""
    body = json.dumps({"format": FORMAT, **facts}, indent=1)
    assert body.endswith("\n}")
    return f'{body[:-2]}{_SEAL}{zlib.crc32(body.encode()):08x}"\n}}\n'.encode()


def read(folder: Place) -> dict[str, Any]:
    """The manifest of a checkpoint, whose own checksum is right. The files it lists are not looked at.

    Raises:
        CheckpointNotFoundError, CheckpointUnreadableError, CheckpointCorruptError: three different answers.
        CheckpointError: of a format that is newer than this echelon, or that no echelon reads any more.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            raise CheckpointNotFoundError(f"{folder} holds no checkpoint: there is no such folder.") from None
        raise CheckpointNotFoundError(f"{folder} holds no checkpoint: it has no {MANIFEST}.") from None
    except OSError as error:
        raise CheckpointUnreadableError(f"{path} is there but cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError:
        raise CheckpointCorruptError(f"{path} is not what was written: it is no text.") from None
    head, _, tail = text.rpartition(_SEAL)
    body = head + "\n}"
    if tail != f'{zlib.crc32(body.encode()):08x}"\n}}\n':
        if _format_of(text) == 1:
            raise CheckpointError(f"{folder} has format 1, of a version before the first release; it cannot be read any more.")
        raise CheckpointCorruptError(f"{path} is not what was written: its checksum differs.")
    # Sealed in the same way in every format: else a flipped bit of the number would pass for a newer echelon's.
    version = _format_of(text)
    if version is None or version > FORMAT:
        raise CheckpointError(f"{folder} has format {version}, this echelon reads formats up to {FORMAT}: update echelon.")
    manifest: dict[str, Any] = json.loads(body)
    outside = [name for name in manifest["files"] if not _FILE.fullmatch(name)]
    if outside:  # only somebody who means harm writes one
        raise CheckpointCorruptError(
            f"{path} lists {outside[0]!r}, which is no file of a checkpoint. Do not use this checkpoint."
        )
    match = _NAME.fullmatch(folder.name)
    if match is not None and int(match[1]) != manifest["step"]:
        raise CheckpointCorruptError(f"{path} is not what was written: it is that of step {manifest['step']}.")
    return manifest


def _format_of(text: str) -> int | None:
    try:
        found = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


def is_whole(folder: Place) -> bool:
    """Whether a folder has a manifest, and every file is there in full size. Reads no file but the manifest."""
    try:
        files = read(folder)["files"]
        return all(size_of(folder / name) == entry["size"] for name, entry in files.items())
    except (CheckpointError, OSError):
        return False


def committed(dirpath: Place) -> list[Place]:
    """All whole checkpoints in a folder, oldest first. Looks at this machine's view of the folder: for rank 0."""
    return [path for path in named_folders(dirpath) if is_whole(path)]


def named_folders(dirpath: Place) -> list[Place]:
    """What is named like a checkpoint, whole or not, oldest first.

    Raises:
        CheckpointUnreadableError: there is a folder, and the system does not let us look into it.
    """
    try:
        found = [(int(m[1]), p) for p in (dirpath.iterdir() if dirpath.is_dir() else ()) if (m := _NAME.fullmatch(p.name))]
    except OSError as error:
        raise CheckpointUnreadableError(f"{dirpath} is there but cannot be read: {error.strerror or error}.") from error
    return [path for _, path in sorted(found, key=lambda each: each[0])]


def problems(
    folder: Place,
    manifest: dict[str, Any],
    part: int = 0,
    parts: int = 1,
    threads: int = 1,
    only: dict[str, set[int]] | None = None,
) -> list[str]:
    """What is wrong with the files of a checkpoint, one line each: reads this part's share of all blocks.

    Args:
        only: the blocks of interest, by file.
    Raises:
        CheckpointUnreadableError: a file that the system does not let us read.
    """
    files: dict[str, Any] = manifest["files"]
    blocks = [(name, block) for name, entry in files.items() for block in range(len(entry["crc32"]) or 1)]
    if only is not None:
        blocks = [(name, block) for name, block in blocks if block in only.get(name, ())]
    wrong: dict[str, str] = {}

    def check(job: tuple[str, int]) -> None:
        name, block = job
        if name not in wrong and (problem := _problem(folder / name, files[name], block)):
            wrong[name] = problem

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(check, blocks[part::parts]))
    return list(wrong.values())


def _problem(path: Place, entry: dict[str, Any], block: int) -> str | None:
    try:
        size = size_of(path)
        if size != entry["size"]:
            return f"{path} is cut off or grown: {size} bytes instead of {entry['size']}"
        if not entry["crc32"]:
            return None
        with path.open("rb") as file:
            file.seek(block * BLOCK_BYTES)
            if _checksum(_pieces(file, BLOCK_BYTES)) != int(entry["crc32"][block], 16):
                return f"{path} is not what was written: its checksum differs"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        raise CheckpointUnreadableError(f"{path} is there but cannot be read: {error.strerror or error}.") from error
    return None


def _pieces(file: Any, limit: int) -> Iterator[bytes]:
    while limit > 0 and (piece := file.read(min(limit, 4 << 20))):
        limit -= len(piece)
        yield piece


def _checksum(pieces: Iterator[bytes]) -> int:
    total = 0
    for piece in pieces:
        total = zlib.crc32(piece, total)
    return total
