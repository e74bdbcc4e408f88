"""Small files in folders where another user may write: without following links, without blocking, of limited size.

Another user can take a predictable name first: for a link to one of the user's files, for a pipe without a writer, for a file of
a terabyte, for JSON with a million nested brackets. These functions return a regular file's content, or raise an OSError.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from echelon.common.errors import RunFolderError

__all__ = [
    "MOST_BYTES",
    "is_deeper",
    "open_file",
    "open_to_append",
    "parse_object",
    "private_folder",
    "read_bytes",
    "read_end",
    "sync",
    "working_folder",
    "write_whole",
]

Where = str | os.PathLike[str]

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
# Files between launchers and ranks are a thousand times smaller.
MOST_BYTES = 16 << 20
_DEEPEST = 64


def working_folder() -> str:
    """The current folder.

    Raises:
        UsageError: it has been removed, so no process can start there.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise RunFolderError("the current folder has been removed. Change to another folder.") from None


def open_file(path: Where, flags: int = os.O_RDONLY, mode: int = 0o600, *, folder: int | None = None) -> int:
    """A descriptor of a regular file, without blocking; for appending, also of a device.

    Args:
        flags: for `os.open`.
        mode: of a new file, less the umask.
        folder: a descriptor of the folder of `path`; None for the current folder.
    Raises:
        OSError: also for a link, a pipe, a device or a folder.
    """
    descriptor = os.open(path, flags | _SAFE, mode, dir_fd=folder)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind) and not (flags & os.O_APPEND and stat.S_ISCHR(kind)):  # a log may go to /dev/null
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return descriptor


def open_to_append(path: Where, mode: int = 0o600) -> int:
    """A descriptor to append to a file, which is created if it does not exist."""
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)


def private_folder(path: Path, mode: int = 0o755) -> None:
    """Create a folder that only this user can write to, whatever the umask; an existing folder stays as it is.

    Raises:
        OSError: also if the name is taken by a link or a file.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode & ~0o022)
        return
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is a link, or no folder", str(path))


def read_bytes(path: Where, most: int = MOST_BYTES, *, folder: int | None = None) -> bytes:
    """The content of a file.

    Raises:
        OSError: also if the file is longer than `most`.
    """
    with open(open_file(path, folder=folder), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most} bytes", os.fspath(path))
    return content


def read_end(path: Where, most: int = 1 << 16) -> bytes:
    """The last bytes of a file, which may be large.

    Raises:
        OSError: as for `open_file`.
    """
    with open(open_file(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def write_whole(path: Path, content: bytes | str, mode: int = 0o600, *, durable: bool = False) -> None:
    """Replace a file, so that a reader sees the old or the new content, never half of it. A link is replaced, not followed.

    Args:
        mode: of the file, less the umask.
        durable: after a power cut, too, the file is the old or the new one.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")  # an unpredictable, unused name
    descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):  # a full disk's error names no file
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        raise


def sync(path: Where) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_object(text: bytes | str) -> dict[str, Any] | None:
    """A JSON object; None for anything else, for truncated text, and for nesting deeper than `_DEEPEST`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if not isinstance(value, dict) or (sum(map(text.count, brackets)) > _DEEPEST and is_deeper(value, _DEEPEST)):  # type: ignore[arg-type]
        return None
    return value


def is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value has more than `levels` nested lists and objects."""
    layer = [value]
    for _ in range(levels):
        inner: list[Any] = []
        for each in layer:
            inner += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        if not inner:
            return False
        layer = inner
    return True
