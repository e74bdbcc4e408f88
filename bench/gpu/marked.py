"""The tests marked `gpu`. A test that hangs, crashes or breaks the device does not stop the others.

pytest runs in a process of its own, which records the beginning and the end of each test. If that process dies or is killed, the
current test is named and a new process runs the remaining tests.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.rows import LeftOut, Notes
from bench.gpu.runner import Setting

ROOT = Path(__file__).resolve().parents[2]
TEST_LIMIT_S = 45  # of one test
_BROKEN_DEVICE = 70  # exit code: no test after this one could use the device


def run(setting: Setting, notes: Notes) -> None:
    import pytest  # noqa: F401  # reports here if it is missing

    os.chdir(ROOT)
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    if setting.device == "cpu":
        os.environ["ECHELON_GPU_TESTS_ON"] = "cpu"
        files = ["tests/shape/test_gpu.py"]
    os.environ.pop("CI", None)  # with CI set, a skipped test fails
    seen: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + setting.limit_s - 5.0
    ended = False
    while not ended:
        ended = _attempt(files, seen, setting.folder / "tests", end)
    outcomes = [found.get("outcome", "died") for found in seen.values()]
    for name, found in seen.items():
        if found.get("outcome") != "passed":
            status = "left out" if found.get("outcome") == "skipped" else "failed"
            notes(_short(name), remark=found.get("message", ""), status="left out" if status == "left out" else "failed")
    if not seen:
        raise LeftOut("pytest ran no test; see its log") if setting.small else RuntimeError("pytest ran no test")
    slowest = max(seen.items(), key=lambda item: float(item[1].get("seconds", 0.0)))
    remark = f"of {len(seen)}; the slowest, {_short(slowest[0])}, took {slowest[1].get('seconds', 0.0):.1f} s"
    notes("tests passed", outcomes.count("passed"), remark=remark)


def _short(name: str) -> str:
    return name.rpartition("::")[2]


def _attempt(files: Sequence[str], seen: dict[str, dict[str, Any]], lines: Path, end: float) -> bool:
    """Run the tests not seen yet. Returns true if there is nothing more to run."""
    lines.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _pytest(files, list(seen), lines)
        finally:
            os._exit(code)
    code: int | None = None
    while code is None and time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    if code is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    before = len(seen)
    for line in lines.read_text().splitlines() if lines.exists() else ():
        found = json.loads(line)
        seen.setdefault(found.pop("test"), {}).update(found)
    if code is None:
        _died(seen, "the time for the tests was over; those after it did not run")
        return True
    if code < 0:
        name = signal.Signals(-code).name
        _died(seen, f"hung: killed after {TEST_LIMIT_S} s" if name == "SIGALRM" else f"died by {name}")
    elif code != _BROKEN_DEVICE:
        return True
    return len(seen) == before  # if it died before the first test, it would do so again


def _died(seen: dict[str, dict[str, Any]], message: str) -> None:
    for found in seen.values():
        if "outcome" not in found:
            found.update(outcome="died", message=message)


def _pytest(files: Sequence[str], done: Sequence[str], lines: Path) -> int:
    import pytest

    options = ["-q", "-m", "gpu", "-o", "filterwarnings=", "-p", "no:cacheprovider", "--color=no"]
    for name in done:
        options += ["--deselect", name]
    return int(pytest.main([*options, *files], plugins=[_Reporter(lines)]))


class _Reporter:
    """Writes a line to disk when a test begins and when it ends."""

    def __init__(self, lines: Path) -> None:
        self._lines, self._began = lines, 0.0

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._began = time.monotonic()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends it even if Python hangs
        signal.alarm(TEST_LIMIT_S)
        self._note(test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not (report.when == "call" or report.outcome != "passed"):
            return
        message = "" if report.passed else _message(report)
        self._note(test=report.nodeid, outcome=report.outcome, message=message, seconds=time.monotonic() - self._began)
        if report.failed and ("CUDA error" in message or "CUDA error" in str(report.longrepr)):
            os._exit(_BROKEN_DEVICE)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        signal.alarm(0)

    def _note(self, **facts: Any) -> None:
        with open(self._lines, "ab", buffering=0) as file:
            file.write(json.dumps(facts).encode() + b"\n")


def _message(report: Any) -> str:
    """The first line of the exception, or the reason of a skip."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    return text.strip().splitlines()[0][:300] if text.strip() else "failed"
