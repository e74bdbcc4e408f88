"""Rank 0's output on its way to the terminal: read from pipes, copied to the rank's log, passed to a screen."""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from echelon.common.files import open_to_append
from echelon.common.terminal import put_bytes
from echelon.launcher.local.start import Handed

__all__ = ["PlainScreen", "Relay", "Screen", "SilentScreen"]


_LOG = "log"


class Screen(Protocol):
    """Owner of the terminal while ranks run."""

    def write(self, stream: str, data: bytes) -> None:
        """Show output of rank 0; `stream` is "stdout" or "stderr"."""

    def tick(self) -> None:
        """Called about ten times a second, to redraw."""

    def close(self) -> None:
        """Leave the terminal as it was found."""


class SilentScreen:
    """Shows nothing; the log has the output."""

    def write(self, stream: str, data: bytes) -> None: ...

    def tick(self) -> None: ...

    def close(self) -> None: ...


class PlainScreen(SilentScreen):
    """Passes everything on to this process's own standard output and error."""

    def write(self, stream: str, data: bytes) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        put_bytes(target, data)


class Relay:
    """A thread that moves bytes from the pipes of rank 0 to its log and to a screen, and lets the screen redraw."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._pending: list[tuple[int, str, IO[bytes]]] = []
        self._lines: list[bytes] = []
        self._logs: list[IO[bytes]] = []
        self._stopping = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="echelon-relay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open(self, log: Path) -> Handed:
        """Descriptors for a rank's standard output and error, and for text that goes to the log alone.

        The caller closes them once the rank has them.
        """
        file = open(open_to_append(log), "ab", buffering=0)
        self._logs.append(file)
        writers = []
        with self._lock:
            for stream in ("stdout", "stderr", _LOG):
                reader, writer = os.pipe()
                self._pending.append((reader, stream, file))
                writers.append(writer)
        os.write(self._wake_write, b"x")
        return Handed(*writers)

    def say(self, text: str) -> None:
        """Show a line of the launcher itself, beside the output of rank 0."""
        with self._lock:
            self._lines.append(f"echelon: {text}\n".encode())
        os.write(self._wake_write, b"x")

    def stop(self, timeout_s: float = 5.0) -> None:
        """Drain the pipes, then end. A process that outlives its rank delays this by at most the timeout."""
        self._stopping = True
        os.write(self._wake_write, b"x")
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._guarded(self._screen.close)

    def _run(self) -> None:
        open_pipes = 0
        while True:
            # The log pipe last: a rank writes there after it has printed, and one read takes all that the output pipes hold.
            for key, _ in sorted(self._selector.select(0.1), key=_is_for_the_log):
                if key.data is None:
                    os.read(self._wake_read, 4096)
                    continue
                stream, log = key.data
                data = os.read(key.fd, 65536)
                if data:
                    self._pass_on(stream, log, data)
                else:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    open_pipes -= 1
            with self._lock:
                for reader, stream, log in self._pending:
                    self._selector.register(reader, selectors.EVENT_READ, (stream, log))
                    open_pipes += 1
                self._pending.clear()
                lines, self._lines = self._lines, []
            for line in lines:
                self._guarded(self._screen.write, "stderr", line)
            self._guarded(self._screen.tick)
            if self._stopping and open_pipes == 0:
                break
        self._selector.close()
        for file in self._logs:
            file.close()

    def _pass_on(self, stream: str, log: IO[bytes], data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk costs the log, not the run
            rest = memoryview(data)
            while rest:
                rest = rest[log.write(rest) :]
        if stream != _LOG:
            self._guarded(self._screen.write, stream, data)

    def _guarded(self, show: Callable[..., None], *args: Any) -> None:
        """Call `show`, ignoring its errors: the pipes must be emptied, or rank 0 blocks in its next print."""
        try:
            show(*args)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                with contextlib.suppress(OSError):  # the terminal may be closed
                    traceback.print_exc()


def _is_for_the_log(ready: tuple[selectors.SelectorKey, int]) -> bool:
    data = ready[0].data
    return data is not None and data[0] == _LOG
