"""What `echelon prove` says of a script as it runs: compiled, recomputed, in the precision that it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.loop.target import Target
from echelon.prover import show
from echelon.prover.matrix import YOURS, Row, matrix
from echelon.prover.prove import Proof, prove_target
from tests.planted.scripts import script

MISTAKES = {
    "compiled_within_a_budget": "other random numbers in the backward pass",
    "recomputed_with_other_dropout": "other random numbers in the backward pass",
    "clipping_before_unscaling": "gradients that are still scaled",
    "half_without_a_scaler": "gradients that underflow",
}


def _proved(folder: Path, name: str, *args: str, eager: bool = False) -> Proof:
    row = Row(YOURS, 2, yours=True, eager=eager)
    return prove_target(Target(script=script(folder, name), args=args), [row], 2, False)


@pytest.mark.full(but=("recomputed_with_other_dropout",))
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_that_only_the_scripts_own_configuration_has_is_named(tmp_path: Path, name: str) -> None:
    (row,) = _proved(tmp_path, name).results
    assert row.verdict == "DIFFERS" and [cause for cause, _ in row.causes] == [MISTAKES[name]], show.details(row)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "args", "ran"),
    [
        ("right_compiled", (), "ran compiled,"),
        ("right_compiled", ("bf16",), "ran compiled and in bf16"),
        ("right_compiled", ("budget",), "ran compiled,"),
        ("right_compiled", ("budget", "inductor"), "ran compiled,"),
        ("right_compiled_adam", (), "ran compiled and in bf16"),
        ("half_without_a_scaler", ("right",), "ran in bf16"),
        ("clipping_before_unscaling", ("right",), "ran in fp16"),
    ],
)
def test_a_right_script_passes_as_it_runs(tmp_path: Path, name: str, args: tuple[str, ...], ran: str) -> None:
    proof = _proved(tmp_path, name, *args)
    (row,) = proof.results
    assert proof.holds and any(ran in note for note in proof.notes), [*show.details(row), *proof.notes]


@pytest.mark.full
def test_what_is_drawn_between_two_backward_passes_is_no_mistake(tmp_path: Path) -> None:
    proof = _proved(tmp_path, "two_passes_with_dropout")
    assert proof.holds, show.details(proof.results[0])


@pytest.mark.full
def test_compiled_code_that_no_row_ran_is_said(tmp_path: Path) -> None:
    """The mask of the backward pass is then the forward pass's, and the row agrees."""
    proof = _proved(tmp_path, "compiled_within_a_budget", eager=True)
    assert proof.holds and any("Compiled code was not tested" in note for note in proof.notes), proof


def test_the_scripts_own_configuration_comes_first() -> None:
    rows = matrix(["ddp"], [1, 2, 4], [1], sgd=False, yours=True)
    assert rows[0].yours and rows[0].ranks == 2 and not any(row.yours for row in rows[1:])
