"""Programs forked for a test are what they would be if Python had been started for each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
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


def test_a_forked_program_and_what_it_forks_carry_the_mark_of_their_test(started: Started, waits: Any) -> None:
    child = started.python("-c", "import os, time\nos.fork()\nos.write(1, b'here\\n')\ntime.sleep(600)")
    assert [child.stdout.readline() for _ in range(2)] == [b"here\n"] * 2  # type: ignore[union-attr]
    assert len(started.alive()) == 3
    for process in started.alive():
        process.kill()
    started.all_gone()


def test_two_forked_programs_do_not_begin_with_the_same_random_numbers(tmp_path: Path) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    first, second = (forked.run([sys.executable, "-c", code], capture_output=True).stdout.split() for _ in range(2))
    assert not set(first) & set(second)


def test_a_program_that_needs_a_python_of_its_own_gets_one(tmp_path: Path) -> None:
    for command, options in (
        ([sys.executable, "-X", "dev", "x.py"], {}),
        ([sys.executable, "-"], {}),
        (["bash", "x.py"], {}),
        ([sys.executable, "x.py"], {"preexec_fn": time.time}),
    ):
        assert not forked.can_fork(command, options)
    assert forked.can_fork([sys.executable, "x.py"], {"cwd": tmp_path})


NEST = """
import json, os, subprocess, sys
reader, writer = os.pipe()
inner = subprocess.Popen([sys.executable, *sys.argv[1:], str(writer)], pass_fds=[writer], umask=0o027, stdout=subprocess.PIPE)
out = inner.communicate()[0]
os.close(writer)
told, is_new = os.read(reader, 9).decode(), isinstance(inner, subprocess.Popen)
group, *rest = json.loads(out)
print(json.dumps([group == os.getpgrp(), rest, told, inner.returncode, is_new]))
"""
INNER = """
import json, os, sys
os.write(int(sys.argv[1]), b"told")
print(json.dumps([os.getpgrp(), os.getsid(0), os.umask(0), sys.path[0], sys.argv[1:]]), flush=True)
sys.exit(5)
"""


@pytest.mark.parametrize("words", [["-P", "-c", INNER], ["inner.py"]], ids=lambda w: w[0])
def test_what_a_forked_program_starts_is_forked_and_what_it_would_be(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "nest.py").write_text(NEST)
    (tmp_path / "inner.py").write_text(INNER)
    options: dict[str, Any] = {"cwd": tmp_path, "env": clean_environment(), "capture_output": True, "text": True}
    options["process_group"] = 0
    command = [sys.executable, "nest.py", *words]
    (*new, is_new), (*same, is_same) = (json.loads(run(command, **options).stdout) for run in (subprocess.run, forked.run))
    assert new == same and new[0] and new[2:] == ["told", 5] and (is_new, is_same) == (True, False)


def test_a_forked_program_launches_ranks_from_a_forked_server(tmp_path: Path) -> None:
    """Which has torch loaded, though the program loads nothing."""
    code = "import os, sys\ndef loaded(): return 'torch._dynamo' in sys.modules, os.getpgrp() == os.getpid()\n"
    code += "if __name__ == '__main__':\n    from echelon import launch\n    print(launch(loaded, ranks=2))\n"
    (tmp_path / "script.py").write_text(code)
    done = forked.run([sys.executable, "script.py"], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True)
    assert done.stdout == "[(True, True), (True, True)]\n", done.stderr
