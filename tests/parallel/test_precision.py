"""Compute precision and the loss scale: one verdict over all ranks, whatever is sharded; schedules that follow updates.

Autocast leaves float64 alone, and scales are powers of two: so fp16's whole machinery can be held against plain PyTorch.
"""

from __future__ import annotations

import logging
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import echelon as ech
from echelon.common.errors import LoopError
from echelon.compat.torchtnt.utils.prepare_module import FSDP2Strategy
from echelon.parallel.parallelize import prepare_module
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, plain_training, seeded, whole
from tests.kit.own_loops import step
from tests.kit.refusals import answer, refused
from tests.kit.run_folders import recorded
from tests.kit.units import KINDS, Hooks, Regression

pytestmark = pytest.mark.standing_ranks


def _fp16(**options: Any) -> ech.layouts.Precision:
    return ech.layouts.Precision(torch.float16, **{"init_scale": 1024.0, **options})


class Spiked(Net):
    """With two numbers that the outputs do not depend on; the second's gradient can be made to overflow by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.spike = nn.Parameter(torch.zeros(2))


class Whole(nn.Module):
    """Takes the loss inside the forward, as a sharded parameter is whole only there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = seeded(Spiked)

    @property
    def tp_plan(self) -> dict[str, str]:
        return {f"inner.{n}": style for n, style in Net.tp_plan.items()}

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x), (factor * self.inner.spike).sum()


class Overflows(Regression):
    """At update 1, one element of one gradient is inf, on the last data-parallel rank. In a shard, one rank has it."""

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        place = self.prepared
        bad = self.train_progress.num_steps_completed == 1 and place.data.rank == place.data.size - 1
        out, spike = self.module(data[0], torch.tensor([0.0, math.inf if bad else 0.0], dtype=torch.float64))
        return nn.functional.mse_loss(out, data[1]) + spike, out


def _mine(unit: ech.AutoUnit[Any], count: int) -> list[Any]:
    """This rank's share of global batches of 8 rows."""
    rank, size = unit.prepared.data.rank, unit.prepared.data.size
    return [tuple(t.chunk(size)[rank] for t in batch(8, i)) for i in range(count)]


def _weights(unit: ech.AutoUnit[Any]) -> dict[str, torch.Tensor]:
    return {n.removeprefix("inner."): p for n, p in whole(unit.module).items()}


def _overflow(layout: Any) -> dict[str, Any]:
    unit = Overflows(
        module=Whole(),
        layout=layout,
        precision=_fp16(growth_interval=2),
        clip_grad_norm=0.3,
        step_lr_interval="step",
        schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=1.0),
    )
    ech.train(unit, _mine(unit, 4), max_epochs=1)
    assert unit.grad_scaler is not None
    scheduled = unit.lr_scheduler.last_epoch
    return {"weights": _weights(unit), "norms": unit.norms, "scale": unit.grad_scaler.get_scale(), "scheduled": scheduled}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, None),
        *(pytest.param(2, layout, marks=pytest.mark.full) for layout in (*KINDS, "zero2")),
        *(pytest.param(4, layout, marks=pytest.mark.full) for layout in ("tp=2", "hsdp")),
    ],
)
def test_an_inf_in_one_shard_skips_the_update_on_all_ranks(ranks: Ranks, size: int, layout: Any) -> None:
    applied = [[batch(8, i)] for i in (0, 2, 3)]  # update 1 is skipped
    want, _, norms = plain_training(applied, clip=0.3, module=seeded(Spiked))
    for got in ranks(size, _overflow, layout):
        assert not math.isfinite(got["norms"].pop(1))
        assert got["norms"] == pytest.approx(norms, rel=1e-12)
        assert largest_difference(got["weights"], want) < 1e-9  # torch divides by norm + 1e-6
        assert got["scale"] == 1024.0  # halved, then doubled after two updates
        assert got["scheduled"] == 3  # the schedule holds still with the parameters


def _scale_after_overflow(layout: str, folder: str) -> float:
    unit = Overflows(module=Whole(), layout=layout, precision=_fp16())
    ech.train(unit, _mine(unit, 2), max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder)])
    assert unit.grad_scaler is not None
    return unit.grad_scaler.get_scale()


@pytest.mark.full
def test_the_scale_is_saved_and_restored_by_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _scale_after_overflow, "fsdp", str(tmp_path)) == [512.0, 512.0]
    unit = Overflows(module=Whole(), precision=_fp16())
    assert ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, unit)
    assert unit.grad_scaler is not None and unit.grad_scaler.get_scale() == 512.0


def _own_scaler(layout: str) -> None:
    unit = Regression(layout=layout, precision="fp16")
    unit.grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    ech.train(unit, _mine(unit, 1), max_epochs=1)


def test_a_scaler_of_ones_own_is_taken_unless_ranks_would_part_ways(ranks: Ranks) -> None:
    _own_scaler("none")
    assert ranks(2, _own_scaler, "ddp") == [None, None]
    assert all("ech.layouts.Precision(torch.float16" in text for text in ranks(2, answer, _own_scaler, "fsdp"))


def test_a_parameter_outside_the_module_is_unscaled_too() -> None:
    class Temperature(Regression):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

        def compute_loss(self, state: ech.State, data: Any) -> Any:
            out = self.module(data[0]) * self.temperature
            return nn.functional.mse_loss(out, data[1]), out

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
            return torch.optim.SGD([*module.parameters(), self.temperature], lr=0.1), None

    values = []
    for precision in ("fp32", _fp16()):
        unit = Temperature(precision=precision)
        ech.train(unit, [batch(4, i) for i in range(3)], max_epochs=1)
        values.append(float(unit.temperature.detach()))
    assert values[0] == pytest.approx(values[1], rel=1e-12) and values[0] != 1.0


def test_a_scaler_grows_and_shrinks_as_its_options_say() -> None:
    options = {"init_scale": 16.0, "growth_factor": 4.0, "growth_interval": 3, "backoff_factor": 0.25}
    unit = Overflows(module=Whole(), precision=ech.layouts.Precision(torch.float16, **options))
    scales = list[float]()
    note = Hooks(on_train_step_end=lambda state, unit: scales.append(unit.grad_scaler.get_scale()))
    ech.train(unit, _mine(unit, 5), max_epochs=1, callbacks=[note])
    assert scales == [16.0, 4.0, 4.0, 4.0, 16.0]


# --- a scheduler that wants a metric


def _plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)


class Worse(Regression):
    """Each evaluation is worse than the one before."""

    evaluations = 0

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        loss, out = super().compute_loss(state, data)
        if state.active_phase is not ech.units.ActivePhase.EVALUATE:
            return loss, out
        self.evaluations += 1
        return loss * 0 + self.evaluations, out


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_reduce_on_plateau_follows_the_evaluations_of_fit(interval: Any) -> None:
    unit = Worse(schedule=_plateau, step_lr_interval=interval)
    ech.fit(unit, [batch(2, 0)] * 3, [batch(2, 1)], max_epochs=3, evaluate_every_n_epochs=1)
    assert unit.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**2)  # the first evaluation sets the mark


def test_reduce_on_plateau_without_evaluations_is_refused_before_training() -> None:
    unit = Regression(schedule=_plateau)
    with refused(LoopError):
        ech.train(unit, [batch(2, 0)], max_epochs=1)
    assert unit.train_progress.num_steps_completed == 0


def test_an_eval_step_of_ones_own_records_no_loss_that_it_did_not_count(tmp_path: Path) -> None:
    class Own(Regression):
        def eval_step(self, state: ech.State, data: Any) -> Any:
            state.log("val", self.compute_loss(state, data)[0])

    with recorded(tmp_path):
        ech.fit(Own(), [batch(2, 0)], [batch(2, 1)], max_epochs=1, evaluate_every_n_epochs=1)
    written = (tmp_path / "metrics.jsonl").read_text()
    assert "eval_val" in written and "eval_loss" not in written
    with refused(LoopError):
        ech.fit(Own(schedule=_plateau), [batch(2, 0)], [batch(2, 1)], max_epochs=1, evaluate_every_n_epochs=1)


def test_a_unit_may_step_a_plateau_scheduler_itself() -> None:
    class Own(Worse):
        def step_lr_scheduler(self) -> None:
            self.lr_scheduler.step(float(self.train_progress.num_epochs_completed))

    unit = Own(schedule=_plateau)
    ech.train(unit, [batch(2, 0)], max_epochs=3)
    assert unit.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**2)
    ech.fit(unit, [batch(2, 0)], [batch(2, 1)], max_epochs=4, evaluate_every_n_epochs=1)
    assert unit.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**3)  # not once more by the evaluation


# --- under sharded layouts: what is gathered, cast and kept; odd layers; who decides

CPU = torch.device("cpu")
BF16 = torch.bfloat16


class _Casts(TorchDispatchMode):
    """Bytes of the results of casts to bfloat16 that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype is BF16:
            self._made.append((weakref.ref(result.untyped_storage()), result.untyped_storage().nbytes()))
        return result

    def alive(self) -> int:
        return sum(size for made, size in self._made if made() is not None)


class _Looks(Regression):
    """Notes types while it trains, and what casts have left when the forward pass is over."""

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        with _Casts() as casts:
            out = self.module(data[0])
            self.alive = casts.alive()
        loss = nn.functional.mse_loss(out, data[1])
        self.types = {"loss": loss.dtype, "output": out.dtype}
        return loss, out

    def optimizer_types(self) -> set[torch.dtype]:
        return {v.dtype for state in self.optimizer.state.values() for k, v in state.items() if k != "step"}


def _data() -> list[Any]:
    torch.manual_seed(3)
    return [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(3)]


def _looked(layout: Any, precision: Any = "bf16") -> dict[str, Any]:
    torch.manual_seed(0)
    module = Net(width=64)
    seen: dict[str, Any] = {}
    for block in module.blocks:
        block[0].register_forward_pre_hook(lambda layer, args: seen.update(weight=layer.weight.dtype, input=args[0].dtype))
    unit = _Looks(module=module, layout=layout, precision=precision, optimizer="AdamW", lr=0.003, clip_grad_norm=1.0)
    taken: set[torch.dtype] = set()
    unit.configure()
    unit.optimizer.register_step_pre_hook(
        lambda optimizer, *_: taken.update(p.grad.dtype for g in optimizer.param_groups for p in g["params"])
    )
    ech.train(unit, _data(), max_epochs=1)
    return {
        **seen,
        **unit.types,
        "alive": unit.alive,
        "gradients": taken,
        "state": unit.optimizer_types(),
        "parameters": {p.dtype for p in unit.module.parameters()},
        "values": whole(unit.module),
        "norms": unit.norms,
    }


HALF: dict[str, Any] = {"bf16": "bf16", "fp16": ech.layouts.Precision(torch.float16, init_scale=128.0)}


def _look_all(layouts: dict[str, Any], precisions: list[str]) -> dict[str, Any]:
    return {f"{name}, {half}": _looked(layouts[name], HALF[half]) for name in layouts for half in precisions}


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "layouts", "precisions"),
    [
        (2, {"fsdp": "fsdp"}, ["bf16", "fp16"]),
        (4, {"zero2": "zero2", "hsdp": "hsdp", "tp x fsdp": ech.Layout(tp=2)}, ["bf16"]),
    ],
)
def test_sharded_parameters_are_gathered_in_half_and_stay_float32_otherwise(
    ranks: Ranks, size: int, layouts: dict[str, Any], precisions: list[str]
) -> None:
    found, alone = ranks(size, _look_all, layouts, precisions)[0], _looked("none")
    assert alone["alive"] > 30_000  # autocast's copies of the weights: what is not to be kept under a sharded layout
    for name, seen in found.items():
        half = torch.float16 if "fp16" in name else BF16
        assert (seen["weight"], seen["output"], seen["loss"]) == (half, half, torch.float32), name
        assert seen["gradients"] == seen["state"] == seen["parameters"] == {torch.float32}, name
        assert seen["alive"] < 3_000, f"{name}: {seen['alive']} bytes of casts live on to the backward pass"
        assert seen["norms"] == pytest.approx(alone["norms"], rel=3e-2), name
        for parameter, value in seen["values"].items():
            assert torch.allclose(value, alone["values"][parameter], atol=2e-2, rtol=2e-2), (name, parameter)


class _Odd(nn.Module):
    """Layers that cannot take weights of another type than their input, or whose weights must not be cast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)  # on raw features
        self.table = nn.Embedding(5, 6)
        self.mix = nn.Bilinear(6, 6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.PReLU(6)) for _ in range(2)
        )
        self.words = nn.Embedding(50, 6)  # large beside a block, and its weight is read elsewhere
        self.tied = nn.Linear(6, 5, bias=False)
        self.tied.weight = self.table.weight
        self.exact = nn.ParameterDict({"scale": nn.Parameter(torch.tensor([1.0 + 2.0**-20], dtype=torch.float64))})
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.codes = nn.Parameter(torch.arange(6), requires_grad=False)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        assert time.dtype is torch.float32
        h = self.mix(self.norm(x), self.table(ids).float())
        for block in self.blocks:
            h = h + block(h)
        h = self.frozen(self.spectral(h)) * self.temperature + self.codes * 1e-3 + time.sin()
        h = h + self.words(ids) + self.words.weight.mean(0) + self.norm.weight
        return self.tied(h)


def _odd(layout: Any, data: list[Any], exact: bool = False) -> dict[str, Any]:
    torch.manual_seed(1)
    module = _Odd()
    if not exact:  # fully_shard takes one type to a unit
        del module.exact
    unit = Regression(
        module=module,
        layout=layout,
        precision="bf16",
        loss=lambda m, data: nn.functional.cross_entropy(m(*data[:3]), data[3]),
        optimizer=lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05),
    )
    ech.train(unit, data, max_epochs=1)
    ech.evaluate(unit, data)
    return {"loss": unit.eval_loss, "values": whole(unit.module)}


def _odd_data() -> list[Any]:
    torch.manual_seed(5)
    return [
        (torch.randn(8, 6), torch.randint(5, (8,)), 1e4 + torch.arange(8.0)[:, None], torch.randint(5, (8,))) for _ in range(3)
    ]


@pytest.mark.full
def test_layers_that_cannot_be_cast_train_as_on_one_process(ranks: Ranks) -> None:
    want, found = _odd("none", _odd_data()), ranks(2, _odd, "fsdp", _odd_data())
    for got in found:
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-2)
        for name, value in want["values"].items():
            assert torch.allclose(got["values"][name].double(), value.double(), atol=3e-2), name


def _unfrozen_later(layout: Any) -> dict[str, Any]:
    module = net(dtype=torch.float32)
    module.blocks[0].requires_grad_(False)
    module.last.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    data = [tuple(t.float() for t in batch) for batch in _data()]
    model, optimizer, loader = ech.prepare(module, optimizer, data, layout=layout, precision="bf16")
    for _ in ech.epochs(loader, 2):
        for x, y in loader:
            step(model, optimizer, x, y)
        model.requires_grad_(True)
    return whole(model)


def test_a_block_that_was_frozen_trains_once_it_is_unfrozen(ranks: Ranks) -> None:
    """torch's fully_shard kept its gradients in bfloat16, and raised."""
    want, before = _unfrozen_later("none"), whole(net(dtype=torch.float32))
    for got in ranks(2, _unfrozen_later, "fsdp"):
        for name, value in want.items():
            assert not torch.equal(got[name], before[name]), name
            assert torch.allclose(got[name], value, atol=1e-2), name


def _policies() -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    def weight_type(layout: Any, precision: str | None = "bf16", module: nn.Module | None = None) -> Any:
        module, seen = module or net(dtype=torch.float32), []
        module.last.register_forward_pre_hook(lambda layer, args: seen.append(layer.weight.dtype))
        unit = Regression(module=module, layout=layout, precision=precision)
        ech.train(unit, [tuple(t.to(next(module.parameters()).dtype) for t in _data()[0])], max_epochs=1)
        return seen[0]

    full = MixedPrecisionPolicy(param_dtype=torch.float32)
    buffered = net(dtype=torch.float32)
    buffered.register_buffer("scale", torch.ones(1))
    older = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=torch.float16)
    return {
        "the user's type wins": weight_type(ech.FSDPStrategy(mixed_precision=full)),
        "the user's reduction alone": weight_type(ech.FSDPStrategy(mixed_precision=MixedPrecisionPolicy(reduce_dtype=BF16))),
        "of the older FSDP": weight_type(ech.FSDPStrategy(mixed_precision=MixedPrecision(param_dtype=torch.float32))),
        "no precision": weight_type("fsdp", None),
        "fsdp2's own": weight_type(FSDP2Strategy(mp_policy="bf16"), None),
        "float64": weight_type("fsdp", "bf16", net(dtype=torch.float64)),
        "with buffers": (weight_type(ech.FSDPStrategy(mixed_precision=older), None, buffered), buffered.scale.dtype),
    }


@pytest.mark.full
def test_the_users_policy_wins_over_the_units_precision(ranks: Ranks) -> None:
    assert ranks(2, _policies)[0] == {
        "the user's type wins": torch.float32,
        "the user's reduction alone": BF16,
        "of the older FSDP": torch.float32,
        "no precision": torch.float32,
        "fsdp2's own": BF16,
        "float64": torch.float64,  # is there for its digits, and autocast leaves it alone
        "with buffers": (BF16, torch.float16),
    }


def _by_hand() -> dict[str, Any]:
    """A training loop of one's own over `prepare_module`, with a window, recomputation and a compiled module."""
    from torch.distributed.tensor import DTensor

    x, y = _data()[0]
    found = {}
    for name, options in {
        "plain": {},
        "recomputed": {"activation_checkpoint_params": ech.layouts.ActivationCheckpointParams()},
        "compiled": {"torch_compile_params": ech.layouts.TorchCompileParams(backend="aot_eager")},
    }.items():
        module = prepare_module(net(dtype=torch.float32), CPU, layout="fsdp", precision="bf16", **options)
        types = []
        module.last.register_forward_pre_hook(lambda layer, args, types=types: types.append(layer.weight.dtype))
        with ech.layouts.Precision.of("bf16").autocast(CPU):
            loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        grads = {n: p.grad.full_tensor() for n, p in module.named_parameters() if isinstance(p.grad, DTensor)}
        found[name] = {"types": set(types), "grads": grads, "loss": loss.detach()}
    with ech.on_meta():
        late = net(dtype=torch.float32)
    late = prepare_module(late, CPU, layout="fsdp", precision="bf16")
    found["on meta"] = {p.dtype for p in late.parameters()}
    return found


@pytest.mark.full
def test_a_loop_of_ones_own_recomputation_and_compilation(ranks: Ranks) -> None:
    found = ranks(2, _by_hand)[0]
    assert found.pop("on meta") == {torch.float32}
    x, y = _data()[0]
    alone = net(dtype=torch.float32)
    with ech.layouts.Precision.of("bf16").autocast(CPU):
        loss = nn.functional.mse_loss(alone(x), y)
    loss.backward()
    for name, got in found.items():
        assert got["types"] == {BF16}, name
        assert float(got["loss"]) == pytest.approx(float(loss.detach()), rel=2e-2), name
        for parameter, value in alone.named_parameters():
            assert torch.allclose(got["grads"][parameter], value.grad, atol=3e-2), (name, parameter)


def _norms_in_kept_blocks(recompute: Any) -> dict[str, torch.Tensor]:
    x, y = _data()[0]
    module = net(dtype=torch.float32)
    for block in module.blocks:
        block.insert(0, nn.LayerNorm(8))
    module = prepare_module(module, CPU, layout="fsdp", precision="bf16", recompute=recompute)
    with ech.layouts.Precision.of("bf16").autocast(CPU):
        loss = nn.functional.mse_loss(module(x), y)
    loss.backward()
    return {name: p.grad.full_tensor() for name, p in module.named_parameters()}


def test_norms_sharded_by_themselves_in_blocks_that_keep_operators(ranks: Ranks) -> None:
    """On one rank nothing is gathered, and fully_shard tells the profiler of more steps in the recomputation."""
    kept, plain = (ranks(1, _norms_in_kept_blocks, each)[0] for each in ("selective", None))
    assert largest_difference(kept, plain) == 0


def test_float16_without_a_scaler_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    unit = Regression(module=net(dtype=torch.float32), precision="fp16")
    unit.grad_scaler = None
    with caplog.at_level(logging.WARNING):
        ech.train(unit, _data()[:1], max_epochs=1)
    assert "precision='fp16', which includes one" in caplog.text


class _OwnNorm(nn.Module):
    """A norm as many programs write it for themselves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


def _called_elsewhere() -> dict[str, Any]:
    found = {}
    for layout in ("ddp", "fsdp", "zero2"):
        module = net(dtype=torch.float32)
        for block in module.blocks:
            block.insert(0, _OwnNorm(8))

        def call(state: ech.State, unit: Any, layout: str = layout) -> None:
            """In a hook, where no autocast of a step is."""
            with torch.no_grad():
                found[layout] = unit.module(torch.ones(2, 4)).float()

        unit = Regression(module=module, layout=layout, precision="bf16", lr=0.01)
        ech.train(unit, _data(), max_epochs=1, callbacks=[Hooks(on_train_epoch_end=call)])
        assert not torch.is_autocast_enabled("cpu")
    return found


@pytest.mark.full
def test_norms_of_ones_own_and_calls_outside_of_a_step_work(ranks: Ranks) -> None:
    for found in ranks(2, _called_elsewhere):
        for layout in ("fsdp", "zero2"):
            torch.testing.assert_close(found[layout], found["ddp"], atol=2e-2, rtol=2e-2)


class _Island(Net):
    """Ends in float32, as many models compute a head or a router."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        with torch.autocast("cpu", enabled=False):
            return self.last(x.float())


def _island(layout: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    unit = Regression(module=_Island(), layout=layout, precision="bf16", lr=0.01)
    ech.train(unit, _data(), max_epochs=1)
    return whole(unit.module)


def _islands() -> list[Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    full = ech.FSDPStrategy(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.float32))
    return [answer(_island, layout) for layout in ("ddp", "fsdp", full)]


@pytest.mark.full
def test_a_layer_without_autocast_is_told_of_gathered_weights_or_trains_with_its_own(ranks: Ranks) -> None:
    """One that was refused in torch's own words, of two matrices without a name."""
    for plain, said, full in ranks(2, _islands):
        assert said.startswith("parameters of _Island are gathered in torch.bfloat16") and "param_dtype=torch.float32" in said
        for name, value in plain.items():
            torch.testing.assert_close(full[name], value, atol=1e-4, rtol=1e-4)
