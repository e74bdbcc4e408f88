"""The prover proves: it names every mistake of its catalogue in a script that has it, and passes scripts that are right."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.contracts.errors import UsageError
from echelon.prover import show
from echelon.prover.causes import CAUSES
from echelon.prover.matrix import matrix
from echelon.prover.prove import Proof, prove_target
from echelon.prover.rank import Target
from echelon.prover.streams import NotJoinable, digest, join

PLANTED = Path(__file__).parent / "planted"

MISTAKES = {
    "missing_all_reduce": ("missing all-reduce", "gradient"),
    "weight_of_a_mask": ("loss weighted per rank", "forward"),
    "weight_of_a_rank": ("loss weighted per rank", "gradient"),
    "same_data": ("identical data on two ranks", None),
    "sampler_without_rank": ("a sampler that ignores the rank", None),
    "same_dropout": ("identical dropout", None),
    "buffers_apart": ("unsynchronised buffers", "forward"),
    "stale_optimizer": ("an untracked or stale optimizer parameter", None),
    "stale_optimizer_auto": ("an untracked or stale optimizer parameter", "update"),
    "batch_norm": ("batch norm over the local batch", "forward"),
    "summed_gradients": ("a wrong scale", "gradient"),
    "initial_values_apart": ("different initial parameters", "forward"),
    "learning_rates_apart": ("parameters that drift apart", None),
    "contrast": ("an operation over the whole batch", "forward"),
}


def _prove(script: str, strategies: list[str], ranks: list[int], updates: int = 4) -> Proof:
    rows = matrix(strategies, ranks, [1], sgd=False)
    return prove_target(Target(script=str(PLANTED / f"{script}.py")), rows, updates, False)


def test_every_cause_of_the_catalogue_is_planted() -> None:
    assert {cause for cause, _ in MISTAKES.values()} == CAUSES.keys()


@pytest.mark.parametrize("script", MISTAKES)
def test_a_planted_mistake_is_named(script: str) -> None:
    proof = _prove(script, ["fsdp" if "stale" in script else "ddp"], [2])
    (row,) = proof.results
    cause, phase = MISTAKES[script]
    assert row.verdict == "DIFFERS" and not proof.holds, row
    assert cause in [name for name, _ in row.causes], row
    assert phase is None or (row.first is not None and row.first.phase == phase), row.first
    if cause not in ("unsynchronised buffers", "loss weighted per rank"):
        assert len(row.causes) == 1, row.causes  # and nothing else is


@pytest.mark.parametrize("script", sorted(p.stem for p in PLANTED.glob("right_*.py")))
def test_a_right_script_passes(script: str) -> None:
    proof = _prove(script, ["ddp", "fsdp"], [1, 2, 4])
    assert proof.holds, "\n".join(t for r in proof.results for t in (show.line(r), *show.details(r)))
    assert {r.ranks for r in proof.results} == {1, 2, 4}


def test_the_first_difference_is_named_with_its_tensor() -> None:
    (row,) = _prove("missing_all_reduce", ["ddp"], [2]).results
    assert row.first is not None and row.first.update == 0 and row.first.tensor == "0.weight"
    assert row.first.relative > 100 * row.first.tolerance


class Attention(nn.Module):
    """Tokens (B, T) -> logits (B, T, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        return self.head(h + self.attend(h, h, h, need_weights=False)[0])


class Text(ech.AutoUnit[torch.Tensor]):
    """Attention over tokens, with AdamW: the key biases have a true gradient of zero."""

    weight_unit = "tokens"

    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return nn.functional.cross_entropy(self.module(data).flatten(0, 1), data.roll(-1, 1).flatten()), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.AdamW(module.parameters(), lr=1e-2), None


def _text() -> Text:
    torch.manual_seed(0)
    return Text(module=Attention(), strategy="ddp")


def _tokens() -> ech.Loader:
    return ech.Loader(list(torch.randint(0, 16, (64, 12), generator=torch.Generator().manual_seed(0))), 16)


def test_parameters_without_a_gradient_are_said_and_not_failed() -> None:
    proof = ech.prove(_text, _tokens, strategies=["ddp"], ranks=[2], accumulation=[1, 2], updates=10, sgd=False)
    assert proof.holds, [show.details(r) for r in proof.results]
    undetermined = {name for r in proof.results for name in r.undetermined}
    assert undetermined == {"attend.in_proj_bias"}  # a third of it: the keys' part
    assert all(r.undetermined["attend.in_proj_bias"] <= 8 for r in proof.results if r.undetermined)
    assert any("true gradient of zero" in line for line in show.summary(proof))


def test_in_float64_nothing_is_undetermined() -> None:
    proof = ech.prove(_text, _tokens, strategies=["fsdp"], ranks=[2], accumulation=[1], updates=5, float64=True)
    assert proof.holds and proof.dtype == "float64"
    assert not any(r.undetermined for r in proof.results)
    assert all(r.parameter is not None and r.parameter < 1e-10 for r in proof.results)


def test_a_strategy_that_refuses_the_model_is_shown_and_does_not_fail_the_rest() -> None:
    strategies = {"ddp": "ddp", "fsdp": ech.FSDPStrategy(blocks=["no.such.block"])}
    proof = ech.prove(_text, _tokens, strategies=strategies, ranks=[2], accumulation=[1], updates=1, sgd=False)
    assert [r.verdict for r in proof.results] == ["agrees", "not possible"]
    assert "no.such.block" in proof.results[1].message and proof.holds


def test_a_script_that_does_not_train_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("print('nothing')\n")
    (row,) = prove_target(Target(script=str(tmp_path / "idle.py")), matrix(["ddp"], [2], [1], sgd=False), 1, False).results
    assert row.verdict == "failed" and "never called" in row.message


def test_a_script_that_crashes_is_shown_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("raise RuntimeError('the disk is full')\n")
    (row,) = prove_target(Target(script=str(tmp_path / "crash.py")), matrix(["ddp"], [2], [1], sgd=False), 1, False).results
    assert row.verdict == "failed" and "the disk is full" in row.message


def test_the_command_leaves_a_page_and_its_exit_code_says_it(echelon_command: Callable[..., Any], tmp_path: Path) -> None:
    options = ["--strategies", "ddp", "--ranks", "2", "--accumulation", "1", "--no-sgd", "--updates", "2"]
    right = echelon_command("prove", *options, "--json", str(PLANTED / "right_auto.py"))
    assert right.returncode == 0, right.stderr
    assert json.loads(right.stdout)["rows"][0]["verdict"] in ("agrees", "bit-equal")
    wrong: subprocess.CompletedProcess[str] = echelon_command("prove", *options, str(PLANTED / "batch_norm.py"))
    assert wrong.returncode == 1 and "DIFFERS" in wrong.stdout and "likely cause: batch norm over the local batch" in wrong.stdout
    pages = [p.read_text() for p in sorted((tmp_path / "runs").glob("prove-*/prove.html"))]
    assert len(pages) == 2 and any("DIFFERS" in page for page in pages)
    assert echelon_command("prove", "no_such.py").returncode == 2
    assert echelon_command("prove", "--ranks", "0", str(PLANTED / "right_auto.py")).returncode == 2


def test_batches_are_joined_by_their_structure() -> None:
    a, b = {"x": torch.ones(2, 3), "n": [1, 2], "k": "same"}, {"x": torch.zeros(1, 3), "n": [3], "k": "same"}
    joined = join([a, b])
    assert joined["x"].shape == (3, 3) and joined["n"] == [1, 2, 3] and joined["k"] == "same"
    with pytest.raises(NotJoinable, match="shapes"):
        join([torch.ones(1, 2), torch.ones(1, 3)])
    with pytest.raises(NotJoinable, match="values"):
        join([(torch.ones(1), 1), (torch.ones(1), 2)])
    assert digest(torch.ones(2, 2)) != digest(torch.ones(4)) != digest(torch.ones(4, dtype=torch.float64))


def test_a_matrix_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to compare"):
        matrix(["ddp"], [], [1], sgd=True)
    labels = [(r.label, r.ranks) for r in matrix(["ddp", "hsdp"], [1, 2, 4], [1, 2], sgd=True)]
    assert ("ddp, accumulation 2", 2) in labels and ("hsdp", 4) in labels and ("hsdp", 2) not in labels
    assert ("ddp, sgd", 2) in labels and ("noop", 1) in labels
