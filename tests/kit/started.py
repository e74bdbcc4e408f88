"""Programs that a test runs beside itself, and waiting for what they do."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import clean_environment
from tests.kit import forked
from tests.kit.forked import MARK


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
    """Poll until the condition is true; fail by name if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def processes_with(mark: str) -> list[psutil.Process]:
    """Every process whose environment holds the mark, whoever its parent is."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


class Started:
    """Programs that a test runs beside itself; whatever they leave is found by a mark in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, secrets.token_hex(forked.MARK_LENGTH // 2)
        self.processes: list[subprocess.Popen[bytes]] = []

    def python(self, *args: str, **options: Any) -> subprocess.Popen[bytes]:
        return self.program([sys.executable, *args], **options)

    def program(self, command: list[str], *, fresh: bool = False, **options: Any) -> subprocess.Popen[bytes]:
        """Options are those of `subprocess.Popen`. A program of Python is forked from one that has torch loaded; with `fresh`,
        Python starts anew, for tests of how it starts and ends."""
        env = {**clean_environment(), MARK: self.mark, "TMPDIR": str(self.folder), **options.pop("env", {})}
        defaults = {"cwd": self.folder, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with forked.anew() if fresh else forked.instead_of_new():
            process = subprocess.Popen(command, env=env, **{**defaults, **options})
        self.processes.append(process)
        return process

    def run(self, *args: str, **options: Any) -> subprocess.Popen[bytes]:
        return self.python("-m", "echelon", "run", *args, **options)

    def script(self, text: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def ranks_run(self, count: int = 2) -> None:
        """Wait until each of so many ranks has made its file `ready0`, `ready1` and so on."""
        wait_until(lambda: all((self.folder / f"ready{rank}").exists() for rank in range(count)), "the ranks run")

    def alive(self) -> list[psutil.Process]:
        return processes_with(self.mark)

    def all_gone(self, timeout_s: float = 60.0) -> None:
        wait_until(lambda: not self.alive(), "every process has ended", timeout_s)

    def end(self) -> None:
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for started in self.processes:
            started.wait()
            for pipe in (started.stdin, started.stdout, started.stderr):
                if pipe is not None:
                    pipe.close()
