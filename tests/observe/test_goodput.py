"""Goodput over restarts: every second of a run is productive or lost to one cause, told from its folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.contracts.events import EventLog
from echelon.contracts.run_dir import RunDir, write_json
from echelon.contracts.times import TimeRecord
from echelon.observe.goodput import LOST, goodput


def _attempt(folder: Path, number: int, exit_json: dict[str, Any] | None, *records: TimeRecord, rank: int = 0) -> RunDir:
    run = RunDir(folder).at_attempt(number)
    if exit_json is not None:
        write_json(run.exit_json, exit_json)
    log = EventLog(run.times(rank))
    log.write([record.to_json() for record in records])
    log.close()
    return run


def test_each_second_of_two_attempts_has_one_cause(tmp_path: Path) -> None:
    """The launcher starts at 100, the rank at 101; 40 steps, saved after 20; the last 10 s of the first attempt are a hang."""
    first = TimeRecord((0, 20), 20.0, data_s=2.0, forward_s=10.0, wait_s=6.0, checkpoint_s=2.0, startup_s=4.0, time=125.0)
    lost = TimeRecord((20, 40), 10.0, data_s=1.0, forward_s=9.0, time=135.0)
    _attempt(tmp_path, 0, {"exit_code": 1, "ended": 145.0, "hang": {"after_s": 10.0}}, first, lost)
    again = TimeRecord((20, 50), 15.0, forward_s=10.0, eval_s=5.0, startup_s=2.0, time=165.0)
    _attempt(tmp_path, 1, {"exit_code": 0, "ended": 166.0}, again)
    write_json(RunDir(tmp_path).run_json, {"started": 100.0})
    found = goodput(RunDir(tmp_path))
    assert found is not None
    assert (found.wall_s, found.productive_s, found.wait_s) == (66.0, 26.0, 6.0)
    assert dict(found.lost) == {
        "redone": 10.0,
        "hang": 10.0,
        "startup": 1.0 + 4.0 + 2.0,
        "evaluation": 5.0,
        "down": 3.0,
        "data": 2.0,
        "checkpoint": 2.0,
        "ending": 1.0,
    }
    assert str(found).startswith("39% productive; lost: redone 15%, hang 15%, startup 11%")


def test_the_rank_that_waited_least_tells_what_all_waited_for(tmp_path: Path) -> None:
    _attempt(tmp_path, 0, {"ended": 11.0}, TimeRecord((0, 9), 10.0, forward_s=4.0, wait_s=6.0, time=11.0))
    run = _attempt(tmp_path, 0, None, TimeRecord((0, 9), 10.0, data_s=6.0, forward_s=4.0, time=11.0), rank=1)
    found = goodput(run)
    assert found is not None and found.lost["data"] == 6.0 and found.wait_s == 0.0


def test_a_record_across_the_checkpoint_is_divided(tmp_path: Path) -> None:
    _attempt(tmp_path, 0, {"ended": 11.0}, TimeRecord((0, 10), 10.0, forward_s=10.0, time=11.0))
    _attempt(tmp_path, 1, {"ended": 13.0}, TimeRecord((6, 10), 2.0, forward_s=2.0, time=13.0))
    found = goodput(RunDir(tmp_path))
    assert found is not None and (found.productive_s, found.lost["redone"]) == (8.0, 4.0)


def test_a_run_without_a_loop_and_no_run_at_all(tmp_path: Path) -> None:
    assert goodput(RunDir(tmp_path / "none")) is None
    _attempt(tmp_path, 0, {"ended": 9.0})
    assert goodput(RunDir(tmp_path)) is None  # nobody knows when it began
    write_json(RunDir(tmp_path).run_json, {"started": 4.0})
    found = goodput(RunDir(tmp_path))
    assert found is not None and (found.share, dict(found.lost)) == (0.0, {"startup": 5.0})


_S = st.floats(0, 1e6)
_RECORD = st.builds(
    TimeRecord,
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (min(pair), max(pair))),
    _S,
    data_s=_S,
    eval_s=_S,
    time=_S,
    startup_s=_S,
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.none() | st.fixed_dictionaries({"ended": _S | st.text()}), st.lists(_RECORD, max_size=3)), max_size=3)
)
def test_whatever_is_in_a_folder_it_adds_up(tmp_path_factory: pytest.TempPathFactory, attempts: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("run")
    for number, (exit_json, records) in enumerate(attempts):
        _attempt(folder, number, exit_json, *records)
    found = goodput(RunDir(folder))
    if found is not None:
        assert found.wall_s == pytest.approx(found.productive_s + sum(found.lost.values()))
        assert set(found.lost) <= set(LOST) and min([found.wall_s, *found.lost.values()]) >= 0
