"""Ranks that make no progress: who is behind is said while they wait, and blamed when the others give up."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.common.errors import RankFailedError
from echelon.contracts.pulse import Phase, RankProgress
from echelon.contracts.records import exit_record
from echelon.contracts.run_dir import RunDir
from echelon.diagnosis.failure import Failure, render
from echelon.launcher.functions.launch import launch
from echelon.launcher.local import agent, progress, watch
from echelon.launcher.local.attempt import Attempt
from echelon.launcher.local.end_record import record_end
from echelon.launcher.local.rank_state import Pulses, RankState, behind
from echelon.launcher.local.watch import Lingering, Watch
from tests.conftest import clean_environment

HANG_AT = 6


def _hangs_here(how: str) -> None:
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(0.05)


class _Unit(ech.TrainUnit[Any]):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def train_step(self, state: ech.State, data: Any) -> None:
        step = self.train_progress.num_steps_completed
        if self.how in ("stopped", "in its step") and step == HANG_AT and torch.distributed.get_rank() == 1:
            _hangs_here(self.how)
        torch.distributed.all_reduce(torch.ones(1))


class _Batches:
    """One that knows its length; the loop reads one ahead."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        for number in range(20):
            if self.how == "data" and number == HANG_AT and torch.distributed.get_rank() == 1:
                _hangs_here(self.how)
            yield number


def _trains(how: str) -> None:
    ech.init_from_env(timeout=timedelta(seconds=4 if how in ("stopped", "raw") else 6))
    if how == "raw":  # a loop of the user's own
        for step in range(20):
            if step == HANG_AT and torch.distributed.get_rank() == 1:
                _hangs_here("stopped")
            torch.distributed.all_reduce(torch.ones(1))
        return
    ech.train(_Unit(how), _Batches(how), max_epochs=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "guilty", "said", "headline"),
    [
        (
            "stopped",
            1,
            "rank 1 is stopped, as by SIGSTOP or a debugger, in update 7; rank 0 ",
            "rank 1 stopped (no heartbeat for ",
        ),
        ("raw", 1, "rank 1 is stopped, as by SIGSTOP or a debugger; rank 0 ", "rank 1 stopped"),
        ("data", 1, "rank 1 is behind, waiting for the data of update 7, at ", "rank 1 did not come to all_reduce"),
        ("in its step", 1, "rank 1 stands, in update 7, at ", "rank 1 did not come to all_reduce"),
    ],
)
def test_a_rank_that_stands_still_is_named_while_others_wait_and_when_they_give_up(
    how: str, guilty: int, said: str, headline: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ECHELON_STALL_AFTER", "0.5")
    monkeypatch.setattr(agent, "_FAILURE_GRACE_S", 0.5)  # for which the one that hangs is asked to end
    with pytest.raises(RankFailedError) as caught:
        launch(_trains, ranks=2, args=(how,))
    err, text = capfd.readouterr().err, str(caught.value)
    assert "echelon: no step for" in err and said in err, err
    assert caught.value.rank == guilty and f"echelon: {headline}" in text and "failed first" not in text, text
    assert "Timed out waiting" in text  # what the one that waited says
    if how in ("data", "in its step"):
        where = f"{Path(__file__).name}:"
        assert f"{where}" in text and "in _hangs_here" in text and "in _hangs_here" in err


class _Fake(Pulses):
    """Pulses that a test sets."""

    def __init__(self, **standings: RankProgress) -> None:
        super().__init__()
        self.at = dict(enumerate(standings.values()))

    def read(self, rank: int) -> RankProgress:
        return self.at[rank]

    def where(self, rank: int) -> str:
        return f"train.py:{rank} in f"

    def ask(self, rank: int, send: Any) -> None:
        send(rank)


class _Scene:
    """A watch over two ranks of this process, and a clock."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.pulses, self.now = _Fake(a=RankProgress(), b=RankProgress()), 0.0
        self.watch = Watch(60.0, self.lines.append, lambda ranks: None)
        self.pids = {0: os.getpid(), 1: os.getpid()}

    def pass_time(self, seconds: float) -> list[str]:
        """Lines that are said in this time, of a look a second."""
        before = len(self.lines)
        for _ in range(int(seconds)):
            self.now += 1.0
            self.watch.look(self.pids, [0, 1], self.pulses, self.now)
        return self.lines[before:]

    def steps(self, first: int, last: int, seconds_each: float = 1.0) -> None:
        for step in range(first, last + 1):
            self.put(*[RankProgress(step, Phase.STEP, 0, 3 * step)] * 2)
            assert self.pass_time(seconds_each) == []

    def put(self, *standings: RankProgress) -> None:
        self.pulses.at = dict(enumerate(standings))


def test_a_stall_is_said_after_the_limit_again_when_it_has_doubled_and_when_it_is_over() -> None:
    scene = _Scene()
    scene.steps(0, 5)
    scene.put(RankProgress(5, Phase.STEP, 0, 18), RankProgress(5, Phase.DATA, 0, 17))
    assert scene.pass_time(60) == []
    line = "rank 1 is behind, waiting for the data of update 6, at train.py:1 in f; rank 0 waits, in update 6, at train.py:0 in f"
    assert scene.pass_time(5) == [f"no step for 62 s: {line}"]
    assert scene.pass_time(50) == []
    assert len(scene.pass_time(20)) == 1
    scene.put(*[RankProgress(6, Phase.DATA, 0, 20)] * 2)
    (over,) = scene.pass_time(3)
    assert over.startswith("steps go on, after 1")
    assert scene.pass_time(50) == []


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        (RankProgress(5, Phase.STEP, 1), RankProgress(5, Phase.DATA, 2)),  # in the second and the third micro-batch of an update
        (RankProgress(5, Phase.DATA, 1), RankProgress(5, Phase.AFTER, 2)),
        (RankProgress(5, Phase.STEP, 3), RankProgress(6, Phase.AFTER, 0)),
        (RankProgress(5, Phase.EVAL_STEP, 3), RankProgress(5, Phase.EVAL_DATA, 4)),
        (RankProgress(5, Phase.EVAL_DATA, 9), RankProgress(5, Phase.DATA, 0)),  # after the evaluation
        (RankProgress(5, Phase.BETWEEN, 9), RankProgress(5, Phase.DATA, 0)),
    ],
)
def test_who_is_behind_within_an_update_and_within_an_evaluation(slow: RankProgress, fast: RankProgress) -> None:
    assert behind({0: RankState(fast), 1: RankState(slow)}) == [1] and behind({0: RankState(slow), 1: RankState(slow)}) == []


@pytest.mark.parametrize(
    "standing",
    [
        RankProgress(5, Phase.CHECKPOINT),
        RankProgress(5, Phase.BETWEEN),
        RankProgress(5, Phase.AFTER),
        RankProgress(5, Phase.EVAL_STEP, 0, 2),
        RankProgress(0, Phase.STEP, 0, 2),
    ],
)
def test_what_takes_long_by_its_nature_has_five_times_as_long(standing: RankProgress) -> None:
    scene = _Scene()
    if standing.step:
        scene.steps(0, 5)
    scene.put(standing, standing)
    assert scene.pass_time(299) == []
    assert len(scene.pass_time(5)) == 1


def test_of_one_rank_that_saves_while_another_is_ahead_the_patience_is_that_of_a_save() -> None:
    scene = _Scene()
    scene.steps(0, 5)
    scene.put(RankProgress(5, Phase.CHECKPOINT, 0, 16), RankProgress(5, Phase.STEP, 0, 18))
    assert scene.pass_time(299) == []
    assert "rank 0 is behind, in a checkpoint after update 5" in scene.pass_time(5)[0]


def test_slow_steps_have_ten_times_as_long_as_they_usually_take() -> None:
    scene = _Scene()
    scene.steps(0, 6, seconds_each=40)
    assert scene.pass_time(300) == []
    assert len(scene.pass_time(120)) == 1


def test_ranks_without_a_loop_of_ours_and_past_it_are_left_alone() -> None:
    scene = _Scene()
    assert scene.pass_time(2000) == []
    scene.steps(0, 5)
    scene.put(RankProgress(5, Phase.ENDED), RankProgress(5, Phase.ENDED))
    assert scene.pass_time(2000) == []


def test_a_launcher_that_was_stopped_itself_concludes_nothing_from_the_time() -> None:
    scene = _Scene()
    scene.steps(0, 5)
    scene.now += 3600
    assert scene.pass_time(50) == []


def test_a_rank_that_was_stopped_for_a_moment_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loop of its own it has had no step for hours."""
    scene = _Scene()
    assert scene.pass_time(4000) == []
    stopped = [False]
    monkeypatch.setattr(progress, "is_stopped", lambda pid: stopped[0])
    stopped[0] = True
    assert scene.pass_time(50) == []
    stopped[0] = False
    assert scene.pass_time(50) == []
    stopped[0] = True
    assert re.match(r"no step for 6\d s: ranks 0, 1 are stopped", scene.pass_time(70)[0])


def _gave_up(rank: int) -> Failure:
    text = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation to complete"
    return Failure(rank, 1, rank, "RuntimeError", text, traceback=f"RuntimeError: {text}")


def _blamed(folder: Path, failures: list[Failure], seen: dict[int, RankState]) -> Failure:
    first = record_end(RunDir(folder).at_attempt(0), 1, failures, seen=seen, world_size=len(seen))
    assert first is not None
    return first


def test_a_rank_whose_program_has_ended_and_whose_process_runs_on_is_told_of_once(tmp_path: Path) -> None:
    """As with a thread that is no daemon: the launcher waits for it, and so does whoever looks at it."""
    attempt, lingering = Attempt(0, tmp_path), Lingering(0.0)
    attempt.pids = {0: 1, 1: 1}
    assert lingering.look(attempt) is None
    attempt.record_path(1).write_text('{"exit_code": 0}')
    said = [lingering.look(attempt) for _ in range(4)]
    assert [line for line in said if line] == [
        "rank 1 has come to the end of the program, and its process runs on for 0 s: a non-daemon thread, or a function "
        "given to atexit, has not ended"
    ]
    attempt.record_path(0).write_text('{"exit_code": 0}')
    attempt.ended = {0: (0, 1)}
    assert [lingering.look(attempt) for _ in range(3)] == [None, None, None]


def test_nobody_is_blamed_without_knowledge(tmp_path: Path) -> None:
    """Ranks that are equally far, ranks without a position, and a failure that is a rank's own."""
    equal = {rank: RankState(RankProgress(5, Phase.STEP)) for rank in range(3)}
    unknown = {rank: RankState(RankProgress(), where=f"train.py:{rank} in f") for rank in range(3)}
    for seen in (equal, unknown):
        first = _blamed(tmp_path, [_gave_up(0)], seen)
        assert first.rank == 0 and first.headline == "rank 0 gave up waiting for the others"
    own = Failure(2, 1, 9, "ValueError", "bad", traceback="ValueError: bad")
    stopped = {0: RankState(RankProgress()), 1: RankState(RankProgress(), stopped=True), 2: RankState(RankProgress())}
    assert _blamed(tmp_path, [_gave_up(0), own], stopped) == own


def test_a_rank_that_failed_is_not_blamed_for_being_behind(tmp_path: Path) -> None:
    seen = {0: RankState(RankProgress(5, Phase.STEP)), 1: RankState(RankProgress(6, Phase.STEP))}
    assert _blamed(tmp_path, [_gave_up(0)], seen).rank == 0


def test_a_culprit_is_in_the_record_with_the_paragraph(tmp_path: Path) -> None:
    seen = {0: RankState(RankProgress(5, Phase.STEP)), 1: RankState(RankProgress(5, Phase.STEP), stopped=True)}
    blamed = _blamed(tmp_path, [_gave_up(0)], seen)
    said = exit_record(tmp_path / "attempts" / "000" / "exit.json") or {}
    first = Failure.from_json(said["first_failure"])
    assert first.rank == blamed.rank == 1 and render(first, 2).startswith("echelon: rank 1 stopped, in update 6 (exit code 1)")
    assert said["explained"] in first.message and "Timed out waiting" in first.message


def test_the_limit_is_an_option_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(watch.STALL_VARIABLE, raising=False)
    assert (watch.stall_after(None), watch.stall_after(5.0)) == (60.0, 5.0)
    monkeypatch.setenv(watch.STALL_VARIABLE, "2m")
    assert watch.stall_after(None) == 120.0
    assert "ECHELON_STALL_AFTER" not in clean_environment()
