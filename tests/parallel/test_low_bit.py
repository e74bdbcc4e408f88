"""Optimizers of other kinds: torchao's of few bits are saved and go on; torch's Adam and AdamW are fused on a GPU; float8."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import echelon as ech
from echelon.common.errors import PrecisionError
from echelon.parallel.gradients import fused
from tests.conftest import Ranks
from tests.kit.models import Net, batch, net, plain_training, seeded, whole
from tests.kit.refusals import refusal, refused
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

WIDTH = 96  # two layers whose halves have 4608 values: enough for torchao to quantise them


class Few(ech.AutoUnit[Any]):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        return nn.functional.mse_loss(self.module(data), data.flip(-1)), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        from torchao.optim import AdamW8bit

        return AdamW8bit(module.parameters(), lr=1e-2, block_size=WIDTH), None


def _unit(layout: str) -> Few:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return Few(module=net, layout=layout)


def _data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(3)]


def _moments(unit: Few) -> tuple[torch.Tensor, int]:
    """The first moments of this rank's part as numbers, and how many of the tensors are in 8 bits."""
    states = [s["exp_avg"] for s in unit.optimizer.state.values() if s]  # under zero1 of what this rank owns
    held = [getattr(s, "to_local", lambda s=s: s)() for s in states]
    few = [type(s).__name__ == "OptimState8bit" for s in held]
    return torch.cat([(s.dequantize() if is_few else s).flatten() for s, is_few in zip(held, few, strict=True)]), sum(few)


def _interrupted(folder: str, layout: str, resumed_as: str) -> tuple[float, float, int]:
    """How far moments lie from those that were saved, if they lie on the same ranks; how far weights in the end from those of a
    run that never stopped, relative to what training changed; and how many tensors are quantised.
    """
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, which takes long and is not in question
        straight, first, again = _unit(layout), _unit(layout), _unit(resumed_as)
        ech.train(straight, _data(), max_epochs=2)
        saver = ech.DistributedCheckpointSaver(folder, save_every_n_epochs=1)
        ech.train(first, _data(), max_epochs=1, callbacks=[saver])
        ech.DistributedCheckpointSaver.restore_from_latest(folder, again)
        moments, quantised = _moments(again)
        saved, _ = _moments(first)
        apart = float((moments - saved).abs().max() / saved.abs().max()) if layout == resumed_as else 0.0
        ech.train(again, _data(), max_epochs=2)
    ends, started = [_weights(u) for u in (again, straight)], _weights(_unit("none"))
    return apart, float((ends[0] - ends[1]).norm() / (ends[1] - started).norm()), quantised


def _weights(unit: Few) -> torch.Tensor:
    return torch.cat([value.flatten() for value in whole(unit.module).values()])


@pytest.mark.full
def test_eight_bits_are_saved_and_go_on(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="pip install 'echelon[float8]'")
    for layout, resumed_as in (("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "zero1")):
        for apart, weights, quantised in ranks(2, _interrupted, str(tmp_path / layout / resumed_as), layout, resumed_as):
            assert apart < 0.01 and weights < 0.02 and quantised, (layout, resumed_as, apart, weights, quantised)


# --- torch's fused kernels


def _is_fused(make: Any, device: str = "cuda", dtype: torch.dtype = torch.float32) -> Any:
    with FakeTensorMode():
        optimizer = make([torch.empty(3, device=device, dtype=dtype, requires_grad=True)])
        fused.fuse(optimizer)
    return optimizer.param_groups[0].get("fused")


class Own(torch.optim.AdamW):
    """A class of the user's."""


@pytest.mark.parametrize(
    ("kind", "options", "where", "fuses"),
    [
        (torch.optim.Adam, {}, {}, True),
        (torch.optim.AdamW, {}, {}, True),
        # Not where the script chose,
        *(
            (torch.optim.AdamW, {name: value}, {}, False)
            for name, value in (("fused", False), ("foreach", True), ("foreach", False))
        ),
        (torch.optim.AdamW, {"capturable": True}, {}, False),
        # on a CPU, for complex numbers, or of another class.
        (torch.optim.AdamW, {}, {"device": "cpu"}, False),
        (torch.optim.AdamW, {}, {"dtype": torch.complex64}, False),
        (Own, {}, {}, False),
        (torch.optim.SGD, {}, {}, False),
    ],
)
def test_on_a_gpu_by_default(kind: Any, options: dict[str, Any], where: dict[str, Any], fuses: bool) -> None:
    assert bool(_is_fused(lambda params: kind(params, **options), **where)) is fuses


def test_not_once_it_has_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    fused.fuse(optimizer)
    assert not optimizer.param_groups[0]["fused"]


def _fused_unit(layout: str, given: bool | None = None) -> Regression:
    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=0.1, fused=given)

    return Regression(module=net(dtype=torch.float32), layout=layout, clip_grad_norm=1.0, optimizer=optimizer)


def _apart(folder: str, layout: str) -> tuple[bool, list[float]]:
    """How far weights lie from those of `fused=True` as torch has it: after two epochs, and after a resume in between."""
    fused.DEVICES = {"cpu"}
    try:
        wanted, data = _fused_unit(layout, True), [batch(4, i, torch.float32) for i in range(4)]
        ech.train(wanted, data, max_epochs=2)
        ours = _fused_unit(layout)
        ech.train(ours, data, max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder, save_every_n_epochs=1)])
        again = _fused_unit(layout)
        ech.DistributedCheckpointSaver.restore_from_latest(folder, again)
        for unit in (ours, again):
            ech.train(unit, data, max_epochs=2)
        want = whole(wanted.module)
        apart = [float((value - want[name]).abs().max()) for u in (ours, again) for name, value in whole(u.module).items()]
        return all(g["fused"] for u in (ours, again) for g in u.optimizer.param_groups), apart
    finally:
        fused.DEVICES = {"cuda"}


@pytest.mark.full
def test_numbers_are_those_of_torchs_fused_kernel(ranks: Ranks, tmp_path: Path) -> None:
    for layout in ("ddp", "fsdp", "zero1"):
        for is_fused, apart in ranks(2, _apart, str(tmp_path / layout), layout):
            assert is_fused and max(apart) == 0, (layout, is_fused, apart)


# --- float8 by torchao, emulated: which layers, the same losses under every layout, and what is missing by name


class Wide(Net):
    """Two blocks whose layers are of float8's sizes, but for one; a head beside them."""

    def __init__(self) -> None:
        super().__init__(width=32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Linear(32, 3), nn.Linear(3, 32)) for _ in range(2)
        )
        self.last = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean(1, keepdim=True)


def wide() -> Wide:
    return seeded(Wide).float()


def converted(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if type(part).__name__ == "Float8Linear"]


def _train(layout: Any, recipe: Any, gathers: bool) -> tuple[list[float], list[str], list[str]]:
    """Losses on the batches of all ranks, and names of layers and parameters."""
    precision = ech.layouts.Float8(recipe, filter_fqns=["blocks.1.2"], emulate=True, enable_fsdp_float8_all_gather=gathers)
    unit = Regression(module=wide(), layout=layout, precision=precision, lr=0.05)
    prepared, losses = unit.prepared, []
    unit.on_train_step_end = lambda *a: losses.append(float(unit.latest_update[0]))
    ech.train(unit, [batch(16, 10 * step + prepared.data.rank, torch.float32) for step in range(4)], max_epochs=1)
    if gathers:
        weight = prepared.unwrapped.blocks[0][0].weight._local_tensor  # `to_local` makes another, without the scale
        assert type(weight).__name__ == "WeightWithDynamicFloat8CastTensor" and weight._precomputed_scale is not None
    return losses, converted(unit.module), [n for n, _ in prepared.unwrapped.named_parameters()]


def test_layers_are_chosen_by_place_size_and_name() -> None:
    pytest.importorskip("torchao")
    _, layers, names = _train("none", "rowwise", False)
    assert layers == ["blocks.0.0", "blocks.0.2", "blocks.1.0"]
    assert names == [n for n, _ in wide().named_parameters()]


@pytest.mark.full
def test_the_losses_are_those_of_bf16_within_eight_bits(ranks: Ranks) -> None:
    """Under each layout, with sharded weights that travel in 8 bits or not."""
    pytest.importorskip("torchao")
    windows = [[batch(16, 10 * step + rank, torch.float32) for rank in range(2)] for step in range(4)]
    _, want, _ = plain_training(windows, module=wide(), lr=0.05)
    fsdp = [("fsdp", "rowwise", False), ("fsdp", "tensorwise", False), ("fsdp", "tensorwise", True)]
    for losses, layers, _ in ranks(2, lambda: [_train(*case) for case in [("ddp", "rowwise", False), *fsdp]])[0]:
        assert len(layers) == 3
        assert losses == pytest.approx(want, rel=0.05)


def _saved_and_restored(folder: str, gathers: bool) -> dict[str, torch.Tensor]:
    precision = ech.layouts.Float8("tensorwise", emulate=True, enable_fsdp_float8_all_gather=gathers)

    def unit() -> Regression:
        return Regression(module=wide(), layout="fsdp", precision=precision, optimizer="AdamW", lr=0.01)

    first, second = unit(), unit()
    rank = first.prepared.data.rank
    saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=2)
    ech.train(first, [batch(16, 10 * step + rank, torch.float32) for step in range(2)], max_epochs=1, callbacks=[saver])
    ech.DistributedCheckpointSaver.restore_from_latest(folder, second)
    a, b = whole(first.module), whole(second.module)
    return {n: (a[n].float() - b[n].float()).abs().max() for n in a}


@pytest.mark.full
@pytest.mark.parametrize("gathers", [False, True])
def test_a_checkpoint_of_it_comes_back(ranks: Ranks, tmp_path: Path, gathers: bool) -> None:
    pytest.importorskip("torchao")
    assert max(ranks(2, _saved_and_restored, str(tmp_path), gathers)[0].values()) == 0


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with refused(PrecisionError):
        Regression(module=wide(), precision="float8")


def _refusals() -> list[str]:
    def refused_with(layout: Any, module: nn.Module, **options: Any) -> str:
        return refusal(Regression, module=module, layout=layout, precision=ech.layouts.Float8(emulate=True, **options))

    wrapped = nn.parallel.DistributedDataParallel(wide())
    return [refused_with("tp", wide()), refused_with(None, wrapped), refused_with("ddp", wide(), filter_fqns=["blocks"])]


def test_where_it_cannot_be_it_is_refused(ranks: Ranks) -> None:
    pytest.importorskip("torchao")
    tp, wrapped, nothing = ranks(2, _refusals)[0]
    assert "does not support layout 'tp' yet" in tp
    assert "is already parallel. Pass the plain module" in wrapped
    assert "finds no suitable linear layer in Wide" in nothing
