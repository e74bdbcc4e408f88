"""The harness itself: quick, loud about hangs, and watchful."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from echelon.contracts.errors import RankFailedError, RankTimeoutError
from tests.conftest import Ranks


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


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_meet_and_return_values(ranks: Ranks, size: int) -> None:
    assert ranks(size, _sum_of_ranks) == [sum(range(1, size + 1))] * size


def test_a_failing_rank_raises_its_own_error_here(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match="ValueError: rank 1 has bad data") as caught:
        ranks(2, _fail_on, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_hang_ends_with_the_stacks_of_all_ranks(ranks: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        ranks(2, _wait_for_nobody, timeout_s=5)
    text = str(caught.value)
    assert "in _sum_of_ranks" in text and "in _wait_for_nobody" in text
    assert "rank 0 (still running)" in text and "rank 1 (still running)" in text
    assert time.monotonic() - began < 30  # not the hundred seconds it would sleep


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
    root = Path(__file__).resolve().parents[1]
    (folder / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(root)!r})\nfrom tests.conftest import leak_police\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTEST_ADDOPTS": ""})
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("what", LEAKS)
def test_the_leak_police_notices(leaky_run: str, what: str) -> None:
    assert f"left behind {what}" in leaky_run or f"left behind a {what}" in leaky_run


def test_the_leak_police_fails_each_leaking_test(leaky_run: str) -> None:
    assert f"{len(LEAKS)} errors" in leaky_run
