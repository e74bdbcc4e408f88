"""What a step and a save ask of a device, without one."""

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
from tests.kit.models import net
from tests.kit.units import Masked, Regression

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


# --- what a step copies to and from a device that is no CPU, and waits for: see tests/kit/fake_gpu.py


ROWS = 2


class Unwatched(Regression):
    """Leaves its norms where they are."""

    def on_train_step_end(self, *step: Any) -> None:
        pass


class ByTokens(Unwatched):
    """Weighs a micro-batch by a number that is known on the device only."""

    def weight(self, data: Any) -> torch.Tensor:
        return (data[1] == data[1]).sum()


class AtSteps(ech.Callback):
    """Forgets what the device noted before `first`, and keeps what it notes until `last` begins."""

    def __init__(self, gpu: Any, first: int, last: int) -> None:
        self.gpu, self.first, self.last, self.seen = gpu, first, last, None

    def on_train_get_next_batch_start(self, state: ech.State, unit: Any) -> None:
        done = unit.train_progress.num_steps_completed
        if done == self.first:
            self.gpu.forget()
        elif done == self.last:
            self.seen = (dict(self.gpu.to_device), dict(self.gpu.to_host), dict(self.gpu.waits))


def _train(gpu: Any, kind: type[Regression], more: list[Any], options: dict[str, Any]) -> Any:
    """What eight steps in the middle of a run copy and wait for, and the parameters at the end."""
    made = [(torch.randn(ROWS, 4), torch.randn(ROWS, 1)) for _ in range(16)]
    unit = kind(module=net(dtype=torch.float32).to(gpu.device), device=gpu.device, lr=0.01, **options)
    watch = AtSteps(gpu, 4, 12)
    ech.train(unit, made, max_epochs=1, callbacks=[*more, watch])
    return watch.seen, {name: p.detach().cpu() for name, p in unit.module.named_parameters()}, made


def a_step_copies_the_batch_and_nothing_else(folder: str) -> None:
    from tests.kit.fake_gpu import FakeGPU

    gpu = FakeGPU()
    ema = ech.units.SWAParams(warmup_steps_or_epochs=1, step_or_epoch_update_freq=1, averaging_method="ema", ema_decay=0.9)
    cases: dict[str, tuple[type[Regression], list[Any], dict[str, Any]]] = {
        "plain": (Unwatched, [], {}),
        "clipped by norm and value": (Unwatched, [], {"clip_grad_norm": 1.0, "clip_grad_value": 0.5}),
        "accumulated": (Unwatched, [], {"gradient_accumulation_steps": 2}),
        "accumulated, last window short": (Unwatched, [], {"gradient_accumulation_steps": 3}),
        "weighed on the device": (ByTokens, [], {"gradient_accumulation_steps": 2, "clip_grad_norm": 1.0}),
        "averaged": (Unwatched, [], {"swa_params": ema}),
        "AdamW": (Unwatched, [], {"optimizer": "AdamW"}),
        "scheduled": (Unwatched, [], {"schedule": lambda o: torch.optim.lr_scheduler.StepLR(o, 2)}),
        "a saver that waits": (Unwatched, [ech.DistributedCheckpointSaver(folder, save_every_n_updates=100)], {}),
    }
    for name, (kind, more, options) in cases.items():
        (to_device, to_host, waits), trained, made = _train(gpu, kind, more, options)
        assert to_device == {(ROWS, 4): 8, (ROWS, 1): 8}, f"{name}: copies to the device {to_device}"
        assert not to_host and not waits, f"{name}: copies to the host {to_host}, waits {waits}"
        unit = kind(module=net(dtype=torch.float32), lr=0.01, **options)
        ech.train(unit, made, max_epochs=1)
        for parameter, value in unit.module.named_parameters():
            torch.testing.assert_close(trained[parameter], value.detach(), msg=lambda m: f"{name}: {parameter}: {m}")  # noqa: B023


@pytest.mark.full
def test_a_step_copies_the_batch_and_nothing_else(ranks: Any, tmp_path: Any) -> None:
    ranks(1, a_step_copies_the_batch_and_nothing_else, str(tmp_path))


def a_copy_and_a_wait_are_noticed() -> None:
    from tests.kit.fake_gpu import FakeGPU

    gpu = FakeGPU()
    x = torch.ones(3, device=gpu.device)
    x + torch.tensor([1.0, 2.0, 3.0]).to(gpu.device)
    assert dict(gpu.to_device) == {(3,): 1} and not gpu.to_host and not gpu.waits
    assert float(x.sum()) == 3.0 and dict(gpu.waits) == {"_local_scalar_dense": 1}
    assert x.cpu().tolist() == [1.0, 1.0, 1.0] and dict(gpu.to_host) == {(3,): 1}
    layer = nn.Linear(3, 1).to(gpu.device)
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.cpu().tolist() == [[1.0, 1.0, 1.0]]


def test_a_copy_and_a_wait_are_noticed(ranks: Any) -> None:
    ranks(1, a_copy_and_a_wait_are_noticed)


class OverChosen(Masked):
    """The number of its chosen rows is known on the device only."""

    on_train_step_end = Unwatched.on_train_step_end


def a_micro_batch_that_weighs_nothing_on_the_device_poisons_nothing() -> None:
    from tests.kit.fake_gpu import FakeGPU

    gpu = FakeGPU()
    chosen = [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    made = [(torch.randn(ROWS, 4), torch.randn(ROWS, 1), torch.tensor(row)) for row in chosen]
    want = net(dtype=torch.float32)
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1, momentum=0.9)
    for x, y, row in (made[0], made[3]):
        optimizer.zero_grad()
        (((want(x) - y).square().mean(1) * row).sum() / row.sum()).backward()
        optimizer.step()
    unit = OverChosen(module=net(dtype=torch.float32).to(gpu.device), device=gpu.device, accumulate=2)
    ech.train(unit, made, max_epochs=1)
    _same(unit.module, want)

    model = net(dtype=torch.float32).to(gpu.device)
    loader: Any = ech.Loader(
        [tuple(each[0] for each in (x[None], y[None], row[None])) for x, y, row in made],
        2,
        accumulate=2,
        shuffle=False,
        collate_fn=lambda samples: samples[0],
    )
    model, optimizer, loader = ech.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader, device=gpu.device, layout="none"
    )
    for _ in ech.epochs(loader, 1):
        for x, y, row in loader:
            with ech.window(model, weight=row.sum()) as window:
                optimizer.zero_grad()
                window.backward(((model(x) - y).square().mean(1) * row).sum() / row.sum())
                optimizer.step()
    _same(model, want)

    # None on any rank, and no momentum yet: a gradient of zeros, and a loss that ends nothing.
    unit = OverChosen(module=net(dtype=torch.float32).to(gpu.device), device=gpu.device)
    ech.train(unit, [(x, y, torch.zeros(ROWS)) for x, y, _ in made], max_epochs=1)
    _same(unit.module, net(dtype=torch.float32))
    assert float(unit.latest_update[0]) == 0


def _same(ours: nn.Module, want: nn.Module) -> None:
    for (name, parameter), value in zip(ours.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), value.detach(), msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.full
def test_a_micro_batch_that_weighs_nothing_on_the_device_poisons_nothing(ranks: Any) -> None:
    ranks(1, a_micro_batch_that_weighs_nothing_on_the_device_poisons_nothing)
