"""Ends a Dragon runtime with all that it leaves behind: processes, shared memory, the folder of its groups.

Dragon does not notice the death of its starter; nor, if Dragon itself is killed, do its ranks end (dragonhpc 0.15). So a guard, a
process in a session of its own, waits for its standard input to close, and then ends what is left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from echelon.common.machine import process_stat
from echelon.launcher.local.processes import signal_if

__all__ = ["Guard", "end_runtime"]

_SHARED_MEMORY = Path("/dev/shm")
_KILLED_S = 10.0
_DISMISSED = b"over\n"


class Guard:
    """Ends the watched runtime when this process dies, even by SIGKILL.

    Args:
        folder, grace_s: see `end_runtime`.
    """

    def __init__(self, folder: Path, grace_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "echelon.launcher.dragon.guard", str(folder), str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        self._say(f"{group}\n".encode())

    def dismiss(self) -> None:
        self._say(_DISMISSED)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, text: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the guard may have been killed
            self._process.stdin.write(text)
            self._process.stdin.flush()


def end_runtime(group: int, grace_s: float, folder: Path) -> None:
    """End what is left of the runtime, and remove its shared files. After a normal end nothing is left.

    Args:
        group: its process group. The group's first process may have ended, but must not have been waited for.
        grace_s: seconds for the script and its ranks to end.
        folder: the folder of its groups, which is removed, too.
    """
    members = _members(group)
    # SIGINT for the script and its ranks, which may save; SIGTERM would end the runtime first.
    for pid in members:
        if pid != group:
            with contextlib.suppress(ProcessLookupError):
                signal_if(pid, signal.SIGINT, lambda pid: os.getpgid(pid) == group)
    memory = {path for pid in members for path in _mapped(pid)}
    until = time.monotonic() + grace_s
    while members and group in (now := _members(group)) and time.monotonic() < until:
        memory |= {path for pid in set(now) - set(members) for path in _mapped(pid)}
        time.sleep(0.05)
    until = time.monotonic() + _KILLED_S
    while _members(group) and time.monotonic() < until:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        time.sleep(0.01)
    _remove(memory | {str(path) for path in _SHARED_MEMORY.glob(f"{_stem(group)}*")})
    shutil.rmtree(folder, ignore_errors=True)


def _stem(pid: int) -> str:
    """Prefix of the names of a runtime's own segments: three digits of the user's id, and three of the process's."""
    return f"DD{str(os.getuid())[-3:]}{str(pid)[-3:]}"


def _remove(paths: set[str]) -> None:
    """Remove segments that no process uses: another runtime may have the same digits."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # here: few runs need it

    used = {path for pid in psutil.pids() for path in _mapped(pid)} if any(map(os.path.exists, paths)) else set()
    for path in paths - used:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _members(group: int) -> list[int]:
    import psutil

    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group and process_stat(pid)[:1] not in ([], ["Z"]):
                members.append(pid)
    return members


def _mapped(pid: int) -> set[str]:
    """Dragon's shared memory segments that a process uses."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split(None, 5)[5] for line in lines if f"{_SHARED_MEMORY}/DD" in line and not line.endswith("(deleted)")}


def main(folder: str, grace_s: str) -> None:
    """The guard's process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # signals are for the process that started the guard
    message = sys.stdin.buffer.read()
    group, _, last = message.partition(b"\n")
    if last != _DISMISSED and group.isdigit():
        end_runtime(int(group), float(grace_s), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
