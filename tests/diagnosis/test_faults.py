"""Planted faults, with real processes: the rank that is named, and the cause, are the right ones. Slow ones are not."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from echelon.common.errors import RankFailedError
from echelon.contracts.run_dir import RunDir
from echelon.diagnosis import Evidence, Verdict, explain
from echelon.launcher.functions.launch import launch, running_server
from echelon.launcher.local import agent
from tests.kit.started import Started, wait_until
from tests.planted import faults, faults_of_loops

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
    Planted("killed", "killed", "was killed by SIGKILL while", wait_s=30),  # F1
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
    Planted("keeps_the_interpreter", "did not come", "did not come to all_reduce #"),
    Planted("sleeps_in_group", "did not come", "all_reduce"),
    Planted("no_message", "did not come", "did not come"),
    Planted("no_memory", "host out of memory", "ulimit -v", wait_s=30),
    Planted("no_cpu_time", "CPU limit", "SIGXCPU", wait_s=30),
    Planted("file_too_large", "file too large", "ulimit -f", wait_s=30),  # F11
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


# In a loop of echelon's: F11 and F12 a save that fails, F16 a NaN on one rank, F19 data.
OF_LOOPS = [
    Planted("step_raises", "exception", "raised ValueError at", wait_s=30),
    Planted("step_stands", "did not come", "in update 7", wait_s=4),
    Planted("step_stops", "stopped", "in update 7", wait_s=4),
    Planted("further_collective", "mismatched shape", "faults_of_loops.py", wait_s=4),
    Planted("nan", "not finite", "nan", wait_s=30, often=True),
    Planted("data_stands", "slow data", "waiting for the data of update 7", wait_s=4),
    Planted("data_raises", "data", "Input/output error", wait_s=30),
    Planted("worker_killed", "data worker", "worker", wait_s=30),
    Planted("save", "file too large", "ulimit -f", wait_s=30),
    Planted("async_save", "file too large", "ulimit -f", wait_s=30),
    Planted("fewer_batches", "ranks disagree", ": 6", "all", wait_s=30),
]
SLOW = ["slow_data", "slow_step", "slow_between_epochs"]
OF_MORE = ("step_stands", "further_collective", "nan", "data_stands", "worker_killed", "fewer_batches")  # a cause each
EACH_RANK = ("killed", "raises", "leaves", "stops", "another_operation", "another_shape")  # the others at a rank by chance


def _params(planted: list[Planted]) -> list[object]:
    return [pytest.param(p, id=p.fault, marks=() if p.often else pytest.mark.full) for p in planted]


def _run(folder: Path, program: Callable[..., None], ranks: int, *args: object) -> tuple[Verdict, str]:
    """What is concluded from the folder that the run left, and the error that the caller got."""
    error = ""
    try:
        launch(program, ranks=ranks, args=args, run_dir=folder, timeout_s=120)
    except RankFailedError as failed:
        error = str(failed)
    (path,) = (p for p in folder.iterdir() if (p / "attempts").is_dir())
    return explain(Evidence.of(path, RunDir(path).attempt)), error


def _check(folder: Path, planted: Planted, rank: int, ranks: int) -> None:
    args = (planted.fault, rank, 5, planted.wait_s)
    _judge(planted, rank, ranks, *_run(folder, faults.main, ranks, *args))


def _check_loop(folder: Path, planted: Planted, rank: int, ranks: int) -> None:
    layout = "fsdp" if "save" in planted.fault else "ddp"
    args = (planted.fault, rank, str(folder), layout, planted.wait_s)
    with pytest.MonkeyPatch.context() as patch:
        if planted.wait_s < 30:  # else the others end by themselves, and a busy machine takes long until they have said why
            patch.setattr(agent, "_FAILURE_GRACE_S", 0.5)  # for which ranks that stand are asked to end
        _judge(planted, rank, ranks, *_run(folder, faults_of_loops.train, ranks, *args))


def _judge(planted: Planted, rank: int, ranks: int, verdict: Verdict, error: str) -> None:
    assert (verdict.guilty, verdict.cause) == (planted.guilty(rank, ranks), planted.cause), f"rank {rank}: {verdict}\n{error}"
    assert planted.says in verdict.paragraph, verdict


@pytest.fixture(autouse=True)
def all_ended(launched_ranks_are_loaded: None) -> Iterator[None]:
    yield
    server = running_server()
    if server is not None:  # workers that load data see within seconds that their rank has gone
        wait_until(lambda: not psutil.Process(server.pid).children(recursive=True), "what the ranks have started has ended")


@pytest.mark.full(but=("leaves", "raises", "another_shape"))
@pytest.mark.parametrize("planted", _params(PLANTED))
def test_of_two_ranks_the_guilty_one_is_named_with_the_cause(planted: Planted, tmp_path: Path) -> None:
    _check(tmp_path, planted, random.randrange(2), 2)


@pytest.mark.full
@pytest.mark.parametrize("planted", [pytest.param(p, id=p.fault) for p in PLANTED if p.fault not in EACH_RANK])
def test_of_four_ranks_the_guilty_one_is_named_with_the_cause(planted: Planted, tmp_path: Path) -> None:
    _check(tmp_path, planted, random.randrange(4), 4)


@pytest.mark.full
@pytest.mark.parametrize(("fault", "rank"), [(fault, (n + k) % 4) for n, fault in enumerate(EACH_RANK) for k in (0, 2)])
def test_each_of_four_ranks_may_be_the_guilty_one(fault: str, rank: int, tmp_path: Path) -> None:
    """The first and the third after it, of each fault: every rank three times."""
    _check(tmp_path, next(planted for planted in PLANTED if planted.fault == fault), rank, 4)


@pytest.mark.parametrize("planted", _params(OF_LOOPS))
def test_in_a_loop_of_ours_the_guilty_one_of_two_is_named(planted: Planted, tmp_path: Path) -> None:
    _check_loop(tmp_path, planted, random.randrange(2), 2)


@pytest.mark.full
@pytest.mark.parametrize("planted", [pytest.param(p, id=p.fault) for p in OF_LOOPS if p.fault in OF_MORE])
def test_in_a_loop_of_ours_the_guilty_one_of_four_is_named(planted: Planted, tmp_path: Path) -> None:
    _check_loop(tmp_path, planted, random.randrange(4), 4)


@pytest.mark.full
@pytest.mark.parametrize("fault", SLOW)
def test_who_is_slow_is_not_accused(fault: str, tmp_path: Path) -> None:
    verdict, error = _run(tmp_path, faults_of_loops.train, 2, fault, random.randrange(2), str(tmp_path))
    assert (verdict.guilty, verdict.cause, error) == ((), "fine", "")


@pytest.mark.full
def test_who_is_slow_in_a_loop_of_its_own_is_not_accused(tmp_path: Path) -> None:
    verdict, error = _run(tmp_path, faults.main, 2, "slow", random.randrange(2), 5, 30.0)
    assert (verdict.guilty, verdict.cause, error) == ((), "fine", "")


HANGING = ("sleeps", "stops", "keeps_the_interpreter", "another_operation", "group_first", "no_message")


@pytest.mark.full
@pytest.mark.parametrize(
    "planted",
    [pytest.param(p, id=p.fault, marks=() if p.fault == "sleeps" else pytest.mark.full) for p in PLANTED if p.fault in HANGING],
)
def test_a_hang_is_ended_and_explained_long_before_gloo_gives_up(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_HANG_TIMEOUT", "2")
    ranks = 2 if planted.often or planted.fault == "sleeps" else 3
    rank = random.randrange(ranks)
    _judge(planted, rank, ranks, *_run(tmp_path, faults.main, ranks, planted.fault, rank, 8, 600.0))  # few calls have patience


EXPLAINED = "import faults\nfaults.main('raises', 1, 5, 30.0)\n"


def test_echelon_run_says_why_and_echelon_explain_repeats_it(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "faults.py").write_text(Path(faults.__file__).read_text())
    (tmp_path / "train.py").write_text(EXPLAINED)
    run = echelon_command("run", "--ranks", "2", "--name", "x", "train.py")
    number = faults.raises.__code__.co_firstlineno + 1
    line = f"Rank 1 raised ValueError at faults.py:{number} in raises while rank 0 waited in all_reduce #6: "
    line += "the labels of this shard are missing."
    assert run.returncode == 1 and f"why: {line}" in run.stderr.splitlines(), run.stderr
    told = echelon_command("explain", "runs/x")
    assert told.returncode == 0 and " ".join(told.stdout.split()).startswith(line), told


@pytest.mark.full
@pytest.mark.parametrize("fault", ["another_operation", "another_shape", "another_type", "skips", "sleeps"])
def test_check_collectives_finds_it_at_the_call(fault: str, tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "faults.py").write_text(Path(faults.__file__).read_text())
    run = echelon_command("run", "--check-collectives", "--ranks", "3", "--name", "x", "faults.py", fault, "1", "5", "8")
    verdict = explain(Evidence.of(tmp_path / "runs/x", 0))
    assert run.returncode == 1 and verdict.guilty == (1,), (verdict, run.stderr)


@pytest.mark.full
def test_a_run_that_goes_on_and_one_whose_launcher_was_killed(started: Started) -> None:
    """F6 and F8: nobody wrote down how it ended."""
    run = started.run("--ranks", "2", "--name", "x", started.script("import time; print('ready', flush=True); time.sleep(600)"))
    log = started.folder / "runs/x/attempts/000/rank1.log"
    wait_until(lambda: log.exists() and "ready" in log.read_text(), "the ranks run")
    assert explain(Evidence.of(started.folder / "runs/x", 0)).cause == "running"
    run.kill()
    run.wait()
    started.all_gone()
    verdict = explain(Evidence.of(started.folder / "runs/x", 0))
    assert (verdict.guilty, verdict.cause) == ((), "launcher killed"), verdict


@pytest.mark.parametrize("rank", [0, 1])
def test_the_one_rank_that_was_sent_a_signal_is_named(started: Started, rank: int) -> None:
    """As by a program that makes room in memory; the others end because it does."""
    program = f"import os, signal\nif os.environ['RANK'] == '{rank}': os.kill(os.getpid(), signal.SIGUSR1)\nraise SystemExit(75)"
    run = started.run("--ranks", "2", "--name", "x", started.script(program))
    _, err = run.communicate(timeout=120)
    assert (
        run.returncode == 75 and f"why: Rank {rank} was sent SIGUSR1, and no other rank was: all stopped for it." in err.decode()
    ), err
    assert explain(Evidence.of(started.folder / "runs/x", 0)).guilty == (rank,)


@pytest.mark.full
def test_a_run_that_was_asked_to_stop(started: Started) -> None:
    """F7."""
    run = started.run("--ranks", "2", "--name", "x", "--stop-after", "2", started.script("import time; time.sleep(600)"))
    assert run.wait(120) == 75
    assert explain(Evidence.of(started.folder / "runs/x", 0)).cause == "asked to stop"
