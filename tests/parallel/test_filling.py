"""Values of a model built on the meta device: computed by one rank each, on the device, or before a restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.parallel.meta import deferred
from echelon.parallel.meta import materialize as filling
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, whole
from tests.kit.refusals import refusal
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")
PLAN = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}


class Various(nn.Module):
    """Draws of many kinds, a tie, a constant, a buffer that no checkpoint has, and one that every checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.last, self.again = nn.Linear(8, 1), nn.Linear(8, 1)
        self.again.weight = self.last.weight
        nn.init.trunc_normal_(self.blocks[0][0].weight, std=0.3)
        nn.init.orthogonal_(self.blocks[1][0].weight)
        self.gain = nn.Parameter(torch.randn(8) * 0.1 + torch.linspace(1.0, 2.0, 8))
        self.register_buffer("angles", torch.arange(8).float() / 8, persistent=False)
        self.register_buffer("seen", torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.gain + self.angles
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) + self.again(x)


def _made(seed: int = 5, **options: Any) -> Various:
    torch.manual_seed(seed)
    with ech.on_meta(**options):
        return Various()


def _plain(seed: int = 5) -> Various:
    torch.manual_seed(seed)
    return Various()


def _values(module: nn.Module) -> dict[str, torch.Tensor]:
    return whole(module) | {n: b.clone() for n, b in module.named_buffers()}


def _divided() -> dict[str, Any]:
    filling.SENT_BYTES = 1
    try:
        found = {}
        for layout in ("ddp", "fsdp", "zero1", "zero2", "hsdp", ech.FSDPStrategy(cpu_offload=True), ech.Layout(tp=2, plan=PLAN)):
            computed: list[int] = []

            def compute(value: Any, *args: Any, real: Any = deferred.Value.compute, seen: list[int] = computed) -> torch.Tensor:
                made = real(value, *args)
                seen.append(made.nbytes)
                return made

            with mock.patch.object(deferred.Value, "compute", compute):
                unit = Regression(module=_made(5 + dist.get_rank()), layout=layout)
            found[str(layout)] = sum(computed), _values(unit.prepared.unwrapped)
            assert unit.prepared.unwrapped.last.weight is unit.prepared.unwrapped.again.weight
            ech.train(unit, [batch(4, unit.prepared.data.rank, torch.float32)] * 2, max_epochs=1)
        with ech.on_meta():
            broken = nn.Linear(3, 3)
            broken.weight = nn.Parameter(torch.empty(3, 3))
            broken.weight.data[0] = 1.0
        said = refusal(ech.layouts.prepare_module, broken, CPU, layout="ddp")
        assert "a part of it is given no value" in said
        return found | {"error": said[:6]}
    finally:
        filling.SENT_BYTES = 1 << 20


@pytest.mark.full
def test_each_value_is_computed_by_one_rank(ranks: Ranks) -> None:
    plain = _values(_plain())
    size = sum(t.nbytes for t in plain.values())
    found = ranks(4, _divided)
    assert [got.pop("error") for got in found] == ["weight"] * 4
    for layout in found[0]:
        assert sum(got[layout][0] for got in found) < 1.2 * size, "every value was computed by several ranks"
        for got in found:
            for name, value in plain.items():
                assert torch.equal(got[layout][1][name], value), (layout, name)


def _on_device() -> dict[str, Any]:
    found = {}
    for layout in ("none", "ddp", "fsdp", ech.Layout(tp=-1, plan=PLAN)):
        seed = 5 if layout == "none" else 5 + dist.get_rank()
        unit = Regression(module=_made(seed, on_device=True), layout=layout)
        found[str(layout)[:6]] = _values(unit.prepared.unwrapped)
    return found


@pytest.mark.full
def test_values_computed_on_the_device_are_the_same_on_any_ranks(ranks: Ranks) -> None:
    found = ranks(2, _on_device)
    alone, plain = _values(Regression(module=_made(on_device=True)).module), _values(_plain())
    for got in found:
        for layout, values in got.items():
            assert values.keys() == alone.keys()
            for name, value in values.items():
                assert torch.equal(value, alone[name]), (layout, name)
    for name, value in alone.items():
        assert value.isfinite().all() and (name in ("angles",) or not torch.equal(value, plain[name])), name
    assert torch.allclose(alone["blocks.1.0.weight"] @ alone["blocks.1.0.weight"].T, torch.eye(8), atol=1e-5)
    assert 0.05 < float(alone["blocks.0.0.weight"].std()) < 0.6
    assert torch.equal(alone["last.weight"], alone["again.weight"]) if "again.weight" in alone else True


def test_recording_for_a_device_draws_nothing() -> None:
    torch.manual_seed(5)
    with ech.on_meta(on_device=True):
        nn.Linear(1000, 1000)
    after = torch.rand(1)
    torch.manual_seed(5)
    torch.randint(2**62, ())
    assert torch.equal(torch.rand(1), after)


def _restored(folder: str, layout: Any) -> dict[str, Any]:
    saved = Regression(module=_plain(), layout=layout, optimizer="AdamW")
    data = [batch(4, i, torch.float32) for i in range(2)]
    ech.train(saved, data, max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder)])
    want = _values(saved.prepared.unwrapped)
    found: dict[str, Any] = {}
    unit = Regression(module=_made(9, restores=True), layout=layout, optimizer="AdamW")
    ech.DistributedCheckpointSaver.restore_from_latest(folder, unit)
    found["equal"] = largest_difference(_values(unit.prepared.unwrapped), want)

    late = Regression(module=_made(5, restores=True), layout=layout)
    found["nothing there"] = ech.DistributedCheckpointSaver.restore_from_latest(f"{folder}/none", late)
    found["initial"] = largest_difference(_values(late.prepared.unwrapped), _values(_plain()))
    return found


@pytest.mark.full
def test_a_restore_gives_its_values_and_leaves_those_of_a_plain_build_where_nothing_is(ranks: Ranks, tmp_path: Path) -> None:
    for layout, got in ranks(2, lambda: {name: _restored(f"{tmp_path}/{name}", name) for name in ("fsdp", "ddp")})[0].items():
        assert got["equal"] == got["initial"] == 0.0 and got["nothing there"] is False, (layout, got)
