"""What a step and a save ask of a device, without one. What a step copies and waits for is test_steps_on_a_device.py's."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.checkpoint.background import Background
from echelon.checkpoint.snapshot import Snapshot
from echelon.loop.records.record import Recorder
from echelon.parallel.gradients.clip import clip_by_norm_, scale_

META = torch.device("meta")


def _parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    for parameter in made:
        parameter.grad = torch.full_like(parameter, 3.0)
    return made


def test_a_factor_is_not_rounded_to_half_precision() -> None:
    (parameter,) = _parameters(torch.bfloat16)
    parameter.grad = torch.full_like(parameter, 257.0 * 256)  # times a factor that bfloat16 would round to 1
    want = (parameter.grad.double() * (1 - 2**-9)).to(torch.bfloat16)
    scale_([parameter], torch.tensor(1 - 2**-9, dtype=torch.float64))
    assert torch.equal(parameter.grad, want)


def test_a_mixture_of_types_is_clipped_as_torch_does_it() -> None:
    ours, theirs = (_parameters(torch.float32, torch.float64) for _ in range(2))
    assert float(clip_by_norm_(ours, 1.0)) == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, 1.0, foreach=False)))
    for our, their in zip(ours, theirs, strict=True):
        assert our.grad is not None and their.grad is not None
        torch.testing.assert_close(our.grad, their.grad)


def test_records_take_a_loss_of_the_device_beside_a_norm_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `cpu_offload` and clipping give them."""
    stacked: list[set[str]] = []

    class Arrived:
        def query(self) -> bool:
            return True

        synchronize = query

    def to_host(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        stacked.append({values.device.type})
        return torch.full(values.shape, 2.0, dtype=values.dtype), Arrived()

    monkeypatch.setattr("echelon.loop.records.record.to_host", to_host)
    seen: list[dict[str, Any]] = []

    class Sink:
        def records(self, records: list[dict[str, Any]]) -> None:
            seen.extend(records)

    recorder = Recorder([Sink()], "samples")  # type: ignore[list-item]
    recorder.update(1, torch.empty((), device=META), torch.tensor(8.0), 0.1, torch.tensor(5.0))
    recorder.flush()
    assert (seen[0]["loss"], seen[0]["grad_norm"], stacked) == (2.0, 5.0, [{"meta"}])


def test_a_thread_that_saves_begins_on_its_ranks_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each rank would open a context on device 0."""
    order: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: order.append((device, threading.current_thread().name)))
    saving = Background(lambda _: None)
    taken = Snapshot(1, {}, {}, (None, {}), (None, {}))  # rank 1 commits nothing
    saving.start(tmp_path, 7, taken, lambda: order.append("waits for copies"), 2, {})
    assert saving.wait() is None
    assert order == [(3, "echelon-save-7"), "waits for copies"]


def test_every_thread_of_a_rank_takes_its_device() -> None:
    """But those that only read files, or say it to their pool."""
    inside = [Path(ech.__file__).parent / room for room in ("world", "parallel", "data", "checkpoint", "loop", "prover")]
    pools = set()
    for path in (file for room in inside for file in room.rglob("*.py")):
        text = path.read_text()
        assert len(re.findall(r"Thread\(", text)) == len(re.findall(r"Thread\(target=in_thread\(", text)), path
        if "ThreadPoolExecutor(" in text:
            pools.add(path.name)
    assert pools == {"checksum.py", "export.py", "manifest.py"}
