"""Python programs that a test starts beside itself, forked from a process that has torch and the library loaded.

Each command of `echelon run` would import them anew, in two to four seconds of computing. `Forked` is the test's end, with the
methods of `subprocess.Popen`: a process of its own, with its own environment, directory, streams and signals. What differs: its
modules are loaded before it begins; `/proc/PID/cmdline` is the server's; options that the interpreter reads as it starts are
not possible, as `can_fork` knows; and after its threads and exit functions it ends without tearing the interpreter down, which
would copy every page of torch. For a test that is about any of these, see `fresh` of the fixtures; also for a script that
launches ranks, whose own server would load all that is loaded here. ECHELON_TEST_NO_FORKS=1 starts a new Python for each.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules are nobody's

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import io
import json
import os
import select
import signal
import socket
import subprocess
import termios
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from echelon.launcher.local.server import load
from echelon.launcher.workarounds import keep_finalizers

# By which whatever a test left is found, also where it is no descendant any more: in the environment, as /proc shows it.
MARK = "ECHO_TEST_MARK"
MARK_LENGTH = 32

TORCH = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.profiler._cupti_monitor",
)
LOADED = (
    *TORCH,
    "echelon.cli.ckpt",
    "echelon.cli.main",
    "echelon.cli.run",
    "echelon.cli.submit",
    "echelon.launcher.local.elastic",
    "echelon.launcher.local.run",
    "echelon.loop.auto",
    "echelon.loop.callbacks",
    "echelon.loop.run",
    "echelon.observe.report",
)

# What Python, its C library or torch's libraries read once, as they start; the two of `_MENDED` can be made true later.
_AT_START = ("GLIBC_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OPENBLAS_", "PYTHON", "TORCH_", "TZ")
_PATH, _THREADS = _MENDED = ("PYTHONPATH", "OMP_NUM_THREADS")
_OPTIONS = {"stdin", "stdout", "stderr", "cwd", "env", "text", "process_group", "start_new_session"}

_servers: dict[tuple[tuple[str, str], ...], tuple[subprocess.Popen[bytes], socket.socket]] = {}


def can_fork(command: Sequence[str], options: Mapping[str, Any]) -> bool:
    """Whether it is a script or a module, run by this Python, with nothing that only a new process can have."""
    python = command[0] == sys.executable and len(command) > 1 and (command[1] in ("-m", "-c") or command[1][:1] != "-")
    return python and options.keys() <= _OPTIONS and hasattr(os, "pidfd_open") and not os.environ.get("ECHELON_TEST_NO_FORKS")


def popen(command: Sequence[str], **options: Any) -> Any:
    """As `subprocess.Popen`, forked if that is possible."""
    return Forked(command, **options) if can_fork(command, options) else subprocess.Popen(command, **options)


def run(
    command: Sequence[str],
    *,
    input: Any = None,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`, forked if that is possible."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if capture_output else {}
    streams |= {"stdin": subprocess.PIPE} if input is not None else {}
    process = popen(command, **streams, **options)
    try:
        out, err = process.communicate(input, timeout=timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def server_pids() -> set[int]:
    return {process.pid for process, _ in _servers.values()}


class Forked:
    """A running program. Its options are those of `subprocess.Popen`, as far as `can_fork` allows them.

    With `start_new_session`, a terminal as its standard input becomes the session's.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
        process_group: int | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args, self.returncode = command, None
        env = dict(os.environ if env is None else env)
        theirs: list[int] = []
        pipes: list[int | None] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            fd, pipe = _stream(number, stream, theirs)
            theirs.append(fd)
            pipes.append(pipe)
        self._ended, child = socket.socketpair()
        request = {
            "words": list(command[1:]),
            "env": env,
            "cwd": os.fspath(cwd or os.getcwd()),
            "group": process_group,
            "session": start_new_session,
        }
        socket.send_fds(_server(env), [json.dumps(request).encode()], [*theirs, child.fileno()])
        child.close()
        for fd in theirs:
            os.close(fd)
        modes = ("wb", "rb", "rb")
        files: list[Any] = [open(fd, mode) if fd is not None else None for fd, mode in zip(pipes, modes, strict=True)]
        self._raw: list[IO[bytes] | None] = files
        self._read: dict[IO[bytes], bytes] = {file: b"" for file in files[1:] if file is not None}
        self._text = text
        shown = [io.TextIOWrapper(file, write_through=True) if text and file is not None else file for file in files]
        self.stdin, self.stdout, self.stderr = shown
        self.pid = self._told()

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = self._told()
            self._ended.close()
        return self.returncode

    def _told(self) -> int:
        told = self._ended.recv(32)
        assert told, "the process that forks programs has gone: what it said is in the tests' standard error"
        return int(told)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Write `input`, which must be short, read all there is, and wait. After a timeout it can be called again."""
        end = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                if input:
                    self.stdin.write(input)
                self.stdin.close()
        while left := [file for file in self._read if not file.closed]:
            ready = select.select(left, [], [], _until(end))[0]
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            for file in ready:
                data = os.read(file.fileno(), 65536)
                self._read[file] += data
                if not data:
                    file.close()
        self.wait(_until(end))
        found = [None if file is None else self._read[file] for file in self._raw[1:]]
        if self._text:
            found = [None if data is None else io.TextIOWrapper(io.BytesIO(data)).read() for data in found]
        return found[0], found[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _until(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())


def _stream(number: int, wanted: Any, before: Sequence[int]) -> tuple[int, int | None]:
    """The descriptor that the program gets, and our end if it is a pipe."""
    if wanted == subprocess.PIPE:
        reader, writer = os.pipe()
        return (reader, writer) if number == 0 else (writer, reader)
    if wanted == subprocess.STDOUT:
        return os.dup(before[1]), None
    if wanted == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), None
    if wanted is None:
        return os.dup(number), None
    return os.dup(wanted if isinstance(wanted, int) else wanted.fileno()), None


def _server(env: Mapping[str, str]) -> socket.socket:
    """Which began with what `env` says to a starting Python."""
    at_start = {name: value for name, value in env.items() if name.startswith(_AT_START) and name not in _MENDED}
    key = tuple(sorted(at_start.items()))
    if key not in _servers or _servers[key][0].poll() is not None:
        # SEQPACKET: a request is one message, with its descriptors.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {name: value for name, value in os.environ.items() if not name.startswith(_AT_START) or name == _PATH}
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**own, **at_start, MARK: "0" * MARK_LENGTH},
            cwd="/",
            stdin=subprocess.PIPE,  # both for nothing but to be no file, which Python remembers of its streams
            stdout=subprocess.PIPE,
        )
        theirs.close()
        _servers[key] = process, ours
    return _servers[key][1]


def close() -> None:
    """End the servers; what they forked goes on."""
    while _servers:
        process, connection = _servers.popitem()[1]
        connection.close()
        process.communicate()


# --- the server


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request. Returns in such a process only, with what it is to run and its streams."""
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([connection, *running], [], [])[0]:
            if ready is not connection:
                pid, owner = running.pop(ready)
                status = os.waitpid(pid, 0)[1]
                os.close(ready)
                with contextlib.suppress(OSError), owner:
                    owner.send(str(os.waitstatus_to_exitcode(status)).encode())
                continue
            data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 4)
            if not data:
                os._exit(0)
            gc.freeze()  # so that a fork's collector does not unshare every page
            keep_finalizers()
            pid = os.fork()
            if pid == 0:
                connection.close()
                for pidfd, (_, owner) in running.items():
                    os.close(pidfd)
                    owner.close()
                os.close(fds.pop())
                return json.loads(data), fds
            owner = socket.socket(fileno=fds.pop())
            for fd in fds:
                os.close(fd)
            running[os.pidfd_open(pid)] = pid, owner
            owner.send(str(pid).encode())


def become(request: dict[str, Any], fds: Sequence[int], path: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The process that was asked for; the code of its program, and where to run it."""
    if request["session"]:
        os.setsid()
        if os.isatty(fds[0]):
            fcntl.ioctl(fds[0], termios.TIOCSCTTY, 0)
    elif request["group"] is not None:
        os.setpgid(0, request["group"])
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in fds:
        if fd > 2:
            os.close(fd)
    env = request["env"]
    _show_mark(env.get(MARK, ""))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(request["cwd"])
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        by_line = not env.get("PYTHONUNBUFFERED") and (stream is sys.stderr or stream.isatty())
        stream.reconfigure(line_buffering=by_line)  # type: ignore[union-attr]
    own = _paths(env)
    sys.path[:] = [*own, *(p for p in path if p not in own)]
    if env.get(_THREADS, "").isdigit():
        sys.modules["torch"].set_num_threads(int(env[_THREADS]))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own does so by itself
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return _program(request["words"])


def _program(words: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    main = types.ModuleType("__main__")
    kind, *rest = words
    if kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec", dont_inherit=True)
    elif kind == "-m":
        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(rest[0])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{rest[0]}.__main__")
        if spec is None or spec.origin is None:
            sys.exit(f"{sys.executable}: No module named {rest[0]}")
        sys.argv = [spec.origin, *rest[1:]]
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        main.__dict__.update(__spec__=spec, __file__=spec.origin, __package__=spec.parent, __loader__=spec.loader)
    else:
        sys.argv = list(words)
        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        main.__file__ = os.path.abspath(kind)
        code = compile(Path(kind).read_bytes(), main.__file__, "exec", dont_inherit=True)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the second by multiprocessing, as it is imported
    return code, main.__dict__


def _paths(env: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(path) for path in env.get(_PATH, "").split(os.pathsep) if path]


def _show_mark(mark: str) -> None:
    """Write the mark over the server's, where /proc/PID/environ reads it, of this process and of what it forks."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    ctypes.memmove(getenv(MARK.encode()), mark.ljust(MARK_LENGTH)[:MARK_LENGTH].encode(), MARK_LENGTH)


class Ending:
    """How the program ends, without a teardown of the interpreter: an exit function, the last of all.

    Attributes:
        pid: only this process ends so, and not what it forks.
        code: negative for a signal.
    """

    def __init__(self) -> None:
        self.pid, self.code = -1, 1
        atexit.register(self)

    def __call__(self) -> None:
        if os.getpid() != self.pid:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if self.code < 0:
            signal.signal(-self.code, signal.SIG_DFL)
            os.kill(self.pid, -self.code)
        os._exit(self.code)

    def by(self, error: BaseException) -> None:
        """As Python does with an exception that nobody handles."""
        if isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                self.code = (error.code or 0) & 0xFF
            else:
                print(error.code, file=sys.stderr)
            return
        self.code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        trace = error.__traceback__ and error.__traceback__.tb_next  # without the line below
        sys.excepthook(type(error), error.with_traceback(trace), trace)


if __name__ == "__main__":
    _end = Ending()  # before torch is imported: exit functions run from the last to the first
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the programs themselves hear it
    load(LOADED)
    _path = [p for p in sys.path if p not in _paths(os.environ)]
    _request = serve(socket.socket(fileno=int(sys.argv[1])))
    _end.pid = os.getpid()
    try:
        exec(*become(*_request, _path))
        _end.code = 0
    except BaseException as _error:
        _end.by(_error)
