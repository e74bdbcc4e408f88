"""One process at a time: a lock on a file, which ends with its process however that ends.

A lock of the operating system belongs to the open file (Linux: F_OFD_SETLK, elsewhere flock): unlike `lockf`, it stays when this
process opens and closes the file once more, as everything does that copies or reads the folder. A forked child would keep it
alive after its parent: each closes its copy at once. The file's text says whose it is.

Where there are no locks (some cluster file systems, object stores) the text alone decides. It is made by one process only; its
process is looked for on the same machine; of another machine, it counts while it is fresh.
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

# Without locks, the text of another machine's process that was not renewed for so long counts no more.
_FRESH_S = 600.0
_TEXT_BYTES = 1 << 16
# Times in a row that a text which was written is not there: another is seldom faster twice.
_MOST_LOST = 8
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# Of this process: its locks by the file's path, and the descriptors that a child closes.
_held: dict[str, Lock] = {}
_files: set[int] = set()


@dataclass(frozen=True)
class Holder:
    """The process that has a lock, as the file's text tells.

    Args:
        start: when it began, in the kernel's ticks; with `boot` and `pid` this is no other process.
        since, seen: when it took the lock, and when it last said that it lives.
        job: the batch system's number of its job, and of the start of that; empty without one.
        token: another for every lock that is taken.
        run: the folder of the run that its process belongs to; empty without one.
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
        """None for whatever no process of ours wrote."""
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
        """Whether it still runs, as far as can be known from here. This very process is no other."""
        if self.host == socket.gethostname() and self.boot == boot_id():
            return self.pid != os.getpid() and started_at(self.pid) == self.start is not None
        if self.host == socket.gethostname():  # the machine was started anew
            return False
        job, _, start = self.job.partition(".")
        own, _, own_start = _job().partition(".")
        if (
            job and job == own and start.partition("-")[0] != own_start
        ):  # a batch system starts a job again only when it has ended
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
    """Another process has the lock.

    Attributes:
        holder: which, if its text tells.
    """

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(str(holder or "another process"))
        self.holder = holder


class Place(Protocol):
    """Where the text of a lock is, when the text alone decides."""

    def read(self) -> bytes | None:
        """None if there is none."""

    def create(self, text: bytes) -> bool:
        """Write it where there is none; False if another was faster."""

    def replace(self, text: bytes) -> None:
        """Write it, whatever is there."""

    def set_aside(self, text: bytes) -> bool:
        """Remove it, if it is still this one."""

    def remove(self) -> None:
        """Remove it."""


class Lock:
    """A lock that this process has, from `take`. It is counted: given back as often as it was taken.

    Attributes:
        file: the locked descriptor; None where the text alone decides.
    """

    def __init__(self, place: Place, me: Holder, file: int | None = None) -> None:
        self.file, self._place, self._me = file, place, me
        self._key, self._count = "", 0

    @classmethod
    def take(
        cls, path: Path | None, *, mode: int = 0o600, patience_s: float = 0.0, job: str = "", place: Place | None = None
    ) -> Lock:
        """
        Args:
            path: of a file, which is made if it is not there; None is none, but a `place`.
            mode: of a file that is made, less the umask.
            patience_s: how long another may have it.
            job: see `Holder`; by default, what Slurm says in the environment.
            place: where the text is, which alone decides.
        Raises:
            HeldError: another process has it.
            OSError: the file cannot be opened; also where a link, a pipe or a folder has its name. A text cannot be read back.
        """
        key, until = os.path.realpath(path) if path is not None else str(place), time.monotonic() + patience_s
        lock = _held.get(key)
        if lock is not None and path is not None and lock.file is not None and not _is_at(path, lock.file):
            _close(lock.file)  # the folder was removed, and one of its name made
            lock = None
        lost = 0
        while lock is None:
            me = Holder.myself(job)
            try:
                lock = _by_file(path, mode, me) if path is not None else _by_text(place, me) if place is not None else None
                lost += 1
                if lock is None and place is not None and lost == _MOST_LOST:
                    raise OSError(errno.EIO, "whose it is was written there, and cannot be read back", key)
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
        """Whether it was taken once."""
        return self._count == 1

    def refresh(self) -> None:
        """Say that this process lives, for those who cannot see its lock.

        Raises:
            HeldError: there are no locks, and another process has taken it over.
            OSError: likewise, and the text cannot be written.
        """
        me = replace(self._me, seen=time.time())
        if self.file is not None:
            with contextlib.suppress(OSError):  # of a full disk: the lock decides, and the text only says whose it is
                os.pwrite(self.file, me.text, 0)
                os.ftruncate(self.file, len(me.text))
            return
        if (text := self._place.read()) is not None:
            holder = Holder.parsed(text)
            if holder is not None and holder.token != self._me.token:
                raise HeldError(holder)
        self._place.replace(me.text)

    def release(self, *, remove: bool) -> None:
        """Give it back.

        Args:
            remove: the file, too, when nothing of this process needs it any more.
        """
        self._count -= 1
        if self._count or _held.get(self._key) is not self:  # or it is the parent's, in a forked child
            return
        del _held[self._key]
        if remove:
            with contextlib.suppress(OSError, ValueError):  # gone with its folder
                # Before the lock goes: whoever has it then made a file of its own.
                if self.file is not None or _token_in(self._place) == self._me.token:
                    self._place.remove()
        if self.file is not None:
            _close(self.file)


def look(path: Path) -> None:
    """See whether another process has the lock of a file, without taking it.

    Raises:
        HeldError: one has.
        OSError: as `Lock.take`; also where there is no file.
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
    """None if the file was another's, or removed just now: to be tried again."""
    file = open_file(path, os.O_RDWR | os.O_CREAT, mode)
    _files.add(file)
    try:
        _lock(file)
        if not _is_at(path, file):
            _close(file)
            return None
        if os.fstat(file).st_nlink != 1:  # another name of a file elsewhere, which would be written to
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
    """None if another was faster: to be tried again."""
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
    """The text of a lock in a file of this machine, or of a file system that many share."""

    def __init__(self, path: Path, mode: int) -> None:
        self._path, self._mode = path, mode

    def read(self) -> bytes | None:
        try:
            return read_bytes(self._path, _TEXT_BYTES)
        except FileNotFoundError:
            return None

    def create(self, text: bytes) -> bool:
        """Written under a name of its own first: nobody reads half of it, and takes it for nobody's."""
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
        """Of many that found this text one may remove it, who has the lock of its name: another would remove a new text."""
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
        except FileNotFoundError:  # its holder lived, and has given it back
            return False
        finally:
            with contextlib.suppress(OSError):  # gone with its folder
                of_this_text.remove()

    def _beside(self, name: str) -> Path:
        return self._path.with_name(f".{self._path.name}.{name}")

    def _write_new(self, path: Path, text: bytes) -> None:
        with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode), "wb") as stream:
            stream.write(text)

    def remove(self) -> None:
        self._path.unlink()


def _lock(file: int) -> None:
    """Lock an open file for writing, at once.

    Raises:
        OSError: EACCES or EAGAIN if another has it; one of `_NO_LOCKS` if there are none.
    """
    if hasattr(fcntl, "F_OFD_SETLK"):
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # a system that has only the other kind
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
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until it is closed
    except BlockingIOError:
        return True
    return False


def _whole_file(kind: int) -> bytes:
    """C's struct flock: the kind, from where to where, and the process, which must be 0."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)


def _is_at(path: Path, file: int) -> bool:
    """Whether a descriptor is of the file that is at `path` now."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except OSError:
        return False


def _close(file: int) -> None:
    _files.discard(file)
    os.close(file)


def _forget() -> None:
    """In a child, however it was forked: the locks are the parent's, and end with it."""
    for file in list(_files):
        with contextlib.suppress(OSError):
            _close(file)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
