"""`echelon prove` over directions of parallelism: rows that fit a model are compared, others are noted; workers meet."""

from __future__ import annotations

import pytest
import torch

import echelon as ech
from echelon.contracts.errors import UsageError
from echelon.prover.matrix import matrix
from tests.language import LENGTH, WORDS, Language, Unit


def _unit() -> Unit:
    torch.manual_seed(3)
    return Unit("AdamW", Language(4))


def _data() -> ech.Loader:
    rows = torch.randint(0, WORDS, (20, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return ech.Loader([{"words": row[:-1], "targets": row[1:]} for row in rows], 8)


def test_rows_of_directions_stand_beside_the_strategies() -> None:
    names = {row.name: row for row in matrix(None, [1, 2, 4, 8], [1, 2], sgd=True)}
    some = ("tp, sequence parallel", "cp", "pp, 1f1b", "pp, zero_bubble", "ep", "fsdp x cp", "fsdp x pp", "tp x pp", "hsdp x tp")
    for name in some:
        assert names[name].fits_some and names[name].accumulation == 2
    assert not names["fsdp"].fits_some
    assert not any(row.fits_some for row in matrix(["fsdp"], [2], [1], sgd=True))


def test_workers_that_meet_after_each_update_train_as_one_process() -> None:
    """Their SGD has no momentum and no clipping, which the reference beside them keeps for others."""
    proof = ech.prove(_unit, _data, strategies=["local_sgd", "ddp"], ranks=[2], accumulation=[1], updates=3)
    assert [(r.label, r.verdict) for r in proof.results] == [
        ("local_sgd, every update, sgd", "agrees"),
        ("ddp", "agrees"),
        ("ddp, sgd", "agrees"),
    ]
    with pytest.raises(UsageError, match="nothing to compare DiLoCo with"):
        ech.prove(_unit, _data, strategies=["diloco"], ranks=[2])


@pytest.mark.full
def test_every_direction_that_fits_is_compared_and_others_are_noted() -> None:
    proof = ech.prove(_unit, _data, ranks=[2], accumulation=[2], updates=2, sgd=False)
    verdicts = {r.label: r.verdict for r in proof.results}
    assert proof.holds, verdicts
    some = ("tp, sequence parallel", "cp", "pp, gpipe", "pp, 1f1b", "pp, zbv")
    assert {f"{name}, accumulation 2" for name in some} <= verdicts.keys()
    assert not any(label.startswith("ep") for label in verdicts)
    assert any(note.startswith("Not for this model: ep. ep must be 1 for Language") for note in proof.notes), proof.notes
