"""Planted faults, with real processes: the rank that is named, and the cause, are the right ones. Slow ones are not."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from echelon.contracts.errors import RankFailedError
from echelon.contracts.run_dir import RunDir
from echelon.launcher.explain import Evidence, Verdict, explain
from echelon.launcher.functions.run import launch
from echelon.launcher.local import elastic
from tests.planted import faults

Command = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Planted:
    """A fault, and what must be said of it.

    Args:
        cause: as `Verdict.cause`.
        of_two: who is named of two ranks: "mine" the one that has the fault, "all" both, where nothing tells them apart.
        often: it belongs to `make test`.
    """

    fault: str
    cause: str
    says: str = ""
    of_two: str = "mine"
    of_more: str = "mine"
    wait_s: float = 2.0
    often: bool = False

    def guilty(self, rank: int, ranks: int) -> tuple[int, ...]:
        who = self.of_two if ranks == 2 else self.of_more
        return {"mine": (rank,), "all": tuple(range(ranks)), "none": ()}[who]


# The numbers are those of the catalogue of faults: F1 a killed rank, F2 an exception, F3 one that a thread keeps alive, F4 a rank
# that leaves, F5 one that stands, F11 a full disk, F17 another order, F18 other shapes and types, F19 workers that load data.
PLANTED = [
    Planted("killed", "killed", "was killed by SIGKILL while", wait_s=30, often=True),  # F1
    Planted("terminated", "killed", "was ended by SIGTERM", wait_s=30),
    Planted("crashes", "crash", "crashed: SIGSEGV at", wait_s=30),
    Planted("aborts", "crash", "crashed: SIGABRT at", wait_s=30),
    Planted("raises", "exception", "raised ValueError at", wait_s=30, often=True),  # F2
    Planted("raises_from_what_it_lost", "exception", "raised KeyError", wait_s=30),
    Planted("connection_elsewhere", "exception", "raised ConnectionResetError", wait_s=30),
    Planted("all_raise", "exception", "raised ValueError", "all", "all", wait_s=30),
    Planted("raises_beside_a_thread", "exception", "raised ValueError at", wait_s=30),  # F3
    Planted("leaves", "left early", "left with exit code 0 before the others", wait_s=30, often=True),  # F4
    Planted("exits", "exit", "ended itself with exit code 3", wait_s=30),
    Planted("exits_hard", "exit", "ended with exit code 7", wait_s=30),
    Planted("fewer_steps", "mismatched order", "called barrier where", "all"),
    Planted("more", "mismatched order", "called barrier", "all"),
    Planted("stops", "stopped", "stopped", often=True),  # F5
    Planted("sleeps", "did not come", "in sleeps"),
    Planted("spins", "did not come", "in spins"),
    Planted("waits_for_a_program", "did not come", "in waits_for_a_program"),
    Planted("keeps_the_interpreter", "did not come", "did not come to all_reduce #6"),
    Planted("sleeps_in_group", "did not come", "all_reduce"),
    Planted("no_message", "did not come", "did not come"),
    Planted("no_memory", "host out of memory", "ulimit -v", wait_s=30),
    Planted("no_cpu_time", "CPU limit", "SIGXCPU", wait_s=30),
    Planted("file_too_large", "disk full", "Make room", wait_s=30),  # F11
    Planted("another_operation", "mismatched order", "called all_gather (f32[8]) where", "all", often=True),  # F17
    Planted("barrier_first", "mismatched order", "called barrier where", "all"),
    Planted("group_first", "mismatched order", "waited for one another", "all"),
    Planted("skips", "mismatched order", "called barrier where", "all"),
    Planted("another_shape", "mismatched shape", "called all_reduce (f32[3])", often=True),  # F18
    Planted("another_type", "mismatched shape", "called all_reduce (f64[4])"),
    Planted("worker_dies", "data worker", "num_workers=0", wait_s=30),  # F19
    Planted("worker_raises", "exception", "Caught OSError in DataLoader worker", wait_s=30),
    Planted("worker_stands", "slow data", "in _reads", wait_s=8),
]


def _run(folder: Path, planted: Planted, rank: int, ranks: int) -> tuple[Verdict, str]:
    """What is concluded from the folder that the run left, and the error that the caller got."""
    with pytest.raises(RankFailedError) as caught:
        launch(faults.main, ranks=ranks, args=(planted.fault, rank, 5, planted.wait_s), run_dir=folder, timeout_s=60)
    (path,) = (p for p in folder.iterdir() if (p / "attempts").is_dir())
    return explain(Evidence.of(path, RunDir(path).attempt)), str(caught.value)


def _check(folder: Path, planted: Planted, rank: int, ranks: int) -> None:
    verdict, error = _run(folder, planted, rank, ranks)
    assert (verdict.guilty, verdict.cause) == (planted.guilty(rank, ranks), planted.cause), f"{verdict}\n{error}"
    assert planted.says in verdict.paragraph, verdict


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch, launched_ranks_are_loaded: None) -> None:
    monkeypatch.setattr(elastic, "_FAILURE_GRACE_S", 0.5)  # for which ranks that stand are asked to end


@pytest.mark.parametrize("planted", [pytest.param(p, id=p.fault, marks=() if p.often else pytest.mark.full) for p in PLANTED])
def test_of_two_ranks_the_guilty_one_is_named_with_the_cause(planted: Planted, tmp_path: Path) -> None:
    _check(tmp_path, planted, random.randrange(2), 2)


@pytest.mark.full
@pytest.mark.parametrize("planted", [pytest.param(p, id=p.fault) for p in PLANTED])
def test_of_four_ranks_the_guilty_one_is_named_with_the_cause(planted: Planted, tmp_path: Path) -> None:
    _check(tmp_path, planted, random.randrange(4), 4)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("planted", [pytest.param(p, id=p.fault) for p in PLANTED if p.often])
def test_nine_more_times_at_random_ranks(planted: Planted, ranks: int, tmp_path: Path) -> None:
    for time in range(9):
        (folder := tmp_path / str(time)).mkdir()
        _check(folder, planted, random.randrange(ranks), ranks)
