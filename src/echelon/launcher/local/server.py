"""A server that has torch loaded and forks ranks, so that a rank starts in milliseconds instead of importing torch again.

The server is single-threaded when it forks and never touches CUDA, so that forking it is safe. It exchanges lines of JSON with
its owner over one socket: requests `{"fork": {...}, "handed": [...]}`,
`{"signal": [pid, number]}`, answers `{"forked": pid}`, `{"exited": pid, ...}`.
While ranks run, it imports in a thread: it learns of their ends at once, and a fork waits until the thread has ended.
When the owner ends, in whatever way, the socket closes and the server kills every process it started. When the server itself
is killed, the kernel kills the ranks (parent-death signal) and the owner kills the ranks' children.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from echelon.common.errors import EchelonError
from echelon.common.hash_seed import VARIABLE
from echelon.common.terminal import flush
from echelon.contracts.stopping import SIGNALS
from echelon.launcher.local.processes import signal_if
from echelon.launcher.local.start import NOTHING, Handed, Start
from echelon.launcher.workarounds import keep_finalizers

__all__ = ["ForkServer", "load", "serve"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


def die_with_parent(number: signal.Signals) -> None:
    """Send this process the signal when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of its children's children when the children end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """On Linux only; elsewhere the closed socket is the only sign of the owner's death."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class ForkServer:
    """The owner's end: requests ranks and learns how they end. Not thread-safe."""

    def __init__(self, sock: socket.socket, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket, self.pid, self._process = sock, pid, process
        self._buffer = b""
        self._exits: dict[int, tuple[int, int]] = {}
        self.peaks: dict[int, int] = {}  # peak memory of ended ranks, in bytes
        self._running: set[int] = set()
        self._owner = os.getpid()
        self._handle = _handle_of(pid)  # while the number still is the server's

    @classmethod
    def start(cls, preload: Sequence[str] = ("torch",)) -> ForkServer:
        """Start a new process that imports `preload` first. For a caller that may have threads or CUDA and must not fork."""
        ours, theirs = socket.socketpair()
        code = f"from echelon.launcher.local.server import main; main({theirs.fileno()}, {list(preload)!r})"
        # One thread per library at import: libgomp reads this once, and forking a process with running threads is unsafe.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        env.setdefault(VARIABLE, "0")
        env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        # Without -P, the first entry of its module path would be the working folder, which may be another user's.
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code], pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL, process_group=0
        )
        theirs.close()
        server = cls(ours, process.pid, process)
        atexit.register(server.close)
        return server

    @classmethod
    def fork_self(cls) -> ForkServer:
        """Fork this process as the server, which then has all its imports. Only for a single-threaded process."""
        ours, theirs = socket.socketpair()
        flush(sys.stdout, sys.stderr)
        pid = os.fork()
        if pid == 0:
            ours.close()
            try:
                os.setpgid(0, 0)
                serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        return cls(ours, pid)

    def fork(self, start: Start, handed: Handed = NOTHING) -> int:
        """Start a rank.

        Returns:
            The rank's process id, which is also its process group.
        Raises:
            EchelonError: the system gave no process, or the server has ended.
        """
        with contextlib.suppress(OSError):  # if the server has ended, the receive below reports it
            given = {name: fd for name, fd in asdict(handed).items() if fd is not None}
            self._send({"fork": asdict(start), "handed": list(given)}, list(given.values()))
        while True:
            message = self._receive(None)
            assert message is not None  # no timeout was given
            if "forked" in message:
                pid = int(message["forked"])
                self._running.add(pid)
                return pid
            if "unforked" in message:
                raise EchelonError(
                    f"a rank's process could not be started: {message['unforked']}. See `ulimit -u`, the task limit of the job's "
                    "cgroup (threads count, too), and `free`."
                )
            self._note(message)

    def poll(self, timeout_s: float = 0.0) -> dict[int, tuple[int, int]]:
        """The ranks that have ended so far: {pid: (wait status, time on the monotonic clock in ns)}."""
        while (message := self._receive(timeout_s)) is not None:
            self._note(message)
            timeout_s = 0.0
        return self._exits

    def alive(self) -> bool:
        """False in a forked child of the owner, after `close`, and when the server was killed."""
        if os.getpid() != self._owner or self._socket.fileno() < 0:
            return False
        return self._process is None or self._process.poll() is None

    def forget(self, pid: int) -> None:
        self._exits.pop(pid, None)
        self.peaks.pop(pid, None)

    def signal(self, pid: int, number: int, *, group: bool = True) -> None:
        """Send a signal to a rank, and with `group` to every process it started.

        It goes through the server, since only the server knows that the pid is still the rank's.
        """
        with contextlib.suppress(OSError):
            self._send({"signal": [pid, int(number), group]})

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules into the server while it is idle, so that ranks forked later have them."""
        with contextlib.suppress(OSError):
            self._send({"preload": list(modules)})

    def kill(self) -> None:
        """Kill the server, and thereby its ranks; from any thread. A process that got the server's pid since is not harmed."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        elif self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the server and every process it started. Safe to call twice and in a forked child of the owner."""
        if os.getpid() != self._owner or self._socket.fileno() < 0:
            return
        atexit.unregister(self.close)
        self._socket.close()
        with contextlib.suppress(ChildProcessError, InterruptedError):
            if self._process is not None:
                self._process.wait()
            else:
                os.waitpid(self.pid, 0)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        data = json.dumps(message).encode() + b"\n"
        if fds:
            # The descriptors are sent with one byte of their own: a stream may split the message, but not this byte.
            socket.send_fds(self._socket, [b"F"], list(fds))
        self._socket.sendall(data)

    def _receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        while b"\n" not in self._buffer:
            if not _readable([self._socket.fileno()], timeout_s):
                return None
            try:
                chunk = self._socket.recv(65536)
            except ConnectionError:
                chunk = b""
            if not chunk:
                _kill_left(self._running)
                raise EchelonError(
                    "the process that forks the ranks is gone. Was it killed? `dmesg` shows whether the OOM killer did it."
                )
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: Mapping[str, Any]) -> None:
        if "exited" in message:
            pid = int(message["exited"])
            self._exits[pid] = (int(message["status"]), int(message["time_ns"]))
            self.peaks[pid] = int(message["peak"])
            self._running.discard(pid)


def main(fd: int, preload: Sequence[str]) -> None:
    """The server's process: `ForkServer.start` runs this."""
    load(["echelon.launcher.local.worker", *preload])  # once here, not in every rank that is forked
    serve(socket.socket(fileno=fd))
    os._exit(0)  # a thread may still be importing, which an ordinary end would disturb


def load(modules: Sequence[str]) -> None:
    """Import the modules that exist, with the garbage collector off: its repeated searches cost a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    for name in modules:
        with contextlib.suppress(ImportError):
            __import__(name)
    if was_on:
        gc.enable()


def _readable(fds: Sequence[int], timeout_s: float | None) -> set[int]:
    """The descriptors that are readable, or closed at the other end. With poll, since select() takes none above 1023."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)}


def _handle_of(pid: int) -> int | None:
    """A handle of a child that has not been waited for; None where the system has none."""
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None


class _IsRank(BaseException):
    """Raised in a newly forked process, to leave the server's frames: the rank's own work begins at `serve`."""

    def __init__(self, start: Start, handed: Handed) -> None:
        super().__init__()
        self.start, self.handed = start, handed


class _Server:
    def __init__(self, sock: socket.socket) -> None:
        self.socket, self.buffer, self.fds = sock, b"", list[int]()
        self.children: set[int] = set()
        self.waiting: list[tuple[dict[str, Any], list[str]]] = []  # forks requested during an import
        self.loading: threading.Thread | None = None
        self.loaded = threading.Event()
        self.loaded.set()
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The owner decides when ranks stop: a Ctrl-C reaches the owner, and the owner's end reaches the server.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        while True:
            ready = _readable([self.socket.fileno(), self.wake_read], None)
            if self.wake_read in ready:
                os.read(self.wake_read, 4096)
                self.reap()
                self.fork_waiting()
            if self.socket.fileno() in ready and not self.read():
                return

    def read(self) -> bool:
        """Handle what the owner sent; False when the owner has ended."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, 65536, 8)
        except ConnectionError:
            return False
        if not data:
            return False
        self.fds += fds
        self.buffer += data
        while b"\n" in self.buffer:
            line, self.buffer = self.buffer.split(b"\n", 1)
            self.handle(json.loads(line.lstrip(b"F")))
        return True

    def handle(self, message: dict[str, Any]) -> None:
        if "fork" in message:
            self.waiting.append((message["fork"], message["handed"]))
            self.fork_waiting()
        elif "signal" in message:
            pid, number, group = message["signal"]
            if pid in self.children and group:
                _kill_group(pid, number)
            elif pid in self.children:
                os.kill(pid, number)
        elif "preload" in message:
            self.preload(message["preload"])

    def preload(self, modules: list[str]) -> None:
        if not self.children and self.loaded.is_set():
            load(modules)
            return
        before, self.loaded = self.loading, threading.Event()
        self.loading = threading.Thread(target=self.load_and_wake, args=(modules, before, self.loaded), daemon=True)
        self.loading.start()

    def load_and_wake(self, modules: list[str], before: threading.Thread | None, loaded: threading.Event) -> None:
        if before is not None:
            before.join()
        load(modules)
        loaded.set()
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the server, too
            os.write(self.wake_write, b"\0")

    def fork_waiting(self) -> None:
        if not self.loaded.is_set():
            return
        if self.loading is not None and self.waiting:
            self.loading.join()
            self.loading = None
        while self.waiting:
            self.fork(*self.waiting.pop(0))

    def fork(self, start: dict[str, Any], names: list[str]) -> None:
        fds, self.fds = self.fds[: len(names)], self.fds[len(names) :]
        gc.freeze()  # exclude loaded objects from collection, whose passes would unshare every page
        keep_finalizers()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:  # started ranks go on until the owner, which is told, ends them
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for fd in fds:
                os.close(fd)
            self.send({"unforked": error.strerror})
            return
        if pid == 0:
            raise _IsRank(Start(**start), Handed(**dict(zip(names, fds, strict=True))))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # both sides set it, since either may run first
        for fd in fds:
            os.close(fd)
        self.children.add(pid)
        self.send({"forked": pid})

    def leave_to_rank(self) -> None:
        """Remove everything of the server's from a rank's process."""
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
        server = os.getppid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # the server died before the line above
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.socket.close()
        os.close(self.wake_read)
        os.close(self.wake_write)

    def reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                break
            pid, time_ns = ended.si_pid, time.monotonic_ns()
            if pid in self.children:
                self.children.discard(pid)
                # Kill the rank's own children: its data workers must not outlive it. Its pid stays valid until it is waited for.
                _kill_group(pid, signal.SIGKILL)
                _, status, used = os.wait4(pid, 0)
                peak = used.ru_maxrss * 1024  # Linux counts in KiB
                self.send({"exited": pid, "status": status, "time_ns": time_ns, "peak": peak})
            else:
                os.waitpid(pid, 0)
        if not self.children:
            self.kill_orphans()

    def kill_orphans(self) -> None:
        """Kill processes of ranks in groups or sessions of their own: as a subreaper, this process became their parent."""
        import psutil  # type: ignore[import-untyped,unused-ignore]  # here: few runs need it, and importing it takes longer than starting a rank

        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def kill_all(self) -> None:
        for pid in self.children:
            _kill_group(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # none is left
            while True:
                if not self.children:
                    self.kill_orphans()
                pid, _ = os.waitpid(-1, 0)
                self.children.discard(pid)


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _kill_left(groups: Iterable[int]) -> None:
    """Kill the rest of ranks' process groups that another process has waited for, as after the death of their parent.

    A number may belong to another process by now. But while any process of a group is left, no other process gets its leader's
    number, and only descendants of the ranks are in this session and such a group.
    """
    wanted, session = set(groups), os.getsid(0)
    for name in os.listdir("/proc") if wanted and os.path.isdir("/proc/self") else ():
        with contextlib.suppress(OSError, ValueError):
            signal_if(int(name), signal.SIGKILL, lambda pid: os.getpgid(pid) in wanted and os.getsid(pid) == session)


def serve(sock: socket.socket) -> None:
    """Serve one owner until it ends, then kill every process started for it. Forked ranks return here and begin their work."""
    server, rank = _Server(sock), None
    try:
        server.run()
    except _IsRank as forked:
        rank = forked
    except Exception:
        traceback.print_exc()  # a bug of the server: errors of a rank do not get here
    finally:
        if rank is None:
            server.kill_all()
    if rank is not None:
        from echelon.launcher.local import worker

        try:
            server.leave_to_rank()
            worker.run(rank.start, rank.handed)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # reached only if the start failed
