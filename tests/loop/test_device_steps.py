"""What a training step asks of a device, without one: tensors on `meta` stand for those on a GPU."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import echelon as ech
from echelon.checkpoint.background import Background
from echelon.checkpoint.snapshot import Snapshot
from echelon.loop.records.record import Recorder
from echelon.parallel.gradients.clip import clip_by_norm_, scale_
from tests.kit.models import batch, net
from tests.kit.units import Regression

META = torch.device("meta")


class Copies(TorchFunctionMode):
    """The calls that bring values of the host to a device: each waits until the device has done all that it was given before."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if isinstance(made, torch.Tensor) and made.device.type != "cpu":
            given = [a for a in args if isinstance(a, torch.Tensor)]
            from_values = name in ("new_tensor", "tensor", "as_tensor")
            moved = name in ("to", "cuda", "copy_", "type_as") and any(g.device.type == "cpu" for g in given)
            if from_values or moved:
                self.found.append(name)
        return made


class Quiet(Regression):
    """Reads nothing: a value of `meta` cannot be read, so that a step which waits for its device fails here."""

    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: Any) -> None:
        return


class Counted(Quiet):
    """Weighs its batches on the device, as a language model counts tokens."""

    def weight(self, data: Any) -> torch.Tensor:
        return torch.ones((), device=data[0].device)


@pytest.mark.parametrize("kind", [Quiet, Counted])
def test_no_micro_batch_copies_anything_to_the_device(kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # What `train` returns is read once, at its end, which cannot be read here.
    monkeypatch.setattr("echelon.loop.records.monitored.numbers", lambda state, unit: {})
    options = {"gradient_accumulation_steps": 2, "clip_grad_norm": 1.0, "stop_after_nonfinite_losses": None}
    unit = kind(module=net(dtype=torch.float32), device=META, **options)
    rows = [tuple(t.to(META) for t in batch(4, i, torch.float32)) for i in range(5)]
    if kind is Counted:
        unit.window.reference = 2.0  # else agreed on before the first step, which reads the first weight
    with Copies() as copies:
        ech.train(unit, rows, max_epochs=1)
    assert copies.found == []


class Kinds(TorchFunctionMode):
    """What `_foreach_mul_` was given: the types of the tensors, and of the factor."""

    def __init__(self) -> None:
        self.found: list[tuple[set[torch.dtype], torch.dtype]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "_foreach_mul_":
            self.found.append(({a.dtype for a in args[0]}, args[1].dtype))
        return func(*args, **(kwargs or {}))


def _parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    for parameter in made:
        parameter.grad = torch.full_like(parameter, 3.0)
    return made


def test_a_factor_has_the_gradients_type() -> None:
    """Another one makes torch multiply tensor by tensor."""
    parameters = _parameters(torch.float32, torch.float64, torch.float32)
    with Kinds() as kinds:
        scale_(parameters, torch.tensor(1 / 3, dtype=torch.float64))
    assert kinds.found == [({torch.float32}, torch.float32), ({torch.float64}, torch.float64)]


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
