"""Where checkpoints are stored: a folder of this machine (a Path), or an fsspec URL (a Remote, with some methods of Path)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from echelon.common import files
from echelon.common.arguments import is_path
from echelon.common.errors import CheckpointCorruptError, CheckpointOptionError, require
from echelon.common.files import sync, write_whole

__all__ = [
    "Location",
    "Remote",
    "absolute",
    "create",
    "exists",
    "explain",
    "explain_for_rank",
    "location",
    "make_folder",
    "open_file",
    "read_file",
    "remove_tree",
    "replace_file",
    "size_of",
    "sync",
]

# Errors of opening something other than a file, such as a circular link. A run never leaves such a thing.
_NO_FILE = (errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EISDIR, errno.ENODEV)


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

    def write_bytes(self, data: bytes) -> None:
        self._fs.pipe_file(self._path, data)

    def size(self) -> int:
        """The size of the file.

        Raises:
            CheckpointCorruptError: it exists, but is not a file.
        """
        known = self._fs.info(self._path)
        if known.get("type", "file") != "file" or not isinstance(known.get("size"), int):
            raise CheckpointCorruptError(f"{self} is a {known.get('type')}, not a file.", path=str(self))
        return int(known["size"])

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
        known = self._fs.info(self._path)
        if known.get("type") == "directory" and not known.get("islink"):
            self._fs.rm(self._path, recursive=True)
        else:
            self._fs.rm_file(self._path)


Location = Path | Remote


def absolute(folder: Location) -> Location:
    """The same folder, even if the program changes its working directory."""
    return folder.absolute() if isinstance(folder, Path) else folder


def location(where: str | os.PathLike[str] | Remote, name: str = "dirpath") -> Location:
    """A Path, or a Remote for a URL such as "s3://bucket/run". A URL of local files, such as file:///runs/a, gives a Path.

    Args:
        name: of the parameter, for the message.
    Raises:
        UsageError: it is no path; or it is a URL, and fsspec or its package for that protocol is not installed.
    """
    if isinstance(where, (Path, Remote)):
        return where
    require(is_path(where), name, "a folder's path, or a URL such as 's3://bucket/run'", where, kind=CheckpointOptionError)
    where = os.fspath(where)
    if "://" not in where:
        return Path(where)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise CheckpointOptionError(f"{where} is a URL, which needs fsspec. Run: pip install 'echelon[remote]'.") from None
    try:
        fs, path = url_to_fs(where)
    except (ImportError, ValueError) as error:
        raise CheckpointOptionError(f"{where} cannot be opened: {error}") from error
    if "file" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol):
        return Path(path)  # a Path has renames, locks and links, which fsspec lacks
    return Remote(fs, path, where.split("://", 1)[0])


def size_of(where: Location) -> int:
    """The size of a file.

    Raises:
        CheckpointCorruptError: it exists, but is not a regular file.
    """
    if isinstance(where, Remote):
        return where.size()
    with _no_file_is_corrupt(where):
        status = os.stat(where)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ENODEV, "it is no regular file")
        return status.st_size


@contextlib.contextmanager
def _no_file_is_corrupt(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_FILE:
            raise CheckpointCorruptError(f"{where} is not a file: {error.strerror}.", path=str(where)) from None
        raise


@contextlib.contextmanager
def open_file(where: Location) -> Iterator[tuple[IO[bytes], int]]:
    """Context with a file open for reading, and its size. Opens regular files only: opening a pipe would wait for ever.

    Raises:
        CheckpointCorruptError: it exists, but is not a regular file.
    """
    size = size_of(where)
    if isinstance(where, Remote):
        with where.open("rb") as stream:
            yield stream, size
        return
    with _no_file_is_corrupt(where):
        # Non-blocking: a pipe may have taken the file's place since the check above.
        opened = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(opened, "rb") as file:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointCorruptError(f"{where} is not a file.", path=str(where))
        yield file, status.st_size


def read_file(where: Location, limit: int) -> bytes:
    """All bytes of a file.

    Raises:
        CheckpointCorruptError: it is not a regular file, or is larger than `limit`.
    """
    with open_file(where) as (file, size):
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise CheckpointCorruptError(f"{where} is larger than the {limit} bytes that it may have.", path=str(where))
    return data


def create(where: Path) -> IO[bytes]:
    """Create a file to write. Never opens an existing file, nor follows a link.

    Raises:
        FileExistsError: something has that name.
    """
    return open(files.open_file(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb")


def replace_file(where: Location, data: bytes, *, durable: bool = False) -> None:
    """Write a small file atomically, in place of whatever has its name. A link is replaced, not followed.

    Args:
        durable: a power cut also leaves the old file or the new one.
    """
    if isinstance(where, Remote):
        where.write_bytes(data)
    else:
        write_whole(where, data, 0o666, durable=durable)


def exists(where: Location) -> bool:
    """Whether anything has that name, even a broken link."""
    return os.path.lexists(where) if isinstance(where, Path) else where.exists()


def make_folder(where: Location) -> None:
    """Make a folder and its parents, and sync each to disk: if a power cut undoes a folder, all files in it are lost."""
    if not isinstance(where, Path):
        where.mkdir()
        return
    made = [path for path in (where, *where.parents) if not path.exists()]
    where.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync(path.parent)


def remove_tree(where: Location) -> None:
    """Remove a folder and all in it, or whatever else has that name. Links are removed, never followed."""
    if isinstance(where, Remote):
        where.remove_tree()
    elif where.is_dir() and not where.is_symlink():
        shutil.rmtree(where)
    else:
        where.unlink()


def explain(error: BaseException, folder: Location) -> str:
    """The text of a write error, with the folder and its free space."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(folder, Path):
        try:
            where = folder if folder.exists() else folder.parent
            stats = os.statvfs(where)
            text += f" ({folder}, {stats.f_bavail * stats.f_frsize / 1e9:.2f} GB free)"
        except OSError:
            text += f" ({folder})"
    return text


def explain_for_rank(rank: int, error: BaseException, staged: Location) -> str:
    """Like `explain`, for a rank that writes into the folder that rank 0 made; says so if the rank does not see it."""
    if isinstance(error, FileNotFoundError) and not exists(staged):
        return (
            f"rank {rank}: {staged.parent} must be the same folder for all ranks, but this rank does not see {staged.name}, "
            "which rank 0 made there. Put it on storage that all machines share, and give an absolute path if ranks work in "
            "different folders"
        )
    return f"rank {rank}: {explain(error, staged.parent)}"
