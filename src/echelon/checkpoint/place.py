"""Where checkpoints lie: a folder of this machine (a Path), or an fsspec URL (a Remote that answers like one)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO, Any

from echelon.contracts.errors import UsageError

__all__ = ["Place", "Remote", "explain", "make_folder", "place", "remove_tree", "size_of", "sync"]


class Remote:
    """A folder or file behind an fsspec URL, with the few methods of Path that checkpoints need.

    Files of an object store appear whole or not at all and cannot be renamed in one step: here a checkpoint is committed by
    writing its manifest last.
    """

    def __init__(self, fs: Any, path: str, protocol: str) -> None:
        self._fs, self._path, self._protocol = fs, path.rstrip("/"), protocol

    def __truediv__(self, name: str) -> Remote:
        return Remote(self._fs, f"{self._path}/{name}", self._protocol)

    def __str__(self) -> str:
        return f"{self._protocol}://{self._path.lstrip('/') if self._protocol == 'memory' else self._path}"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        return self._path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Remote:
        return Remote(self._fs, self._path.rsplit("/", 1)[0], self._protocol)

    def open(self, mode: str = "rb") -> IO[bytes]:
        stream: IO[bytes] = self._fs.open(self._path, mode)
        return stream

    def read_bytes(self) -> bytes:
        data: bytes = self._fs.cat_file(self._path)
        return data

    def write_bytes(self, data: bytes) -> None:
        self._fs.pipe_file(self._path, data)

    def size(self) -> int:
        return int(self._fs.size(self._path))

    def exists(self) -> bool:
        return bool(self._fs.exists(self._path))

    def is_dir(self) -> bool:
        return bool(self._fs.isdir(self._path))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        self._fs.makedirs(self._path, exist_ok=True)

    def iterdir(self) -> list[Remote]:
        self._fs.invalidate_cache()  # another machine may have written since
        if not self._fs.exists(self._path):
            return []
        return [Remote(self._fs, str(p), self._protocol) for p in self._fs.ls(self._path, detail=False)]

    def unlink(self) -> None:
        self._fs.rm_file(self._path)

    def remove_tree(self) -> None:
        self._fs.rm(self._path, recursive=True)

    def download(self, to: Path) -> None:
        self._fs.get_file(self._path, str(to))


Place = Path | Remote


def place(where: str | Path | Remote) -> Place:
    """A Path, or a Remote for a URL such as "s3://bucket/run".

    Raises:
        UsageError: a URL, and fsspec or its part for that protocol is not installed.
    """
    if isinstance(where, (Path, Remote)):
        return where
    if "://" not in where:
        return Path(where)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise UsageError(f"{where} is a URL, which needs fsspec: pip install 'echelon[remote]'.") from None
    try:
        fs, path = url_to_fs(where)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{where} cannot be opened: {error}") from error
    return Remote(fs, path, where.split("://", 1)[0])


def size_of(where: Place) -> int:
    return where.stat().st_size if isinstance(where, Path) else where.size()


def make_folder(where: Place) -> None:
    """Make a folder and those above it, each known to the disk: what lies in a folder that a power cut undoes is lost with it."""
    if not isinstance(where, Path):
        where.mkdir()
        return
    made = [path for path in (where, *where.parents) if not path.exists()]
    where.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync(path.parent)


def remove_tree(where: Place) -> None:
    """Remove a folder and all in it."""
    if isinstance(where, Path):
        shutil.rmtree(where)
    else:
        where.remove_tree()


def sync(path: Path) -> None:
    """To the disk, not only to the kernel: a power cut must not undo what the manifest promises."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def explain(error: BaseException, folder: Place) -> str:
    """An error of writing with what one needs to know to mend it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(folder, Path):
        try:
            where = folder if folder.exists() else folder.parent
            stats = os.statvfs(where)
            text += f" ({folder}, {stats.f_bavail * stats.f_frsize / 1e9:.2f} GB free)"
        except OSError:
            text += f" ({folder})"
    return text
