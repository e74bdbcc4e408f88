"""Callbacks that change the process around a run: everything is as before when it ends, however it ends."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import echelon as ech
from echelon.common.errors import CallbackError
from echelon.loop.callbacks import GarbageCollector, PyTorchProfiler
from tests.kit.refusals import refused
from tests.kit.units import Hooks, Numbers

ENDS = [None, ValueError, KeyboardInterrupt]


def run(entry: str, end: type[BaseException] | None, callback: ech.Callback, during: Any = None) -> None:
    """Three steps of training, or two of each other phase; the last raises."""
    hook = {"evaluate": "on_eval_step_end", "predict": "on_predict_step_end", "test": "on_test_step_end"}
    count = 0

    def step_ended(state: ech.State, unit: Any) -> None:
        nonlocal count
        count += 1
        if during is not None:
            during()
        if count == 2 and end is not None:
            raise end

    after = Hooks(**{hook.get(entry, "on_train_step_end"): step_ended})
    unit = Numbers()
    try:
        if entry == "fit":
            ech.fit(unit, [1, 2, 3], [1, 2], max_epochs=1, evaluate_every_n_updates=1, callbacks=[callback, after])
        elif entry == "train":
            ech.train(unit, [1, 2, 3], max_epochs=1, callbacks=[callback, after])
        else:
            getattr(ech.units if entry == "test" else ech, entry)(unit, [1, 2], callbacks=[callback, after])
    except (ValueError, KeyboardInterrupt):
        assert end is not None
    else:
        assert end is None


@pytest.mark.full
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("entry", ["train", "fit", "evaluate", "predict", "test"])
def test_garbage_collection_is_on_again(entry: str, end: type[BaseException] | None) -> None:
    """In TorchTNT it stays off after an exception."""
    seen: list[bool] = []
    try:
        run(entry, end, GarbageCollector(1), lambda: seen.append(gc.isenabled()))
        assert set(seen) == {False} and gc.isenabled()
        gc.disable()  # a user who wants it off
        run(entry, end, GarbageCollector(1))
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("entry", ["train", "fit", "evaluate", "predict", "test"])
def test_a_profiler_is_started_and_stopped_once(entry: str, end: type[BaseException] | None) -> None:
    profiler = MagicMock(spec=["start", "step", "stop"])
    run(entry, end, PyTorchProfiler(profiler))
    steps = {"train": 3, "fit": 9}.get(entry, 2) if end is None else {"fit": 4}.get(entry, 2)
    assert [call[0] for call in profiler.method_calls] == ["start", *["step"] * steps, "stop"]


def test_torchs_profiler_sees_the_steps() -> None:
    traces: list[Any] = []
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=cpu, schedule=schedule, on_trace_ready=lambda p: traces.append(p.key_averages()))
    multiplies = Hooks(on_train_step_start=lambda state, unit: torch.ones(4, 4) @ torch.ones(4, 4))
    ech.train(Numbers(), [1, 2, 3], max_epochs=1, callbacks=[PyTorchProfiler(profiler), multiplies])
    assert len(traces) == 1 and any(event.key == "aten::mm" and event.count == 1 for event in traces[0])


def test_an_interval_of_no_steps_is_refused() -> None:
    with refused(CallbackError):
        GarbageCollector(0)
