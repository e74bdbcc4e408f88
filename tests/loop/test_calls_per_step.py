"""What the loop itself does in a step of an AutoUnit, in calls of Python functions: a clock would say something else each time.

With the caches of a processor full of a model, a call costs about a microsecond. A capability that adds one to every step seems
to cost nothing; thirty of them had tripled what the loop costs. So one more is a decision: what is not there is asked once.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.contracts.run_dir import RunDir
from echelon.loop.records import record

STEPS, FIRST, LAST = 40, 10, 30
OURS = str(Path(ech.__file__).parent)


class Counting:
    """Batches; counts the calls of our functions from the one for step FIRST to that for step LAST."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(STEPS):
            if step in (FIRST, LAST):
                sys.setprofile(self._count if step == FIRST else None)
            yield torch.ones(2, 3)

    def __len__(self) -> int:
        return STEPS

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            self.calls[f"{Path(code.co_filename).relative_to(OURS)}: {code.co_name}"] += 1


class Unit(ech.AutoUnit[torch.Tensor]):
    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.module(data)
        return out.mean(), out

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.1), None


def calls_of_a_step() -> dict[str, float]:
    loader = Counting()
    try:
        ech.train(Unit(module=torch.nn.Linear(3, 1), options=ech.UnitOptions(device=torch.device("cpu"))), loader, max_epochs=1)
    finally:
        sys.setprofile(None)
    return {name: count / (LAST - FIRST) for name, count in loader.calls.items()}


def shown(calls: dict[str, float]) -> str:
    return "\n".join(f"{count:6.2f}  {name}" for name, count in sorted(calls.items(), key=lambda each: -each[1]))


def test_a_step_makes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHELON_RUN_DIR", raising=False)
    calls = calls_of_a_step()
    assert 20 < sum(calls.values()) <= 35, shown(calls)


def test_watching_adds_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pulse, the marks of the clock, the record of the update. Records are written by the clock, which stands here."""
    monkeypatch.setattr(record, "time", SimpleNamespace(perf_counter=lambda: 0.0, time=time.time))
    for name, value in RunDir.create(tmp_path, None).to_env().items():
        monkeypatch.setenv(name, value)
    calls = calls_of_a_step()
    assert calls["loop/records/record.py: update"] == 1 and calls["contracts/pulse.py: at"] == 2, shown(calls)
    usual = {name: count for name, count in calls.items() if not name.endswith((": note", ": <genexpr>"))}  # a few times a second
    assert 30 < sum(usual.values()) <= 46, shown(calls)
