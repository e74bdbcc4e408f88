"""The harness itself: quick, loud about hangs, and watchful."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from echelon.common.errors import LayoutError, RankFailedError, RankTimeoutError, UsageError, require
from tests.conftest import Ranks
from tests.kit import refusals
from tests.kit.refusals import refused
from tests.kit.standing import StandingRanksBySize


def _sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has bad data")
    _sum_of_ranks()


def _wait_for_nobody() -> None:
    if dist.get_rank() == 1:
        time.sleep(100)
    _sum_of_ranks()


def test_a_refusal_is_one_by_its_code_its_fields_and_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(LayoutError, name="tp", got="3") as caught:
        require(False, "tp", "a divisor of 4", 3, kind=LayoutError)
    assert caught.value.code == "E-LAYOUT"
    with pytest.raises(AssertionError, match="no UsageError"), refused(UsageError):
        raise LayoutError("another class below it")
    with pytest.raises(AssertionError), refused(LayoutError, name="cp"):
        require(False, "tp", "a divisor of 4", 3, kind=LayoutError)
    monkeypatch.setattr(refusals, "golden", lambda: {refusals.VERSIONS: []})
    monkeypatch.delenv(refusals.WRITES_TO, raising=False)
    with pytest.raises(AssertionError, match="--write-golden"), refused(LayoutError):
        raise LayoutError("words that nobody has written down")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_meet_and_return_values(ranks: Ranks, size: int) -> None:
    assert ranks(size, _sum_of_ranks) == [sum(range(1, size + 1))] * size


@pytest.mark.full
def test_a_failing_rank_raises_its_own_error_here(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match="ValueError: rank 1 has bad data") as caught:
        ranks(2, _fail_on, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.full
def test_a_hang_ends_with_the_stacks_of_all_ranks(ranks: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        ranks(2, _wait_for_nobody, timeout_s=10)
    text = str(caught.value)
    assert "in _sum_of_ranks" in text and "in _wait_for_nobody" in text
    assert "rank 0 (still running)" in text and "rank 1 (still running)" in text
    assert time.monotonic() - began < 60  # not the hundred seconds it would sleep


def _process() -> int:
    return os.getpid()


def _change_what_is_reset(folder: str) -> tuple[str | None, str, bool, float]:
    ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    seen = os.environ.get("LEFT_BEHIND"), os.getcwd(), ignored, float(torch.rand(()))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir(folder)
    return seen


def _leave_behind(what: str) -> None:
    if what == "another default dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "all_reduce":
        dist.all_reduce = print


@pytest.mark.full
def test_standing_ranks_are_the_same_processes(standing_ranks: StandingRanksBySize) -> None:
    first = standing_ranks(2, _process)
    assert standing_ranks(2, _process) == first and len(set(first)) == 2
    assert standing_ranks(2, _sum_of_ranks) == [3, 3]


def test_standing_ranks_find_everything_as_new_ones_do(standing_ranks: StandingRanksBySize, tmp_path: Path) -> None:
    first = standing_ranks(2, _change_what_is_reset, str(tmp_path))
    assert standing_ranks(2, _change_what_is_reset, str(tmp_path)) == first
    assert {seen[:3] for seen in first} == {(None, os.getcwd(), False)}


@pytest.mark.full
@pytest.mark.parametrize("what", ["another default dtype", "all_reduce"])
def test_what_cannot_be_reset_is_an_error_and_the_next_call_has_new_ranks(standing_ranks: StandingRanksBySize, what: str) -> None:
    before = standing_ranks(2, _process)
    with pytest.raises(RankFailedError, match=what):
        standing_ranks(2, _leave_behind, what)
    assert not set(standing_ranks(2, _process)) & set(before)


LEAKS = {
    "environment": "import os\ndef test_it():\n    os.environ['LEFT_BEHIND'] = '1'\n",
    "process group": "import torch.distributed as dist\n"
    "def test_it():\n    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n",
    "process": "import subprocess, sys\ndef test_it():\n    global p\n    p = subprocess.Popen(['sleep', '20'])\n",
    "thread": "import threading, time\n"
    "def test_it():\n    threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n",
    "open files": "def test_it(tmp_path):\n    global f\n    f = open(tmp_path / 'left', 'w')\n",
}


@pytest.fixture(scope="module")
def leaky_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of a pytest of its own, in which every test leaves something behind."""
    folder = tmp_path_factory.mktemp("leaks")
    for what, source in LEAKS.items():
        (folder / f"test_{what.replace(' ', '_')}.py").write_text(source)
    root = Path(__file__).resolve().parents[2]
    (folder / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(root)!r})\nfrom tests.conftest import leak_police\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTEST_ADDOPTS": ""})
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("what", LEAKS)
def test_the_leak_police_notices(leaky_run: str, what: str) -> None:
    assert f"left behind {what}" in leaky_run or f"left behind a {what}" in leaky_run


def test_the_leak_police_fails_each_leaking_test(leaky_run: str) -> None:
    assert f"{len(LEAKS)} errors" in leaky_run
