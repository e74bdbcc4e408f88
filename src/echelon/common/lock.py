"""One process at a time: a lock on a file, which ends with its process, however that ends.

A lock of the operating system belongs to the open file (Linux: F_OFD_SETLK, elsewhere flock). Unlike with `lockf`, it survives
when this process opens and closes the file again, as everything does that copies or reads the folder. A forked child would keep
the lock alive after its parent, so children close their copies at once. The file's text names the holder.

Where there are no locks (some cluster file systems, object stores), the text alone decides. Only one process can create it. A
holder on the same machine is checked by its process; a holder on another machine counts while its text is fresh.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pwd
import socket
import struct
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from echelon.common.files import open_file, parse_object, read_bytes, write_whole
from echelon.common.machine import boot_id, started_at
from echelon.common.terminal import printable

__all__ = ["HeldError", "Holder", "Lock", "Place", "look"]

# Without locks, the text of a process on another machine expires after this time without renewal.
_FRESH_S = 600.0
_TEXT_BYTES = 1 << 16
# Failures in a row to read back the text just written: another process is rarely faster twice.
_MOST_LOST = 8
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# This process's locks by path of the file, and the descriptors that a child closes.
_held: dict[str, Lock] = {}
_files: set[int] = set()


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as the file's text describes it.

    Args:
        start: its start time in the kernel's ticks; with `boot` and `pid` it identifies the process.
        since, seen: when it took the lock, and when it last renewed the text.
        job: number of the batch system's job and of its start; empty without one.
        token: unique for every lock that is taken.
        run: the folder of the process's run; empty without one.
    """

    host: str
    boot: str
    pid: int
    start: int | None
    user: str
    since: float
    seen: float
    job: str = ""
    token: str = ""
    run: str = ""

    @classmethod
    def myself(cls, job: str = "") -> Holder:
        pid, now = os.getpid(), time.time()
        user, token = os.environ.get("USER") or _user(), os.urandom(8).hex()
        return cls(socket.gethostname(), boot_id(), pid, started_at(pid), user, now, now, job or _job(), token, _run())

    @classmethod
    def parsed(cls, text: bytes) -> Holder | None:
        """Parse a lock's text; None for anything that echelon did not write."""
        values = {"job": "", "token": "", "run": "", **(parse_object(text) or {})}
        texts, moments = ("host", "boot", "user", "job", "token", "run"), ("since", "seen")
        if not all(isinstance(values.get(name), str) for name in texts):
            return None
        if not (type(values.get("pid")) is int and 0 <= values["pid"] < 1 << 31):
            return None
        if not all(type(values.get(name)) in (int, float) and 0 <= values[name] <= 1e11 for name in moments):
            return None
        known: dict[str, Any] = {field.name: values.get(field.name) for field in fields(cls)}
        return cls(**known)

    @property
    def text(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        job = self.job.partition(".")[0]
        return printable(f"process {self.pid} on {self.host}{f' (job {job})' if job else ''}")

    def lives(self) -> bool:
        """Whether the holder still runs, as far as this machine can know. This process itself does not count."""
        if self.host == socket.gethostname() and self.boot == boot_id():
            return self.pid != os.getpid() and started_at(self.pid) == self.start is not None
        if self.host == socket.gethostname():  # the machine has restarted since
            return False
        job, _, start = self.job.partition(".")
        own, _, own_start = _job().partition(".")
        if job and job == own and start.partition("-")[0] != own_start:  # a batch system restarts a job only after its end
            return False
        return time.time() - self.seen < _FRESH_S


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in a container
        return f"user {os.getuid()}"


def _run() -> str:
    return os.environ.get("ECHELON_RUN_DIR", "").encode("utf-8", "replace").decode()[:1000]


def _job() -> str:
    number = os.environ.get("SLURM_JOB_ID", "")
    return f"{number}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if number else ""


class HeldError(Exception):
    """Another process holds the lock.

    Attributes:
        holder: that process, if the text describes it.
    """

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(str(holder or "another process"))
        self.holder = holder


class Place(Protocol):
    """Where the text of a lock is kept, if the text alone decides."""

    def read(self) -> bytes | None:
        """The text; None if there is none."""

    def create(self, text: bytes) -> bool:
        """Write the text if there is none; False if another process was faster."""

    def replace(self, text: bytes) -> None:
        """Write the text, whatever is there."""

    def set_aside(self, text: bytes) -> bool:
        """Remove the text, if it is still this one."""

    def remove(self) -> None:
        """Remove the text."""


class Lock:
    """A lock that this process holds, from `take`. It is counted: release it as often as it was taken.

    Attributes:
        file: the locked descriptor; None if the text alone decides.
    """

    def __init__(self, place: Place, me: Holder, file: int | None = None) -> None:
        self.file, self._place, self._me = file, place, me
        self._key, self._count = "", 0

    @classmethod
    def take(
        cls, path: Path | None, *, mode: int = 0o600, patience_s: float = 0.0, job: str = "", place: Place | None = None
    ) -> Lock:
        """Take a lock.
        Args:
            path: of a file, which is created if it does not exist; None for a `place`.
            mode: of a new file, less the umask.
            patience_s: how long to wait for another holder.
            job: see `Holder`; by default from Slurm's variables.
            place: where the text is kept, if the text alone decides.
        Raises:
            HeldError: another process holds it.
            OSError: the file cannot be opened, or its name is taken by a link, a pipe or a folder; or the text cannot be read
            back.
        """
        key, until = os.path.realpath(path) if path is not None else str(place), time.monotonic() + patience_s
        lock = _held.get(key)
        if lock is not None and path is not None and lock.file is not None and not _is_at(path, lock.file):
            _close(lock.file)  # the folder was removed, and created again
            lock = None
        lost = 0
        while lock is None:
            me = Holder.myself(job)
            try:
                lock = _by_file(path, mode, me) if path is not None else _by_text(place, me) if place is not None else None
                lost += 1
                if lock is None and place is not None and lost == _MOST_LOST:
                    raise OSError(errno.EIO, "the lock's text was written there, but cannot be read back", key)
            except HeldError:
                if time.monotonic() >= until:
                    raise
            if lock is None:
                time.sleep(0.05)
        lock._key, lock._count = key, lock._count + 1
        _held[key] = lock
        return lock

    @property
    def is_new(self) -> bool:
        """Whether it was taken exactly once."""
        return self._count == 1

    def refresh(self) -> None:
        """Renew the text, for processes that cannot see the lock.

        Raises:
            HeldError: there are no locks, and another process has taken it over.
            OSError: there are no locks, and the text cannot be written.
        """
        me = replace(self._me, seen=time.time())
        if self.file is not None:
            with contextlib.suppress(OSError):  # a full disk: the lock decides, and the text only names the holder
                os.pwrite(self.file, me.text, 0)
                os.ftruncate(self.file, len(me.text))
            return
        if (text := self._place.read()) is not None:
            holder = Holder.parsed(text)
            if holder is not None and holder.token != self._me.token:
                raise HeldError(holder)
        self._place.replace(me.text)

    def release(self, *, remove: bool) -> None:
        """Release the lock.

        Args:
            remove: also remove the file, when this process no longer needs the lock.
        """
        self._count -= 1
        if self._count or _held.get(self._key) is not self:  # in a forked child it is the parent's
            return
        del _held[self._key]
        if remove:
            with contextlib.suppress(OSError, ValueError):  # the folder may be gone
                # Before the lock is released: a later holder creates a file of its own.
                if self.file is not None or _token_in(self._place) == self._me.token:
                    self._place.remove()
        if self.file is not None:
            _close(self.file)


def look(path: Path) -> None:
    """Check whether another process holds the lock of a file, without taking it.

    Raises:
        HeldError: another process holds it.
        OSError: as for `Lock.take`; also if the file does not exist.
    """
    own = _held.get(os.path.realpath(path))
    file = open_file(path)
    try:
        if own is not None and (own.file is None or _is_at(path, own.file)):
            return
        holder = Holder.parsed(os.pread(file, _TEXT_BYTES, 0))
        try:
            held = _is_locked(file)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            held = holder is not None and holder.lives()
        if held:
            raise HeldError(holder)
    finally:
        os.close(file)


def _by_file(path: Path, mode: int, me: Holder) -> Lock | None:
    """Lock by the file. None if the file was another one, or was removed just now: try again."""
    file = open_file(path, os.O_RDWR | os.O_CREAT, mode)
    _files.add(file)
    try:
        _lock(file)
        if not _is_at(path, file):
            _close(file)
            return None
        if os.fstat(file).st_nlink != 1:  # a hard link to a file elsewhere, which must not be written
            path.unlink()
            _close(file)
            return None
    except OSError as error:
        text = b""
        if error.errno in (errno.EACCES, errno.EAGAIN):
            text = os.pread(file, _TEXT_BYTES, 0)
        _close(file)
        if error.errno in _NO_LOCKS:
            return _by_text(_File(path, mode), me)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise HeldError(Holder.parsed(text)) from None
        raise
    lock = Lock(_File(path, mode), me, file)
    lock.refresh()
    return lock


def _by_text(place: Place, me: Holder) -> Lock | None:
    """Lock by the text. None if another process was faster: try again."""
    text = place.read()
    if text is not None:
        holder = Holder.parsed(text)
        if holder is not None and holder.lives():
            raise HeldError(holder)
        if not place.set_aside(text):
            return None
    if not place.create(me.text) or place.read() != me.text:
        return None
    return Lock(place, me)


def _token_in(place: Place) -> str:
    holder = Holder.parsed(place.read() or b"")
    return holder.token if holder is not None else ""


class _File:
    """The text of a lock in a file, on this machine or on a shared file system."""

    def __init__(self, path: Path, mode: int) -> None:
        self._path, self._mode = path, mode

    def read(self) -> bytes | None:
        try:
            return read_bytes(self._path, _TEXT_BYTES)
        except FileNotFoundError:
            return None

    def create(self, text: bytes) -> bool:
        """Write the text under another name first, so that no process reads half of it and takes the lock for free."""
        whole = self._beside(os.urandom(8).hex())
        try:
            self._write_new(whole, text)
            os.link(whole, self._path)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                whole.unlink()
        try:
            self._write_new(self._path, text)
        except FileExistsError:
            return False
        return True

    def replace(self, text: bytes) -> None:
        write_whole(self._path, text, self._mode)

    def set_aside(self, text: bytes) -> bool:
        """Remove this text, under a lock named after it: of many processes that found it, a late one would remove a new text."""
        of_this_text = _File(self._beside(hashlib.sha256(text).hexdigest()[:16]), self._mode)
        try:
            remover = _by_text(of_this_text, Holder.myself())
        except HeldError:
            return False
        if remover is None:
            return False
        try:
            if self.read() != text:
                return False
            self._path.unlink()
            return True
        except FileNotFoundError:  # the holder was alive, and has released the lock
            return False
        finally:
            with contextlib.suppress(OSError):  # the folder may be gone
                of_this_text.remove()

    def _beside(self, name: str) -> Path:
        return self._path.with_name(f".{self._path.name}.{name}")

    def _write_new(self, path: Path, text: bytes) -> None:
        with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode), "wb") as stream:
            stream.write(text)

    def remove(self) -> None:
        self._path.unlink()


def _lock(file: int) -> None:
    """Lock an open file for writing, without waiting.

    Raises:
        OSError: EACCES or EAGAIN if another process holds it; one of `_NO_LOCKS` if there are no locks.
    """
    if hasattr(fcntl, "F_OFD_SETLK"):
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # the system only has flock
                raise
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(file: int) -> bool:
    if hasattr(fcntl, "F_OFD_GETLK"):
        try:
            lock = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
            return bool(struct.unpack_from("h", lock)[0] != fcntl.F_UNLCK)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # held until the file is closed
    except BlockingIOError:
        return True
    return False


def _whole_file(kind: int) -> bytes:
    """C's struct flock: type, whence, start, length, and the pid, which must be 0."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)


def _is_at(path: Path, file: int) -> bool:
    """Whether a descriptor belongs to the file that is at `path` now."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except OSError:
        return False


def _close(file: int) -> None:
    _files.discard(file)
    os.close(file)


def _forget() -> None:
    """In a forked child: drop the locks, which are the parent's and end with it."""
    for file in list(_files):
        with contextlib.suppress(OSError):
            _close(file)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
