"""float8 by torchao, emulated: which layers, the same losses under every layout, and what is missing by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.common.errors import PrecisionError, UsageError
from echelon.parallel.recipe.precision import Precision
from tests.conftest import Ranks
from tests.kit.models import Net, batch, plain_training, seeded, whole
from tests.kit.refusals import refusal, refused
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ech.layouts.Float8("columnwise"), "recipe must be 'rowwise' or 'tensorwise', got 'columnwise'"),
        (lambda: ech.layouts.Float8(enable_fsdp_float8_all_gather=True), "one scale for each tensor. Set recipe='tensorwise'"),
        (lambda: Precision(float8=ech.layouts.Float8()), r"float8 must go with dtype=torch\.bfloat16"),
        (lambda: Precision(torch.bfloat16, float8="rowwise"), r"float8 must be Float8\(\.\.\.\) or None"),
        (lambda: Precision.of("fp8"), "precision must be 'fp32', 'bf16', 'fp16', 'float8'"),
    ],
)
def test_values_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


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
