"""Start a script on Dragon's runtime, and leave nothing behind.

`dragon` hangs for ever as a session leader, does not hear SIGINT, and on SIGTERM leaves the script, its ranks and 6 GB of
shared memory behind (dragonhpc 0.15). So it gets a process group of its own in our session, and we end that group.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from echelon.contracts.errors import UsageError

__all__ = ["run_on_dragon"]

_SHARED_MEMORY = "/dev/shm/"


class _Stopped(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


def run_on_dragon(script: str, args: Sequence[str] = (), *, nodes: bool = False, grace_s: float = 5.0) -> int:
    """Run `script` as Dragon's head process and wait for it.

    Args:
        nodes: over all nodes of the allocation that this process is in; otherwise on this node alone.
        grace_s: how long the script and its ranks may take to end after SIGINT, SIGTERM or SIGHUP.
    Returns:
        The script's exit code; 128 + n after signal n.
    Raises:
        UsageError: dragonhpc is not installed.
    """
    if importlib.util.find_spec("dragon") is None:
        raise UsageError("Dragon is not installed: pip install 'echelon[dragon]' (Linux on x86_64, Python 3.11 or later).")
    scripts = sysconfig.get_path("scripts")
    # Its own helpers are looked for on the path, which a virtual environment that is not activated is not on.
    env = {**os.environ, "PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")])}
    command = [str(Path(scripts) / "dragon"), "-m" if nodes else "-s", script, *args]
    with _signals_raise():
        process = subprocess.Popen(command, env=env, process_group=0)
        try:
            code = process.wait()
            code = code if code >= 0 else 128 - code
        except _Stopped as stop:
            code = 128 + stop.number
        finally:
            _end_group(process, grace_s)
    return code


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End what is left of the group, and remove the memory that it shared. After a good end nothing is left."""
    members = _members(process.pid)
    segments = {path for member in members for path in _segments(member)}
    # SIGINT to the script and its ranks, which may save; SIGTERM would end the runtime under them.
    for pid in members:
        if pid != process.pid:
            _signal(pid, signal.SIGINT)
    until = time.monotonic() + grace_s
    while members and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    segments |= {path for member in _members(process.pid) for path in _segments(member)}
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stem in {Path(path).name[:6] for path in segments}:  # DDnnnn: one runtime's
        for path in Path(_SHARED_MEMORY).glob(f"{stem}*"):
            with contextlib.suppress(OSError):
                path.unlink()


def _members(group: int) -> list[int]:
    import psutil  # type: ignore[import-untyped,unused-ignore]

    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group and psutil.pid_exists(pid) and not _is_zombie(pid):
                found.append(pid)
    return found


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return True


def _segments(pid: int) -> set[str]:
    """Dragon's pools of memory that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(None, 5)[5] for line in lines if _SHARED_MEMORY + "DD" in line}
    return {path.removesuffix(" (deleted)") for path in paths}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        for heard in previous:
            signal.signal(heard, signal.SIG_IGN)  # one is enough: what follows has a time limit
        raise _Stopped(number)

    previous: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for heard, handler in previous.items():
            signal.signal(heard, handler)
