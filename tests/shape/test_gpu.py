"""The same promises on a GPU, on one rank; deselected where there is none. `make gpu` runs these, and docs/gpu.md says what else.

What a CPU can run as well is marked `on_cpu`: the reduced form of `make gpu` runs it here. The reference is plain PyTorch.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import NonFiniteError
from echelon.data.prefetch import Feed
from tests.kit.models import Batch, batch, largest_difference, net, plain_training, whole
from tests.kit.units import Regression

CUDA = torch.device(os.environ.get("ECHELON_GPU_TESTS_ON", "cuda"))
LAYOUTS = ["none", "ddp", "fsdp", "zero1", "zero2"]  # of which one rank has its own group of NCCL
WIDTH = 512 if CUDA.type == "cuda" else 16  # what is copied while training goes on
Saver = ech.DistributedCheckpointSaver

only_gpu = pytest.mark.gpu
on_both = pytest.mark.gpu(on_cpu=True)


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    gc.collect()  # what was wrapped holds the group
    if dist.is_initialized():
        dist.destroy_process_group()


def _here(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: p.cpu() for n, p in parameters.items()}


def _single(count: int, rows: int = 4) -> list[Batch]:
    return [batch(rows, i, torch.float32) for i in range(count)]


def _trained(data: Any, **options: Any) -> Regression:
    unit = Regression(device=CUDA, **options)
    ech.train(unit, data, max_epochs=1)
    return unit


# --- the same numbers


@on_both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_equal_plain_pytorch(layout: str) -> None:
    rows = [4, 3, 7]
    windows = [[batch(4, 0), batch(3, 1)], [batch(7, 2)]]
    for clip in (float("inf"), 0.4):
        unit = _trained(
            [batch(n, i) for i, n in enumerate(rows)], layout=layout, gradient_accumulation_steps=2, clip_grad_norm=clip
        )
        want, _, norms = plain_training(windows, clip=clip)
        assert unit.norms == pytest.approx(norms, rel=1e-9)
        assert next(unit.module.parameters()).device.type == CUDA.type
        assert largest_difference(_here(whole(unit.module)), want) < 1e-9


@on_both
def test_clipping_by_value_equals_plain_pytorch() -> None:
    unit = _trained([batch(4, 0), batch(4, 1)], clip_grad_value=0.01)
    want, _, _ = plain_training([[batch(4, 0)], [batch(4, 1)]], clip_value=0.01)
    assert largest_difference(_here(whole(unit.module)), want) < 1e-9


@on_both
@pytest.mark.parametrize("layout", ["none", "ddp", "fsdp"])
def test_bf16_is_close_to_autocast_by_hand(layout: str) -> None:
    unit = _trained(_single(4), module=net(dtype=torch.float32), layout=layout, precision="bf16")
    module = net(dtype=torch.float32).to(CUDA)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for x, y in _single(4):
        with torch.autocast(CUDA.type, dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(module(x.to(CUDA)), y.to(CUDA))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # A sharded module may compute all of it in bf16, where autocast leaves some in float32.
    limit = 1e-6 if layout != "fsdp" else 0.02
    assert largest_difference(_here(whole(unit.module)), _here(whole(module))) < limit
    assert {p.dtype for p in unit.module.parameters()} == {torch.float32}


@on_both
@pytest.mark.parametrize("layout", ["none", "ddp", "fsdp"])
def test_fp16_with_its_scaler_equals_the_scaler_by_hand_and_leaves_out_an_inf(layout: str) -> None:
    data = _single(6)
    data[2] = (data[2][0] * 1e6, data[2][1])  # beyond fp16
    precision = ech.layouts.Precision(torch.float16, init_scale=1024.0)
    unit = _trained(data, module=net(dtype=torch.float32), layout=layout, precision=precision)
    module = net(dtype=torch.float32).to(CUDA)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(CUDA.type, init_scale=1024.0)
    for x, y in data:
        with torch.autocast(CUDA.type, dtype=torch.float16):
            loss = nn.functional.mse_loss(module(x.to(CUDA)), y.to(CUDA))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert unit.grad_scaler is not None and unit.grad_scaler.get_scale() == scaler.get_scale() == 512.0
    limit = 1e-6 if layout != "fsdp" else 0.02
    assert largest_difference(_here(whole(unit.module)), _here(whole(module))) < limit


@on_both
def test_averaged_weights_equal_those_on_a_cpu() -> None:
    averages = []
    for device in (CUDA, torch.device("cpu")):
        unit = Regression(device=device, swa_params=ech.units.SWAParams(warmup_steps_or_epochs=1, step_or_epoch_update_freq=1))
        ech.train(unit, [batch(4, i) for i in range(4)], max_epochs=1)
        assert unit.swa_model is not None
        averages.append({n: t.cpu() for n, t in unit.swa_model.state_dict().items() if isinstance(t, torch.Tensor)})
    assert averages[0] and largest_difference(*averages) < 1e-9


@on_both
def test_an_evaluation_equals_plain_pytorch() -> None:
    unit, data = Regression(device=CUDA), [batch(4, 0), batch(3, 1)]
    ech.evaluate(unit, data)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    assert unit.eval_loss == pytest.approx(nn.functional.mse_loss(net()(x), y).item(), rel=1e-9)


@on_both
def test_activation_checkpointing_draws_the_same_dropout_masks() -> None:
    found = []
    for params in (None, ech.layouts.ActivationCheckpointParams()):
        module = net(dtype=torch.float32, dropout=0.5)
        torch.manual_seed(3)
        unit = _trained(_single(3), module=module, activation_checkpoint_params=params)
        found.append(_here(whole(unit.module)))
    assert largest_difference(*found) < 1e-7


@only_gpu
@pytest.mark.parametrize("layout", ["none", "fsdp"])
def test_a_compiled_module_trains_as_an_eager_one(layout: str) -> None:
    from torch._inductor import config

    found = []
    with config.patch(compile_threads=1):  # no processes that stay
        for compiled in (None, ech.layouts.TorchCompileParams()):
            unit = _trained(_single(4), module=net(dtype=torch.float32), layout=layout, torch_compile_params=compiled)
            found.append(_here(whole(unit.module)))
    assert largest_difference(*found) < 1e-5


@on_both
@pytest.mark.parametrize("layout", ["none", "fsdp"])
def test_a_module_from_the_meta_device_is_filled_as_an_ordinary_one(layout: str) -> None:
    torch.manual_seed(5)
    with ech.on_meta():
        module = net()
    torch.manual_seed(5)
    unit = Regression(module=module, device=CUDA, layout=layout)
    assert {p.device.type for p in unit.module.parameters()} == {CUDA.type}
    assert largest_difference(_here(whole(unit.module)), whole(net())) == 0


@on_both
def test_a_unit_with_its_own_ddp_trains_as_plain_pytorch() -> None:
    class ByHand(ech.TrainUnit[Batch]):
        def __init__(self) -> None:
            super().__init__()
            self.device = ech.init_from_env(CUDA.type)
            if not dist.is_initialized():
                dist.init_process_group("nccl" if CUDA.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
            self.module = nn.parallel.DistributedDataParallel(net().to(self.device))
            self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)

        def train_step(self, state: ech.State, data: Batch) -> None:
            x, y = (t.to(self.device) for t in data)
            nn.functional.mse_loss(self.module(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    unit = ByHand()
    ech.train(unit, [batch(4, 0), batch(4, 1)], max_epochs=1)
    want, _, _ = plain_training([[batch(4, 0)], [batch(4, 1)]])
    assert largest_difference(_here(whole(unit.module)), want) < 1e-9


@on_both
def test_the_chunked_loss_equals_the_whole_one() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (40, 100))
    target = torch.randint(0, 100, (40,), generator=generator)
    found = []
    for device, fn in ((CUDA, ech.nn.linear_cross_entropy), (torch.device("cpu"), None)):
        h, w = hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()
        if fn is not None:
            loss = fn(h, w, target.to(device), chunk_tokens=7)
        else:
            loss = nn.functional.cross_entropy(h @ w.T, target)
        loss.backward()
        assert h.grad is not None and w.grad is not None
        found.append({"loss": loss.detach().cpu(), "hidden": h.grad.cpu(), "weight": w.grad.cpu()})
    assert largest_difference(*found) < 1e-10


@on_both
def test_bits_are_the_same_under_every_strategy_in_bit_equal_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "1")
    threads, rows, found = torch.get_num_threads(), [tuple(t[0] for t in batch(1, i, torch.float32)) for i in range(32)], {}
    try:
        for layout in ("none", "ddp", "fsdp", "zero1"):
            torch.manual_seed(1)
            unit = Regression(
                device=CUDA,
                module=net(dtype=torch.float32, dropout=0.25),
                layout=layout,
                optimizer="AdamW",
                clip_grad_norm=0.4,
                deterministic="bitwise",
            )
            ech.train(unit, ech.Loader(rows, 16), max_epochs=1)
            found[layout] = _here(whole(unit.module))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert {name: largest_difference(bits, found["none"]) for name, bits in found.items()} == dict.fromkeys(found, 0.0)


@on_both
def test_losses_that_are_not_finite_end_the_run() -> None:
    data = [(x * float("nan"), y) for x, y in _single(8)]
    with pytest.raises(NonFiniteError):
        ech.train(Regression(device=CUDA, module=net(dtype=torch.float32), stop_after_nonfinite_losses=3), data, max_epochs=1)


# --- checkpoints


def _state(unit: Regression) -> dict[str, torch.Tensor]:
    found = dict(whole(unit.module))
    for i, state in enumerate(unit.optimizer.state.values()):
        found |= {f"{i}.{k}": t.full_tensor() if hasattr(t, "full_tensor") else t for k, t in state.items() if t is not None}
    return {n: torch.as_tensor(t).detach().cpu().clone() for n, t in found.items()}


class Copies(ech.Callback):
    """The state as it was at a step: what an asynchronous save of that step has to hold."""

    def __init__(self, step: int) -> None:
        self.step, self.state = step, {}

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == self.step:
            self.state = _state(unit)


@on_both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_asynchronous_save_holds_the_state_of_its_step_though_training_goes_on(layout: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layout": layout, "optimizer": "AdamW"}
    copies, saver = Copies(3), Saver(tmp_path, save_every_n_updates=3, async_checkpoint=True)
    unit = Regression(device=CUDA, module=net(width=WIDTH, dtype=torch.float32), **options)
    ech.train(unit, _single(5), max_epochs=1, callbacks=[copies, saver])
    other = Regression(device=CUDA, module=net(seed=1, width=WIDTH, dtype=torch.float32), **options)
    Saver.restore(tmp_path / "step-00000003", other)
    other.configure()
    assert largest_difference(_state(other), copies.state) == 0
    assert {p.device.type for p in other.module.parameters()} == {CUDA.type}


@on_both
@pytest.mark.parametrize("layout", ["none", "fsdp"])
def test_a_resumed_run_ends_bit_equal_with_dropout(layout: str, tmp_path: Path) -> None:
    """The device's own random numbers go on where they were."""
    rows = [tuple(t[0] for t in batch(1, i, torch.float32)) for i in range(24)]

    def trained(steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        unit = Regression(device=CUDA, module=net(dtype=torch.float32, dropout=0.5), layout=layout, optimizer="AdamW", lr=0.01)
        loader, saver = ech.Loader(rows, 4), Saver(tmp_path, save_every_n_updates=4)
        Saver.restore_from_latest(tmp_path, unit, train_dataloader=loader)
        ech.train(unit, loader, max_epochs=1, max_updates=steps, callbacks=[saver])
        saver.folder.release()
        return _state(unit)

    def without_a_break() -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        unit = Regression(device=CUDA, module=net(dtype=torch.float32, dropout=0.5), layout=layout, optimizer="AdamW", lr=0.01)
        ech.train(unit, ech.Loader(rows, 4), max_epochs=1)
        return _state(unit)

    trained(4)
    torch.manual_seed(999)  # what a new process would begin with
    assert largest_difference(trained(6), without_a_break()) == 0


# --- data


@only_gpu
def test_batches_read_ahead_arrive_whole_and_in_order() -> None:
    data = [torch.full((1 << 20,), float(i)).pin_memory() for i in range(8)]
    feed = Feed(data, move=lambda b, fast: b.to(CUDA, non_blocking=fast), stream=torch.cuda.Stream())
    for i, (on_device, *_) in enumerate(feed):
        assert on_device.is_cuda and float(on_device.min()) == float(on_device.max()) == i
    assert feed.used == 8


@only_gpu
def test_batches_read_ahead_are_not_overwritten_while_slow_steps_use_them() -> None:
    """The memory of a used batch goes back to the side stream: it may not be filled again before the step has read it."""
    data = [torch.full((1 << 22,), float(i)).pin_memory() for i in range(12)]
    feed = Feed(data, move=lambda b, fast: b.to(CUDA, non_blocking=fast), stream=torch.cuda.Stream())
    work, sums = torch.randn(4096, 4096, device=CUDA), []
    for step in feed:
        for _ in range(10):
            work = work @ work / 64.0
        sums.append(step.batch.mean())
    assert [float(s) for s in sums] == list(map(float, range(12)))


@only_gpu
def test_a_pinned_loader_gives_pinned_batches_which_train_the_same() -> None:
    class Sees(Regression):
        def move_data_to_device(self, state: ech.State, data: Any, non_blocking: bool) -> Any:
            pinned.append(all(t.is_pinned() for t in data))
            return super().move_data_to_device(state, data, non_blocking)

    rows = [tuple(t[0] for t in batch(1, i)) for i in range(8)]
    found = []
    for pin in (True, False):
        pinned: list[bool] = []
        unit = Sees(device=CUDA)
        ech.train(unit, ech.Loader(rows, 4, shuffle=False, pin_memory=pin), max_epochs=1)
        found.append(_here(whole(unit.module)))
        assert not pin or all(pinned)
    assert largest_difference(*found) == 0


@only_gpu
def test_workers_of_a_loader_start_although_this_process_uses_the_device() -> None:
    rows = [tuple(t[0] for t in batch(1, i)) for i in range(16)]
    found = []
    for workers in (0, 2):
        unit = Regression(device=CUDA)
        ech.train(unit, ech.Loader(rows, 4, num_workers=workers, pin_memory=True), max_epochs=2)
        found.append(_here(whole(unit.module)))
    assert largest_difference(*found) == 0


# --- waiting and memory


class Quiet(Regression):
    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: Any) -> None:
        if step == 3:  # the first steps allocate and estimate
            torch.cuda.set_sync_debug_mode("error")

    def on_train_end(self, state: ech.State) -> None:
        torch.cuda.set_sync_debug_mode("default")  # `train` gives back numbers, for which it waits once


@only_gpu
def test_training_and_watching_never_wait_for_the_device(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attempts" / "000").mkdir(parents=True)
    monkeypatch.setenv("ECHELON_RUN_DIR", str(tmp_path))
    options = {"clip_grad_norm": 1.0, "precision": "bf16", "gradient_accumulation_steps": 2}
    unit = Quiet(module=net(dtype=torch.float32), device=CUDA, **options)
    try:
        ech.train(unit, [batch(4, i, torch.float32) for i in range(11)], max_epochs=1)
    except RuntimeError as error:
        pytest.fail(f"a step waited for the device: {error}")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@only_gpu
def test_memory_does_not_grow_over_steps_and_saves(tmp_path: Path) -> None:
    class Watches(ech.Callback):
        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())

    allocated: list[int] = []
    saver = Saver(tmp_path, save_every_n_updates=5, async_checkpoint=True, keep_last_n_checkpoints=1)
    unit = Regression(device=CUDA, module=net(width=1024, dtype=torch.float32), optimizer="AdamW", layout="fsdp")
    ech.train(unit, _single(40), max_epochs=1, callbacks=[Watches(), saver])
    assert max(allocated[-10:]) <= max(allocated[10:20]) + 4096, allocated
