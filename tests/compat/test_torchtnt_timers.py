"""TorchTNT's timer: what it records, and its table."""

from __future__ import annotations

import logging

import pytest

from echelon.common.errors import UsageError
from echelon.compat.torchtnt.utils import timer as native
from echelon.compat.torchtnt.utils.timer import Timer, get_timer_summary
from tests.kit.refusals import refused


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock says; a test sets them."""
    now = [0.0]
    monkeypatch.setattr(native.time, "perf_counter", lambda: now[0])
    return now


def test_a_timer_records_seconds_by_name(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    timer = Timer(verbose=True)
    for name, seconds in (("a", 1.0), ("a", 3.0), ("b", 4.0)):
        with timer.time(name):
            clock[0] += seconds
    assert timer.recorded_durations == {"a": [1.0, 3.0], "b": [4.0]} and "b took 4.0 seconds" in caplog.text
    with pytest.raises(StopIteration), timer.time("a"):
        next(iter(()))
    assert len(timer.recorded_durations["a"]) == 2, "a stage that ended in an exception is not completed"
    timer.reset()
    assert timer.recorded_durations == {} and timer.recorded_durations["new"] == []
    assert get_timer_summary(timer) == "Timer Report\n"
    with timer.time("at once"):
        pass
    assert "at once" in get_timer_summary(timer), "TorchTNT divides by zero here"


def test_waiting_for_a_gpu_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.torch.cuda, "is_available", lambda: False)
    with refused(UsageError):
        Timer(cuda_sync=True)
    Timer(cuda_sync=False)
