"""`echelon prove` over directions of parallelism: rows that fit a model are compared, others are noted; workers meet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.common.errors import UsageError
from echelon.loop.target import Target
from echelon.prover.matrix import matrix
from echelon.prover.prove import prove_target
from tests.kit.language import LENGTH, WORDS, Language, Unit


def _unit() -> Unit:
    return _of(partial(Language, 4))


def _data() -> ech.Loader:
    rows = torch.randint(0, WORDS, (20, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return ech.Loader([{"words": row[:-1], "targets": row[1:]} for row in rows], 8)


def test_rows_of_directions_stand_beside_the_strategies() -> None:
    names = {row.name: row for row in matrix(None, [1, 2, 4, 8], [1, 2], sgd=True)}
    some = ("tp, sequence parallel", "cp", "pp, 1f1b", "pp, zero_bubble", "ep", "fsdp x cp", "fsdp x pp", "tp x pp", "hsdp x tp")
    for name in some:
        assert names[name].fits_some and names[name].accumulation == 2
    assert names["tp"].fits_some and names["tp x fsdp"].fits_some and not names["fsdp"].fits_some
    assert not any(row.fits_some for row in matrix(["fsdp"], [2], [1], sgd=True))


def test_by_default_ranks_splits_and_sgd_are_tried_with_two_layouts_and_with_all_that_are_named() -> None:
    default = matrix(None, [1, 2, 4], [1, 2], sgd=True)
    varied = [row for row in default if row.name in ("zero1", "zero2", "hsdp")]
    assert [row.label for row in varied] == ["hsdp", "zero1", "zero2"]
    named = [row.label for row in matrix(["zero1"], [2, 4], [1, 2], sgd=True)]
    assert named == ["zero1", "zero1", "zero1, accumulation 2", "zero1, sgd"]
    full = [(row.label, row.ranks) for row in default if not row.brief]
    assert full == [("none", 1), ("ddp", 2)]
    assert [row.brief for row in matrix(["tp=2", "ddp"], [2], [1], sgd=False, yours=True)] == [False, False, False]
    assert [row.brief for row in matrix(["ddp", "tp=2"], [2], [1], sgd=False, yours=True)] == [False, False, True]


_BY_PLACE = """
import torch, echelon as ech
ech.seed(0)
rows = torch.randn(32, 12)
loader = ech.Loader([(row, row[11]) for row in rows], 8)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="ddp")
for inputs, wanted in loader:
    with ech.window(model) as window:
        window.backward((model(inputs[:, 11, None])[:, 0] - wanted).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_script_that_cannot_use_a_part_of_a_sequence_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(_BY_PLACE)
    rows = [row for row in matrix(None, [1, 2], [1], sgd=False) if row.name in ("none", "ddp", "cp")]
    proof = prove_target(Target(script=str(tmp_path / "place.py")), rows, 2, False)
    assert [(r.label, r.is_equal) for r in proof.results] == [("none", True), ("ddp", True)]
    (note,) = [each for each in proof.notes if each.startswith("Not for this model: cp")]
    assert "IndexError" in note


@pytest.mark.full
def test_workers_that_meet_after_each_update_train_as_one_process() -> None:
    """Their SGD has no momentum and no clipping, which the reference beside them keeps for others."""
    proof = ech.prove(_unit, _data, layouts=["local_sgd", "ddp"], ranks=[2], accumulation=[1], updates=3)
    assert [(r.label, r.verdict) for r in proof.results] == [
        ("local_sgd, every update, sgd", "agrees"),
        ("ddp", "agrees"),
        ("ddp, sgd", "agrees"),
    ]
    with pytest.raises(UsageError, match="nothing to compare DiLoCo with"):
        ech.prove(_unit, _data, layouts=["diloco"], ranks=[2])


class _Unplanned(Language):
    """Its tensor-parallel plan is inferred."""

    tp_plan: ClassVar[dict[str, str]] = {}


class _Recurrent(nn.Module):
    """Its vocabulary can be divided, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.words(words))[0])


def _of(make: Callable[[], nn.Module]) -> Unit:
    torch.manual_seed(3)
    return Unit("AdamW", make())


@pytest.mark.full
def test_a_model_that_can_hardly_be_divided_is_proved_with_a_note_for_each_direction() -> None:
    proof = ech.prove(partial(_of, _Recurrent), _data, ranks=[2], accumulation=[2], updates=2, sgd=False)
    assert proof.holds and {r.label.partition(",")[0] for r in proof.results} == {"ddp", "fsdp", "zero1", "zero2", "tp"}
    noted = " ".join(note for note in proof.notes if note.startswith("Not for this model: "))
    for names in ("tp, sequence parallel. ", "cp. ", "pp, gpipe; pp, 1f1b; ", "ep. "):
        assert f"Not for this model: {names}" in noted, noted


@pytest.mark.full
def test_every_direction_that_fits_is_compared_and_others_are_noted() -> None:
    proof = ech.prove(partial(_of, partial(_Unplanned, 4)), _data, ranks=[2], accumulation=[2], updates=2, sgd=False)
    verdicts = {r.label: r.verdict for r in proof.results}
    assert proof.holds, verdicts
    some = ("tp, sequence parallel", "cp", "pp, gpipe", "pp, 1f1b", "pp, zbv")
    assert {"tp", *(f"{name}, accumulation 2" for name in some)} <= verdicts.keys()
    assert not any(label.startswith("ep") for label in verdicts)
    assert any(note.startswith("Not for this model: ep. ep must be 1 for _Unplanned") for note in proof.notes), proof.notes


class _OwnStep(ech.TrainUnit[Any]):
    """A step of one's own, on samples that ranks of a layer share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.module = ech.layouts.prepare_module(mlp, torch.device("cpu"), layout="ddp")
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def train_step(self, state: ech.State, data: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.module(data).squeeze(1) - data.sum(1)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _numbers() -> ech.Loader:
    return ech.Loader(torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), 8)


@pytest.mark.full
def test_ranks_that_share_a_layer_may_train_on_the_same_samples_in_a_step_of_ones_own() -> None:
    proof = ech.prove(_OwnStep, _numbers, layouts=["tp"], ranks=[2], accumulation=[1], updates=2, sgd=False, float64=True)
    assert [(r.label, r.verdict) for r in proof.results] == [("tp", "agrees")], proof.results
