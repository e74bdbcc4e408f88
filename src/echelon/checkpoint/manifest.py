"""The manifest of a checkpoint: its files with their sizes and checksums. Works without torch.

`manifest.json` is written last. It lists every file with its size and the checksums of its blocks, and ends with a checksum
of itself, so that no byte of a checkpoint is trusted unverified.
"""

from __future__ import annotations

import json
import mmap
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from echelon.checkpoint import strict
from echelon.checkpoint.checksum import BLOCK_BYTES, crc32
from echelon.checkpoint.location import Location, exists, open_file, read_file, size_of
from echelon.checkpoint.strict import Wrong, short
from echelon.common.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
)

__all__ = [
    "BLOCK_BYTES",
    "FORMAT",
    "INDEX",
    "MANIFEST",
    "STATE",
    "STATE_KEY",
    "TENSORS",
    "check_files",
    "checksums",
    "committed",
    "in_file",
    "is_named",
    "is_whole",
    "named",
    "problems",
    "read",
    "render",
    "step_of",
]

MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.safetensors"
# The metadata key of the nested state in a tensor file.
STATE_KEY = "state"
FORMAT = 2
# Size limit of a manifest: enough for 300 TB of files. A run's facts about itself are cut to a small part of it.
_MANIFEST_BYTES = 128 << 20
_NAME = re.compile(r"step-([0-9]{8,18})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
TENSORS = re.compile(r"tensors-[0-9]{5,9}\.safetensors")
_RANK = "rank-"
_SUM = re.compile(r"[0-9a-f]{8}")
_SEAL = ',\n "checksum": "'
_LATEST = 253402300799.0  # the end of the year 9999, the last that clocks can show


def named(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Location) -> int:
    """The step that a checkpoint's folder is named after."""
    step = _step_in(path.name)
    if step is None:
        raise CheckpointError(f"a checkpoint's name must be like step-00000100, got {path}.")
    return step


def is_named(path: Location) -> bool:
    """Whether a folder is named like a checkpoint."""
    return _step_in(path.name) is not None


def _step_in(name: str) -> int | None:
    """The step in a folder's name, or None. Each step has exactly one name, so no two folders have the same step."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None and named(int(match[1])) == name else None


def in_file(name: str, offsets: tuple[int, ...]) -> str:
    """A piece's name in its file: the tensor's name, with the offsets unless the piece begins where the tensor does."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


def render(facts: dict[str, Any]) -> bytes:
    """The bytes of a manifest, which end with their own checksum.

    Raises:
        CheckpointError: it would be too large to be read again.
    """
    body = json.dumps({"format": FORMAT, **facts}, indent=1)
    assert body.endswith("\n}")
    text = f'{body[:-2]}{_SEAL}{zlib.crc32(body.encode()):08x}"\n}}\n'.encode()
    if len(text) > _MANIFEST_BYTES:
        raise CheckpointError(f"the manifest must be at most {_MANIFEST_BYTES} bytes, got {len(text)}.")
    return text


def read(folder: Location) -> dict[str, Any]:
    """Read a checkpoint's manifest and verify its own checksum. Does not look at the files that it lists.

    Raises:
        CheckpointNotFoundError, CheckpointUnreadableError, CheckpointCorruptError: it is missing, cannot be read, or is damaged.
        CheckpointError: its format is newer than this echelon.
    """
    path = folder / MANIFEST
    try:
        text = read_file(path, _MANIFEST_BYTES).decode()
    except (FileNotFoundError, NotADirectoryError):
        if not exists(folder):
            raise CheckpointNotFoundError(f"{folder} holds no checkpoint: there is no such folder.", path=str(folder)) from None
        raise CheckpointNotFoundError(f"{folder} holds no checkpoint: it has no {MANIFEST}.", path=str(folder)) from None
    except OSError as error:
        raise CheckpointUnreadableError(f"{path} is there but cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError:
        raise CheckpointCorruptError(f"{path} is not what was written: it is not text.", path=str(path)) from None
    head, _, tail = text.rpartition(_SEAL)
    body = head + "\n}"
    if tail != f'{zlib.crc32(body.encode()):08x}"\n}}\n':
        raise CheckpointCorruptError(f"{path} is not what was written: its checksum differs.", path=str(path))
    # Checked after the checksum, which is the same in every format: a flipped bit must not pass for a newer format.
    version = _format_of(text)
    if version is not None and version > FORMAT:
        raise CheckpointError(f"{folder} has format {version}, but this echelon reads formats up to {FORMAT}. Update echelon.")
    try:
        return _checked(strict.loads(body), _step_in(folder.name))
    except Wrong as error:  # its checksum is right, so only an attacker can have written it
        raise CheckpointCorruptError(
            f"{path} is not what echelon writes: {error}. Do not use this checkpoint.", path=str(path)
        ) from None


def _format_of(text: str) -> int | None:
    try:
        fields = strict.mapping(strict.loads(text), MANIFEST)
        return strict.whole(fields.get("format"), "format")
    except Wrong:
        return None


def _checked(fields: Any, step: int | None) -> dict[str, Any]:
    """The fields of a manifest, after all checks of their form.

    Args:
        step: the one in the folder's name, or None.
    """
    manifest = strict.mapping(fields, MANIFEST)
    if manifest.get("format") != FORMAT or isinstance(manifest["format"], bool):
        raise Wrong(f"its format is {short(manifest.get('format'))}")
    if step not in (None, strict.whole(manifest.get("step"), "the step")):
        raise Wrong(f"it is that of step {manifest['step']}")
    strict.number(manifest.get("time"), "its time", 0, _LATEST)
    for name, value in strict.mapping(manifest.get("metrics", {}), "metrics").items():
        strict.number(value, f"the metric {short(name)}", -1e308, 1e308)
    strict.mapping(manifest.get("config", {}), "config")
    strict.check_depth(manifest)
    check_files(manifest.get("files"))
    ranks = sorted(name for name in manifest["files"] if name.startswith(_RANK))
    for name in (INDEX, STATE, f"{_RANK}00000.safetensors"):
        if name not in manifest["files"]:
            raise Wrong(f"it does not list {name}")
    if ranks != sorted(f"{_RANK}{rank:05d}.safetensors" for rank in range(len(ranks))):
        raise Wrong("it does not list a file of each rank")
    if manifest["files"][INDEX]["size"] > strict.JSON_BYTES:
        raise Wrong(f"{INDEX} is larger than {strict.JSON_BYTES} bytes")
    return manifest


def check_files(files: Any) -> dict[str, Any]:
    """Check a manifest's list of files: name -> size and checksums.

    Raises:
        Wrong: it has another form, or a file name that no checkpoint has.
    """
    for name, entry in strict.mapping(files, "files").items():
        if not _FILE.fullmatch(name) or name == MANIFEST:
            raise Wrong(f"it lists {short(name)}, which is no file of a checkpoint")
        strict.mapping(entry, short(name), {"size", "crc32"})
        size = strict.whole(entry["size"], f"the size of {name}")
        sums = strict.listing(entry["crc32"], f"the checksums of {name}")
        if len(sums) != -(-size // BLOCK_BYTES) or not all(isinstance(each, str) and _SUM.fullmatch(each) for each in sums):
            raise Wrong(f"the checksums of {name}, of {size} bytes, are {short(sums)}")
    return dict(files)


def is_whole(folder: Location) -> bool:
    """Whether a folder has a manifest and all its files in full size. Reads no file but the manifest."""
    try:
        files = read(folder)["files"]
        return all(size_of(folder / name) == entry["size"] for name, entry in files.items())
    except (CheckpointError, OSError):
        return False


def committed(dirpath: Location) -> list[Location]:
    """All whole checkpoints in a folder, oldest first, as this machine sees it: call it on rank 0."""
    return [path for path in named_folders(dirpath) if is_whole(path)]


def named_folders(dirpath: Location) -> list[Location]:
    """All folders named like a checkpoint, whole or not, oldest first.

    Raises:
        CheckpointUnreadableError: the folder exists but cannot be read.
    """
    try:
        inside = dirpath.iterdir() if dirpath.is_dir() else ()
        folders = [(step, path) for path in inside if (step := _step_in(path.name)) is not None]
    except OSError as error:
        raise CheckpointUnreadableError(f"{dirpath} is there but cannot be read: {error.strerror or error}.") from error
    return [path for _, path in sorted(folders, key=lambda each: each[0])]


def problems(
    folder: Location,
    manifest: dict[str, Any],
    part: int = 0,
    parts: int = 1,
    threads: int = 1,
    only: dict[str, set[int]] | None = None,
) -> list[str]:
    """What is wrong with the files of a checkpoint, one line a file. Reads this part's share of all blocks.

    Args:
        only: the blocks to check, by file; by default all.
    Raises:
        CheckpointUnreadableError: a file exists but cannot be read.
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


def _problem(path: Location, entry: dict[str, Any], block: int) -> str | None:
    try:
        with open_file(path) as (file, size):
            if size != entry["size"]:
                return f"{path} is cut off or grown: {size} bytes instead of {entry['size']}"
            if not entry["crc32"]:
                return None
            file.seek(block * BLOCK_BYTES)
            if _checksum(_pieces(file, BLOCK_BYTES)) != int(entry["crc32"][block], 16):
                return f"{path} is not what was written: its checksum differs"
    except CheckpointCorruptError as error:
        return str(error).removesuffix(".")
    except (FileNotFoundError, NotADirectoryError):
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
        total = crc32(piece, total)
    return total


def checksums(data: bytes | mmap.mmap) -> list[str]:
    """The checksums of the blocks of a file that is in memory or mapped."""
    whole = memoryview(data)
    return [f"{crc32(whole[at : at + BLOCK_BYTES]):08x}" for at in range(0, len(whole), BLOCK_BYTES)]
