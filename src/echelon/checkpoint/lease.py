"""One live run per folder: the run that writes checkpoints holds the folder's lease, a lock on `.lease` (`common/lock.py`)."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path

from echelon.checkpoint.location import Location, Remote, read_file, remove_tree, replace_file
from echelon.common.errors import CheckpointCorruptError, CheckpointInUseError
from echelon.common.lock import HeldError, Holder, Lock
from echelon.common.terminal import printable

__all__ = ["Lease"]

logger = logging.getLogger(__name__)

LEASE = ".lease"
# A run releases its lease when it ends, but a killed run may still be exiting when its restart begins.
_PATIENCE_S = 2.0
# An object store cannot create a file exclusively: a run that still finds its own text after so long was the last to write.
_SETTLE_S = 1.0
_TEXT_BYTES = 1 << 16
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EINVAL)


class Lease:
    """Held by rank 0 of the run that writes into `dirpath`."""

    def __init__(self, dirpath: Location) -> None:
        self._path = dirpath / LEASE
        self._lock: Lock | None = None

    @property
    def held(self) -> bool:
        return self._lock is not None

    def acquire(self) -> bool:
        """Take the lease; False if this process had it already.

        Raises:
            CheckpointInUseError: another live run has it; says whose it is.
        """
        while True:
            try:
                if isinstance(self._path, Path):
                    lock = Lock.take(self._path, mode=0o644, patience_s=_PATIENCE_S)
                else:
                    lock = Lock.take(None, place=_Object(self._path), patience_s=_PATIENCE_S)
                break
            except HeldError as error:
                raise self._refusal(error.holder) from None
            except OSError as error:
                if error.errno not in _NO_FILE:
                    raise
                logger.warning("removing %s: no run wrote it", self._path)
                remove_tree(self._path)
        self._lock = lock
        return lock.is_new

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release(remove=True)
            self._lock = None

    def refresh(self) -> None:
        """Record that the run is alive, for processes that cannot see its lock.

        Raises:
            CheckpointInUseError: the storage has no locks, and another run took the folder, as after a pause of many minutes.
        """
        if self._lock is not None:
            try:
                self._lock.refresh()
            except HeldError as error:
                raise self._refusal(error.holder) from None

    def _refusal(self, holder: Holder | None) -> CheckpointInUseError:
        whose, how = "another process", ""
        if holder is not None:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
            whose = f"process {holder.pid} of {printable(holder.user)} on {printable(holder.host)}, since {since}"
            number = printable(holder.job.partition(".")[0])
            how = f" (`scancel {number}`)" if number else ""
            if holder.run:
                whose = f"{whose}, of the run in {printable(holder.run)}"
        return CheckpointInUseError(
            f"{self._path.parent} is being written by another run: {whose}. End that run{how}, or save to another folder."
        )


class _Object:
    """The text of a lease in an object store: the last run that wrote it holds the lease."""

    def __init__(self, where: Remote) -> None:
        self._where = where

    def __str__(self) -> str:
        return str(self._where)

    def read(self) -> bytes | None:
        try:
            return read_file(self._where, _TEXT_BYTES)
        except CheckpointCorruptError:
            return b""
        except OSError:
            return None

    def create(self, text: bytes) -> bool:
        self.replace(text)
        time.sleep(_SETTLE_S)
        return True

    def replace(self, text: bytes) -> None:
        replace_file(self._where, text)

    def set_aside(self, text: bytes) -> bool:
        return True

    def remove(self) -> None:
        self._where.unlink()
