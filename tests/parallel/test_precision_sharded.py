"""precision="bf16" and "fp16" under sharded layouts: what is gathered, cast and kept; odd layers; who decides.

In these models the numbers of autocast in one process are the reference, to the rounding of the half type.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import echelon as ech
from echelon.compat.torchtnt.utils.prepare_module import FSDP2Strategy
from echelon.parallel.parallelize import prepare_module
from tests.conftest import Ranks
from tests.kit.models import Net, net, whole
from tests.kit.refusals import answer
from tests.kit.units import Hooks, Regression

pytestmark = pytest.mark.standing_ranks

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
        (4, {"zero2": "zero2", "zero3": "zero3", "hsdp": "hsdp", "tp x fsdp": ech.Layout(tp=2)}, ["bf16"]),
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
