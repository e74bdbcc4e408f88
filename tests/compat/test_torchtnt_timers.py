"""TorchTNT's timers: what they record, and what many durations come to on one rank and on all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import echelon as ech
from echelon.common.errors import UsageError
from echelon.compat.torchtnt.utils import timer as native
from echelon.compat.torchtnt.utils.timer import (
    AggregatedTimer,
    BoundedTimer,
    FullSyncPeriodicTimer,
    TimedActionStats,
    Timer,
    TimerProtocol,
    get_durations_histogram,
    get_recorded_durations_table,
    get_synced_durations_histogram,
    get_synced_timer_histogram,
    get_timer_summary,
    log_elapsed_time,
)
from tests.conftest import Ranks
from tests.kit.models import batch
from tests.kit.refusals import refused
from tests.kit.units import Regression


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock says; a test sets them."""
    now = [0.0]
    monkeypatch.setattr(native.time, "perf_counter", lambda: now[0])
    return now


def _spend(timer: Any, clock: list[float], name: str, *seconds: float) -> None:
    for each in seconds:
        with timer.time(name):
            clock[0] += each


def test_a_timer_records_seconds_by_name(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    timer = Timer(verbose=True)
    assert isinstance(timer, TimerProtocol) and not isinstance(object(), TimerProtocol)
    _spend(timer, clock, "a", 1.0, 3.0)
    _spend(timer, clock, "b", 4.0)
    assert timer.recorded_durations == {"a": [1.0, 3.0], "b": [4.0]} and "b took 4.0 seconds" in caplog.text
    with pytest.raises(StopIteration), timer.time("a"):
        next(iter(()))
    assert len(timer.recorded_durations["a"]) == 2, "a stage that ended in an exception is not completed"
    timer.reset()
    assert timer.recorded_durations == {} and timer.recorded_durations["new"] == []


def test_a_bounded_timer_keeps_the_latest(clock: list[float]) -> None:
    timer = BoundedTimer(2, 4)
    _spend(timer, clock, "a", 1.0, 2.0, 3.0)
    assert timer.recorded_durations["a"] == [1.0, 2.0, 3.0]
    _spend(timer, clock, "a", 4.0)
    assert timer.recorded_durations["a"] == [3.0, 4.0]
    for bounds in ((0, 2), (2, 2), (3, 2)):
        with refused(UsageError):
            BoundedTimer(*bounds)


def test_an_aggregated_timer_keeps_sums_alone(clock: list[float]) -> None:
    timer, whole = AggregatedTimer(), Timer()
    for each in (timer, whole):
        _spend(each, clock, "a", *[0.5] * 100)
        _spend(each, clock, "b", 50.0)
    assert not timer.recorded_durations and get_timer_summary(timer) == get_timer_summary(whole)
    timer.reset()
    assert get_timer_summary(timer) == "Timer Report\n"


def test_a_summary_has_a_row_for_each_name_the_longest_first(clock: list[float]) -> None:
    timer = Timer()
    assert get_timer_summary(timer) == "Timer Report\n"
    _spend(timer, clock, "short", 0.5, 0.5)
    _spend(timer, clock, "long", 3.0)
    report = native.report_of(timer)
    assert report.timed_action_stats == [
        TimedActionStats("long", 3.0, 1, 3.0, 75.0),
        TimedActionStats("short", 0.5, 2, 1.0, 25.0),
    ]
    assert (report.total_calls, report.total_duration) == (3, 4.0)
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in get_timer_summary(timer).splitlines() if "|" in line
    ]
    assert cells[0] == ["Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"]
    assert cells[1:] == [
        ["Total", "-", "3", "4.0", "100 %"],
        ["long", "3.0", "1", "3.0", "75.0"],
        ["short", "0.5", "2", "1.0", "25.0"],
    ]
    timer.reset()
    _spend(timer, clock, "at once", 0.0)
    assert "at once" in get_timer_summary(timer), "TorchTNT divides by zero here"


def test_percentiles_are_durations_that_were_measured() -> None:
    """numpy 2.4 no longer has the argument by which TorchTNT asks for this, so its histograms end in a TypeError."""
    durations = {"a": [4.0, 1.0, 3.0, 2.0], "never": []}
    assert get_durations_histogram(durations, [99, 0, 50, 100]) == {
        "a": {"p0": 1.0, "p50": 2.0, "p99": 3.0, "p100": 4.0, "avg": 2.5}
    }
    for outside in (-1, 101, float("nan")):
        with refused(UsageError):
            get_durations_histogram(durations, [50, outside])


def test_a_histogram_as_a_table() -> None:
    assert get_recorded_durations_table({}) == get_recorded_durations_table({"a": {}}) == ""
    table = get_recorded_durations_table({"a": {"p50": 1.0, "avg": 2.0}, "longer": {"avg": 0.12345}})
    assert table.splitlines() == [
        "",
        "| Name   |   p50 |   avg |",
        "|:-------|------:|------:|",
        "| a      |     1 | 2     |",
        "| longer |       | 0.123 |",
    ]


def test_log_elapsed_time_says_it_after_an_exception_too(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(KeyError), log_elapsed_time("a stage"):
        clock[0] += 2.0
        raise KeyError
    assert "a stage took 2.0 seconds" in caplog.text


@pytest.mark.parametrize("make", [Timer, AggregatedTimer, lambda **options: log_elapsed_time("x", **options).__enter__()])
def test_waiting_for_a_gpu_needs_one(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.torch.cuda, "is_available", lambda: False)
    with refused(UsageError):
        make(cuda_sync=True)
    make(cuda_sync=False)


@pytest.mark.parametrize("make", [Timer, AggregatedTimer, lambda: BoundedTimer(5, 10)])
def test_the_loops_take_them(make: Callable[[], Any]) -> None:
    timer = make()
    ech.train(Regression(), [batch(4, i) for i in range(4)], max_epochs=1, timer=timer)
    stats = {each.action_name: each.num_calls for each in native.report_of(timer).timed_action_stats}
    assert stats["Regression.train_step"] == 4


def _everyones() -> dict[str, Any]:
    rank = dist.get_rank()
    own = {"a": [1.0 + rank, 3.0 + rank], f"only {rank}": [5.0]}
    timer = Timer()
    timer.recorded_durations.update(own)
    done: dict[str, Any] = {"synced": get_synced_durations_histogram(own, [0, 100])}
    done["timer"] = get_synced_timer_histogram(timer, [0, 100], dist.group.WORLD)
    try:
        get_synced_durations_histogram(own, [101])
    except UsageError as error:
        done["error"] = str(error)
    alone = [dist.new_group([each], backend="gloo") for each in range(dist.get_world_size())]
    done["own group"] = get_synced_durations_histogram({"a": [float(rank)]}, [50], alone[rank])

    # Rank 1's clock runs fast, and nobody heeds it.
    now = [0.0]
    native.time.perf_counter = lambda: now[0] * (1000.0 if rank else 1.0)  # type: ignore[assignment]
    group = dist.new_group(backend="gloo")
    assert group is not None
    periodic = FullSyncPeriodicTimer(timedelta(seconds=10), group)
    done["checks"] = []
    for second in range(30):
        now[0] = float(second)
        done["checks"].append(periodic.check())
    periodic.wait_remaining_work()
    periodic.wait_remaining_work()
    now[0] = 100.0
    done["after"] = [periodic.check(), periodic.check()]
    periodic.wait_remaining_work()
    return done


def test_over_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, _everyones)
    wanted = {
        "a": {"p0": 1.0, "p100": 4.0, "avg": 2.5},
        "only 0": {"p0": 5.0, "p100": 5.0, "avg": 5.0},
        "only 1": {"p0": 5.0, "p100": 5.0, "avg": 5.0},
    }
    for rank, each in enumerate((first, second)):
        assert each["synced"] == each["timer"] == wanted and "Percentile must be between 0 and 100. Got 101" in each["error"]
        assert each["own group"] == {"a": {"p50": float(rank), "avg": float(rank)}}
        assert [second for second, passed in enumerate(each["checks"]) if passed] == [11, 22], "one call later than it passed"
        assert each["after"] == [False, True]


def test_the_summary_has_torchtnts_form() -> None:
    timer = Timer()
    timer.recorded_durations |= {"train.next(data_iter)": [1.0, 2.0, 3.0], "b": [0.5]}
    rule = "-" * 129
    assert get_timer_summary(timer).split("\n") == [
        "Timer Report",
        "",
        rule,
        "|  Action               \t|  Mean duration (s)\t|  Num calls      \t|  Total time (s) \t|  Percentage %   \t|",
        rule,
        "|  Total                \t|  -              \t|  4              \t|  6.5            \t|  100 %          \t|",
        rule,
        "|  train.next(data_iter)\t|  2.0            \t|  3              \t|  6.0            \t|  92.308         \t|",
        "|  b                    \t|  0.5            \t|  1              \t|  0.5            \t|  7.6923         \t|",
        rule,
        "",
    ]


def test_a_table_of_percentiles_has_torchtnts_form() -> None:
    table = get_recorded_durations_table({"a": {"p50": 1.0, "avg": 2.0}, "bbbb": {"p50": 10.0, "avg": 20.5}})
    assert table.split("\n") == [
        "",
        "| Name   |   p50 |   avg |",
        "|:-------|------:|------:|",
        "| a      |     1 |   2   |",
        "| bbbb   |    10 |  20.5 |",
    ]
