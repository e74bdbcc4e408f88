"""Python programs that a test starts beside itself, forked from a process that has torch and the library loaded.

Each command of `echelon run` would import them anew, in two to four seconds of computing. `Forked` is the test's end, with the
methods of `subprocess.Popen`: a process of its own, with its own environment, directory, streams and signals. What differs: its
modules are loaded before it begins; `/proc/PID/cmdline` is the server's; options that the interpreter reads as it starts are
not possible, as `can_fork` knows; and after its threads and exit functions it ends without tearing the interpreter down, which
would copy every page of torch. For a test that is about any of these, see `fresh` of the fixtures. Programs that a forked
program starts by `subprocess.Popen`, such as a launcher's server, are forked, too: their parent is the server then, and the rest
as if they had been started. ECHELON_TEST_NO_FORKS=1 starts a new Python for each.
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
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import termios
import time
import types
from collections.abc import Iterator, Mapping, Sequence
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
    "torch.distributed.run",
    "echelon.cli.ckpt",
    "echelon.cli.main",
    "echelon.cli.run",
    "echelon.cli.submit",
    "echelon.launcher.local.agent",
    "echelon.launcher.local.run",
    "echelon.loop.auto.auto",
    "echelon.callbacks",
    "echelon.loop.run",
    "echelon.observe.report",
)

# In a forked program, which asks the same server for more: its address, the environment that it began with, and its session.
_nested: tuple[str, tuple[tuple[str, str], ...], int] | None = None
_NewPython = subprocess.Popen

# What Python, its C library or torch's libraries read once, as they start; the two of `_MENDED` can be made true later, and
# torchrun's own is read when a group is made.
_AT_START = ("GLIBC_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OPENBLAS_", "PYTHON", "TORCH_", "TZ")
_LATER = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# The module by which torchrun starts its ranks: it has the name `Popen` from `subprocess`.
_TORCHRUNS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
# Of the third a server has one in any case.
_PATH, _THREADS, _BLAS = _MENDED = ("PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_OPTIONS = {"stdin", "stdout", "stderr", "cwd", "env", "text", "umask", "process_group", "start_new_session", "pass_fds"}
_MOST_FDS = 16
_PYTHONS_OWN = ("-P", "-u")  # options

_servers: dict[tuple[tuple[str, str], ...], tuple[subprocess.Popen[bytes], socket.socket]] = {}


def _umask() -> int:
    """Read, not set and set back: of two threads that do so at once, the later one would leave its own mask behind."""
    return int(re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)[1], 8)  # type: ignore[index]


def can_fork(command: Sequence[str], options: Mapping[str, Any]) -> bool:
    """Whether it is a script or a module, run by this Python, with nothing that only a new process can have."""
    words = _after_options(command)
    python = command[0] == sys.executable and len(words) > 0 and (words[0] in ("-m", "-c") or words[0][:1] != "-")
    return python and options.keys() <= _OPTIONS and hasattr(os, "pidfd_open") and not os.environ.get("ECHELON_TEST_NO_FORKS")


def _after_options(command: Sequence[str]) -> Sequence[str]:
    return list(itertools.dropwhile(_PYTHONS_OWN.__contains__, command[1:]))


def popen(command: Sequence[str], **options: Any) -> Any:
    """As `subprocess.Popen`, forked if that is possible."""
    return Forked(command, **options) if can_fork(command, options) else _NewPython(command, **options)


class Nested(_NewPython):  # type: ignore[type-arg]
    """`subprocess.Popen` in a forked program: what it starts is forked, too, if the server can do it."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        command, *more = args or (options.get("args"),)
        other = {name: value for name, value in options.items() if name != "args"}
        if cls is Nested and not more and isinstance(command, (list, tuple)) and can_fork(command, other) and _is_near(other):
            with contextlib.suppress(OSError):  # the server has gone: the tests are at their end
                return Forked(command, **other)
        return super().__new__(cls)


def _is_near(options: Mapping[str, Any]) -> bool:
    """Whether the server began as a process with this environment would, and in the session of this process."""
    env = options.get("env")
    return _nested is not None and (_at_start(os.environ if env is None else env), os.getsid(0)) == _nested[1:]


@contextlib.contextmanager
def instead_of_new(start: Any = popen) -> Iterator[None]:
    """What is started here by `subprocess.Popen` is forked, if that is possible."""
    before = subprocess.Popen
    subprocess.Popen = start  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


def anew() -> contextlib.AbstractContextManager[None]:
    """What is started here is not forked, whatever is said around it."""
    return instead_of_new(_NewPython)


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
        umask: int = -1,
        process_group: int | None = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.args, self.returncode = command, None
        words = _after_options(command)
        env = dict(os.environ if env is None else env)
        theirs: list[int] = []
        pipes: list[int | None] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            fd, pipe = _stream(number, stream, theirs)
            theirs.append(fd)
            pipes.append(pipe)
        # SEQPACKET: its number and its end are two messages, also where it has ended before the first is read.
        self._ended, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "words": words,
            "options": list(command[1 : len(command) - len(words)]),
            "env": env,
            "cwd": os.fspath(cwd or os.getcwd()),
            "umask": umask if umask >= 0 else _umask(),  # this process's: its server may be that of one with another
            "group": os.getpgrp() if process_group is None and _nested else process_group,
            "session": start_new_session,
            "pass_fds": list(pass_fds),
        }
        server = _server(env)
        socket.send_fds(server, [json.dumps(request).encode()], [*theirs, *pass_fds, child.fileno()])
        if _nested is not None:
            server.close()
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

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()

    def __del__(self) -> None:
        if hasattr(self, "_ended"):  # of a program that nobody waits for
            self._ended.close()

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
    if _nested is not None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(_nested[0])
        return connection
    key = _at_start(env)
    if key not in _servers or _servers[key][0].poll() is not None:
        # SEQPACKET: a request is one message, with its descriptors.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {name: value for name, value in os.environ.items() if not name.startswith(_AT_START) or name == _PATH}
        process = _NewPython(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**own, **dict(key), _BLAS: "1", MARK: "0" * MARK_LENGTH},
            cwd="/",
            stdin=subprocess.PIPE,  # both for nothing but to be no file, which Python remembers of its streams
            stdout=subprocess.PIPE,
        )
        theirs.close()
        _servers[key] = process, ours
    return _servers[key][1]


def _at_start(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    known = (*_MENDED, _LATER)
    return tuple(sorted((name, value) for name, value in env.items() if name.startswith(_AT_START) and name not in known))


def close() -> None:
    """End the servers; what they forked goes on."""
    while _servers:
        process, connection = _servers.popitem()[1]
        connection.close()
        process.communicate()


# --- the server


def serve(connection: socket.socket, address: str) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request: of the tests by `connection`, of forked programs at `address`. Returns in such a process
    only, with what it is to run and its streams."""
    running: dict[int, tuple[int, socket.socket]] = {}
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(address)
    door.listen()
    asking: set[socket.socket] = {connection}
    while True:
        for ready in select.select([door, *asking, *running], [], [])[0]:
            if ready is door:
                asking.add(door.accept()[0])
                continue
            if isinstance(ready, int):
                pid, owner = running.pop(ready)
                status = os.waitpid(pid, 0)[1]
                os.close(ready)
                with contextlib.suppress(OSError), owner:
                    owner.send(str(os.waitstatus_to_exitcode(status)).encode())
                continue
            data, fds = _heard(ready)
            if not data:
                if ready is connection:
                    os._exit(0)
                asking.discard(ready)
                ready.close()
                continue
            gc.freeze()  # so that a fork's collector does not unshare every page
            keep_finalizers()
            pid = os.fork()
            if pid == 0:
                for mine in (door, *asking):
                    mine.close()
                for pidfd, (_, owner) in running.items():
                    os.close(pidfd)
                    owner.close()
                os.close(fds.pop())
                return json.loads(data), fds
            owner = socket.socket(fileno=fds.pop())
            for fd in fds:
                os.close(fd)
            running[os.pidfd_open(pid)] = pid, owner
            with contextlib.suppress(OSError):  # a program that has been killed meanwhile
                owner.send(str(pid).encode())


def _heard(asking: socket.socket) -> tuple[bytes, list[int]]:
    try:
        return socket.recv_fds(asking, 1 << 20, _MOST_FDS)[:2]
    except ConnectionError:
        return b"", []


def become(request: dict[str, Any], fds: Sequence[int], path: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The process that was asked for; the code of its program, and where to run it."""
    if request["session"]:
        os.setsid()
        if os.isatty(fds[0]):
            fcntl.ioctl(fds[0], termios.TIOCSCTTY, 0)
    elif request["group"] is not None:
        os.setpgid(0, request["group"])
    numbers = [0, 1, 2, *request["pass_fds"]]
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(*numbers, *fds) + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for number, fd in zip(numbers, high, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if request["umask"] >= 0:
        os.umask(request["umask"])
    env = request["env"]
    _show_mark(env.get(MARK, ""))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(request["cwd"])
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        by_line = not env.get("PYTHONUNBUFFERED") and (stream is sys.stderr or stream.isatty())
        stream.reconfigure(line_buffering=by_line, write_through="-u" in request["options"])  # type: ignore[union-attr]
    own = _paths(env)
    sys.path[:] = [*own, *(p for p in path if p not in own)]
    if env.get(_THREADS, "").isdigit():
        sys.modules["torch"].set_num_threads(int(env[_THREADS]))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own does so by itself
    signal.signal(signal.SIGINT, signal.default_int_handler)
    subprocess.Popen = sys.modules[_TORCHRUNS].Popen = Nested  # type: ignore[misc, attr-defined]
    code, variables = _program(request["words"])
    if "-P" in request["options"]:
        del sys.path[0]
    return code, variables


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
    _door = f"\0echelon-tests-{os.getpid()}"  # in the kernel's own name space, where nothing is left behind
    _nested = _door, _at_start(os.environ), os.getsid(0)
    _request = serve(socket.socket(fileno=int(sys.argv[1])), _door)
    _end.pid = os.getpid()
    try:
        exec(*become(*_request, _path))
        _end.code = 0
    except BaseException as _error:
        _end.by(_error)
