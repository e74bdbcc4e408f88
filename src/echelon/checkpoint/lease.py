"""One live run per folder: the run that writes checkpoints holds the folder's lease.

The lease is a lock of the operating system on `.lease`, which ends with its process however it ends, and is not inherited by
children such as a loader's workers. Its text says whose it is. Where there are no such locks (some cluster file systems, object
stores), the text alone decides: its process is looked for on the same machine; of another machine, it counts while it is fresh.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

from echelon.checkpoint import strict
from echelon.checkpoint.location import Location, read_file, remove_tree, replace_file
from echelon.checkpoint.strict import Wrong
from echelon.contracts.errors import CheckpointCorruptError, CheckpointInUseError
from echelon.contracts.machine import boot_id, started_at
from echelon.contracts.terminal import printable

__all__ = ["Lease"]

logger = logging.getLogger(__name__)

LEASE = ".lease"
# A run that ends releases its lease at once, but a killed one may still be dying when its restart is there.
_PATIENCE_S = 2.0
# Refreshed at every save; without locks, a lease of another machine that is older is taken over.
_FRESH_S = 600.0
_TEXT_BYTES = 1 << 16
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# Locks are per process: a second holder in this very process is counted, not refused.
_held: dict[str, tuple[int, int | None]] = {}


class Lease:
    """Held by rank 0 of the run that writes into `dirpath`."""

    def __init__(self, dirpath: Location) -> None:
        self._path = dirpath / LEASE
        self._name = str(dirpath.resolve() if isinstance(dirpath, Path) else dirpath)
        self.held = False

    @property
    def _key(self) -> str:
        return f"{os.getpid()} {self._name}"  # a fork inherits the table, not the locks

    def acquire(self) -> bool:
        """Take the lease; False if this process had it already.

        Raises:
            CheckpointInUseError: another live run has it; says whose it is.
        """
        count, file = _held.get(self._key, (0, None))
        if count == 0:
            file = self._lock() if isinstance(self._path, Path) else None
            if file is None:
                self._look(self._path)
        _held[self._key] = (count + 1, file)
        self.held = True
        try:
            self._describe()
        except OSError:
            self.release()
            raise
        return count == 0

    def release(self) -> None:
        if not self.held:
            return
        self.held = False
        count, file = _held.pop(self._key)
        if count > 1:
            _held[self._key] = (count - 1, file)
            return
        with contextlib.suppress(OSError):  # gone with its folder
            self._path.unlink()  # before the lock goes: whoever has it then made a file of its own
        if file is not None:
            os.close(file)

    def refresh(self) -> None:
        """Say that the run is alive, for those who cannot see its lock."""
        if self.held:
            self._describe()

    def _lock(self) -> int | None:
        """The open and locked file; None where there are no locks."""
        assert isinstance(self._path, Path)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            file = self._open(self._path)
            if file is None:
                continue
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file(self._path, file):
                    if os.fstat(file).st_nlink == 1:
                        return file
                    self._path.unlink()  # nobody's, and another name of a file elsewhere, which would be written to
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    os.close(file)
                    return None
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    os.close(file)
                    raise
                if time.monotonic() > deadline:
                    holder = _parsed(os.pread(file, _TEXT_BYTES, 0))
                    os.close(file)
                    raise self._refusal(holder) from None
            os.close(file)  # locked by another, or removed by it just now
            time.sleep(0.05)

    def _open(self, path: Path) -> int | None:
        """Open the lease's file, creating it if needed; None if the file there was not made by a run, and was removed."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(path, flags, 0o644)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            file = None
        if file is not None:
            if stat.S_ISREG(os.fstat(file).st_mode):
                return file
            os.close(file)
        logger.warning("removing %s: no run wrote it", path)
        remove_tree(path)
        return None

    def _look(self, path: Location) -> None:
        """Without locks: refuse if the text says that its run lives."""
        try:
            holder = _parsed(read_file(path, _TEXT_BYTES))
        except (OSError, CheckpointCorruptError):
            return
        if holder and _lives(holder):
            raise self._refusal(holder)

    def _refusal(self, holder: dict[str, Any]) -> CheckpointInUseError:
        whose = "another process"
        if holder:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
            whose = f"process {holder['pid']} of {printable(holder['user'])} on {printable(holder['host'])}, since {since}"
        return CheckpointInUseError(
            f"{self._path.parent} is being written by another run: {whose}. End that one, or save to another folder."
        )

    def _describe(self) -> None:
        text = json.dumps({**_myself(), "seen": time.time()}).encode()
        _, file = _held.get(self._key, (0, None))
        if file is None:
            replace_file(self._path, text)
            return
        with contextlib.suppress(OSError):  # of a full disk: the lock decides, and the text only says whose it is
            # By the locked descriptor: closing another one of this file would drop the lock.
            os.pwrite(file, text, 0)
            os.ftruncate(file, len(text))


def _is_file(path: Path, file: int) -> bool:
    """Whether the path still leads to the open file: its last holder removes it."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False


def _parsed(data: bytes) -> dict[str, Any]:
    """The holder of a lease; empty if no run wrote its text."""
    try:
        found = strict.mapping(strict.loads(data), LEASE)
        for name in ("host", "boot", "user"):
            strict.text(found.get(name), name)
        strict.whole(found.get("pid"), "pid", 1 << 31)
        for name in ("since", "seen"):
            strict.number(found.get(name), name, 0, 1e11)
    except (Wrong, UnicodeDecodeError):
        return {}
    return found


_since = time.time()


def _myself() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": pid,
        "start": started_at(pid),
        "user": os.environ.get("USER") or str(os.getuid()),
        "since": _since,
    }


def _lives(holder: dict[str, Any]) -> bool:
    if holder.get("host") == socket.gethostname():
        if holder.get("pid") == os.getpid():
            return False
        return holder["boot"] == boot_id() and started_at(holder["pid"]) == holder.get("start") is not None
    return bool(time.time() - holder["seen"] < _FRESH_S)
