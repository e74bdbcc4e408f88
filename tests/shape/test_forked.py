"""Programs forked for a test are what they would be if Python had been started for each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import clean_environment
from tests.kit import forked
from tests.kit.started import Started, wait_until

FACTS = """
import json, multiprocessing, os, resource, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": globals().get("__file__"), "flags": repr(sys.flags),
    "spec": getattr(__spec__, "name", None), "directory": os.getcwd(), "environment": dict(os.environ), "input": sys.stdin.read(),
    "handlers": {n: repr(signal.getsignal(n)) for n in signal.valid_signals()}, "blocked": signal.pthread_sigmask(0, []),
    "group": os.getpgrp(), "session": os.getsid(0), "descriptors": sorted(os.listdir("/proc/self/fd"), key=int),
    "limits": [resource.getrlimit(n) for n in range(16)], "mask": os.umask(0), "threads": threading.active_count(),
    "main": [sys.modules[name].__dict__ is globals() for name in ("__main__", "__mp_main__")],
    "streams": [(s.encoding, s.errors, s.line_buffering, s.name, s.mode) for s in (sys.stdin, sys.stdout, sys.stderr)],
}, default=repr), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for path in (tmp_path / "script.py", package / "__main__.py"):
        path.write_text(FACTS)
    return tmp_path


@pytest.mark.parametrize("words", [["script.py", "a b"], ["-m", "package", "-x"], ["-c", FACTS, "1"]], ids=lambda w: w[0])
def test_a_forked_program_finds_what_a_new_python_finds(folder: Path, words: list[str]) -> None:
    env = {**clean_environment(), "PYTHONPATH": f"elsewhere{os.pathsep}{folder / 'package'}", "MORE": "é"}
    options: dict[str, Any] = {"cwd": folder, "env": env, "input": "typed", "capture_output": True, "text": True}
    new, same = (run([sys.executable, *words], **options) for run in (subprocess.run, forked.run))
    assert new.returncode == same.returncode == 0, same.stderr
    assert json.loads(same.stdout) == json.loads(new.stdout) and (same.stderr, new.stderr) == ("", "")


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(3)",
        "sys.exit()",
        "sys.exit('text')",
        "sys.exit(-1)",
        "1 / 0",
        "raise KeyboardInterrupt",
        "os.kill(os.getpid(), 9)",
        "print('not flushed', end='')",
        "atexit.register(print, 'last')",
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
        "os.fork() and os.wait()",
    ],
)
def test_a_forked_program_ends_as_python_does(tmp_path: Path, end: str) -> None:
    (tmp_path / "end.py").write_text(f"import atexit, os, sys, threading, time\n{end}\n")
    options: dict[str, Any] = {"cwd": tmp_path, "env": clean_environment(), "capture_output": True, "text": True}
    new, same = (run([sys.executable, "end.py"], **options) for run in (subprocess.run, forked.run))
    assert (same.returncode, same.stdout, same.stderr) == (new.returncode, new.stdout, new.stderr)


@pytest.fixture
def waits(started: Started) -> Iterator[Any]:
    process = started.python("-c", "import time\nprint('here', flush=True)\ntime.sleep(600)", start_new_session=True)
    assert isinstance(process, forked.Forked) and process.stdout.readline() == b"here\n"
    yield process


def test_a_forked_program_hears_signals_and_can_be_waited_for(waits: Any) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(0.1)
    assert waits.poll() is None and os.getsid(waits.pid) == os.getpgid(waits.pid) == waits.pid
    waits.send_signal(signal.SIGINT)
    out, err = waits.communicate(timeout=120)
    assert waits.returncode == -signal.SIGINT and out == b"" and b"KeyboardInterrupt" in err
    wait_until(lambda: not psutil.pid_exists(waits.pid), "nothing is left of it")
