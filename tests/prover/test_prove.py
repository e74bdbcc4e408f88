"""The prover proves: it names every mistake of its catalogue in a script that has it, and passes scripts that are right."""

from __future__ import annotations

import collections
import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import echelon as ech
from echelon.cli.main import main
from echelon.common.errors import LayoutError, ProveError
from echelon.loop.target import Target
from echelon.parallel.layouts import with_options_of
from echelon.prover import show
from echelon.prover.causes import CAUSES
from echelon.prover.matrix import YOURS, Row, matrix
from echelon.prover.micro import NotDivisible, NotJoinable, Samples, digest, join, on_host
from echelon.prover.operators import without_narrow_casts
from echelon.prover.proof import (
    IN_FLOAT64,
    IN_PART,
    NOT_ALL_TESTED,
    NOTHING_COMPARED,
    OTHERS_DIFFER,
    YOURS_DIFFERS,
    Difference,
    Result,
    by_float64,
)
from echelon.prover.prove import Proof, prove_target
from tests.conftest import clean_environment
from tests.kit import forked
from tests.kit.refusals import refused
from tests.planted.scripts import cells, script

MISTAKES, RIGHT = cells("mistakes"), cells("right")


def _proved(
    folder: Path,
    name: str,
    *args: str,
    layouts: Sequence[str] = ("ddp",),
    ranks: Sequence[int] = (2,),
    accumulation: Sequence[int] = (1,),
    updates: int = 2,
    float64: bool = False,
    **more: bool,
) -> Proof:
    """Of a planted script; what more is given is of `matrix`."""
    rows = matrix(list(layouts), list(ranks), list(accumulation), **{"sgd": False, **more})
    rows = [row for row in rows if row.yours or row.accumulation in accumulation]
    return prove_target(Target(script=script(folder, name), args=args), rows, updates, float64)


# Each cause's first script is in `make test`, the others repeat it in another program.
FIRST = {said.partition(";")[0]: name for name, (said, _) in reversed(MISTAKES.items())}


def test_every_cause_of_the_catalogue_is_planted() -> None:
    assert FIRST.keys() | {*OF_ITS_OWN.values()} == CAUSES.keys()


@pytest.mark.full(but=("missing_all_reduce", "same_dropout", "same_data", "weight_of_a_mask", "stale_optimizer"))
@pytest.mark.parametrize("name", [pytest.param(m, marks=() if m in FIRST.values() else pytest.mark.full) for m in MISTAKES])
def test_a_planted_mistake_is_named(tmp_path: Path, name: str) -> None:
    layouts = ["fsdp" if "stale" in name or "shard" in name else "ddp"]
    accumulation = [2] if "window" in name or "clamped" in name else [1]
    proof = _proved(tmp_path, name, layouts=layouts, accumulation=accumulation, updates=3)
    (row,) = proof.results
    cause, phase, seen = (MISTAKES[name][0] + ";;").split(";")[:3]
    assert row.verdict == "DIFFERS" and not proof.holds, row
    assert cause in [name for name, _ in row.causes], row
    assert not phase.strip() or (row.first is not None and row.first.phase == phase.strip()), row.first
    if row.first is not None and row.first.tolerance:
        assert ("rounding of float64" in "".join(show.details(row))) == (row.first.tolerance < 1e-8), show.details(row)
    if name == "missing_all_reduce":
        assert row.first is not None and row.first.update == 0 and row.first.tensor == "0.weight"
        assert row.first.relative > 100 * row.first.tolerance
    if cause not in ("unsynchronised buffers", "loss weighted per rank"):
        assert len(row.causes) == 1 and seen.strip() in row.causes[0][1], row.causes  # and nothing else is


USUAL = ("right_by_hand", "right_two_optimizers")


@pytest.mark.full(but=USUAL)
@pytest.mark.parametrize("name", [*USUAL, *(name for name in RIGHT if name not in USUAL)])
def test_a_right_script_passes(tmp_path: Path, name: str) -> None:
    """On two ranks under ddp, or on one and two, under fsdp, too."""
    two = RIGHT[name][0] == "two"
    ranks = [2] if two else [1, 2]
    proof = _proved(tmp_path, name, layouts=["ddp"] if two else ["ddp", "fsdp"], ranks=ranks, updates=3)
    # What numpy draws for each sample cannot be made alike.
    assert proof.holds or (name == "right_generators" and proof.holds_in_part), "\n".join(
        t for r in proof.results for t in (show.line(r), *show.details(r))
    )
    assert {r.ranks for r in proof.results} == set(ranks)


SAME_STATE = "causes: the forward pass keeps state."
# The script and its arguments, how it is proved, the rows' verdicts, or "right" of rows that are equal to one process in any way,
# and words of what is said of them.
CASES: list[tuple[str, dict[str, Any], str, tuple[str, ...]]] = [
    ("late", {"updates": 3}, "DIFFERS", ("causes: different initial parameters.", "script.target.weight")),
    ("tasks apart", {"updates": 1}, "in part", ("draws for its whole batch (script.draws)",)),
    ("tasks", {"updates": 1}, "right", ()),
    ("starts_ranks", {}, "not possible", ("starts ranks itself",)),
    ("idle", {}, "failed", ("never called",)),
    # Padded batches whose steps speak to other ranks; and what padding adds is not tested where padding draws.
    ("gathered_lists", {"updates": 3}, "undecided", ()),
    ("padding_of_random_words", {"updates": 3}, IN_PART, ("what the padding itself adds",)),
    # What is apart only later is not the first cause.
    (
        "easy_of_a_batch",
        {"updates": 3},
        "DIFFERS",
        ("causes: an operation over the whole batch, the forward pass keeps state.", "first in update 0"),
    ),
    (
        "sharpness_of_a_rank",
        {"updates": 3},
        "DIFFERS",
        ("causes: an operation over the whole batch, parameters that drift apart.", "first in update 0"),
    ),
    # One process divides it, too, so that nothing differs; what the run warns of is said.
    ("divided_by_hand", {"accumulation": [3]}, IN_PART, ("divided by the 3 micro-batches",)),
    ("hooked module", {"updates": 3}, "right", ()),
    ("hooked callback apart", {"updates": 3}, "DIFFERS", ()),
    ("planned", {"updates": 3, "yours": True}, "right", ()),
    ("looking", {}, "right", ("Looks.on_train_step_end (AttributeError: ",)),
    ("evaluated", {"accumulation": [1, 2], "updates": 6}, "right", ()),
    *((f"lanes {what}", {"updates": 4}, "DIFFERS", (SAME_STATE, "the loop's kept")) for what in ("chains", "lanes")),
    ("shares again", {}, "DIFFERS", ("causes: samples that depend on the rank.", "has 48 samples, and 96 in one process")),
    ("shares once", {}, "right", ()),
    ("loose averaged", {}, "right", ()),
    ("loose alone", {}, "DIFFERS", ("update 0: the gradient heat is not the same on all ranks",)),
    ("moves class", {"accumulation": [2]}, "DIFFERS", (SAME_STATE, "Bank.calls moves with every micro-batch")),
    ("moves bank", {"accumulation": [2]}, "DIFFERS", (SAME_STATE, "bank moves with every micro-batch")),
    ("calls", {"accumulation": [1, 2]}, "agrees, DIFFERS", ("calls moves with every micro-batch",)),
    ("partly_nan", {}, "DIFFERS", ("causes: loss weighted per rank",)),
    ("repeated sampler", {"ranks": [4]}, "right", ()),
    ("repeated loader", {}, "right", ()),
    ("cast auto", {"updates": 1}, "right", ("gradient within 1e-05",)),
    ("cast pinned", {"updates": 1}, "right", ()),
    ("full", {"layouts": ["fsdp"], "float64": True}, "right", ("gradient within 1e-11",)),
    ("drawing", {"updates": 1}, "right", ("same random numbers",)),
    ("speaking", {"updates": 1}, IN_PART, ("not tested",)),
    ("paired", {"updates": 1}, IN_PART, ("not tested", "rand")),
    ("beside", {"accumulation": [1, 2]}, "agrees, not possible", ("another loader beside", "several in an update")),
    ("beside noisy", {}, "undecided", ("another loader beside", "it draws random numbers")),
    ("levels", {"updates": 1}, "right", ()),
    ("looked_at", {"updates": 1, "layouts": ["fsdp"], "sgd": True}, "right", ()),
    ("torchtnts", {"updates": 1, "layouts": ["fsdp"], "sgd": True}, "right", ()),
    # Two micro-batches of one rank are the same samples as one of each of two ranks, but not the same draws.
    ("right_auto", {"ranks": [1, 2], "accumulation": [1, 2]}, "right", ()),
    ("together_only", {"updates": 1, "layouts": ["ddp", "zero1"]}, "failed, failed", ("could not be computed", "not alone")),
    ("double", {"ranks": [1, 2]}, "bit-equal, agrees", ("in float64",)),
    ("in_two_parts", {"updates": 4}, "agrees", ("2 updates",)),
    ("momenta", {"updates": 3, "float64": True}, "right", ()),
    ("attention", {"layouts": ["pp=2"]}, "right", ()),
    ("own_options", {"updates": 1, "yours": True}, "agrees", ()),
    ("of_a_trainer", {"updates": 1, "yours": True}, "agrees", ()),
]
OFTEN = ("late", "tasks apart", "tasks", "starts_ranks", "idle")


@pytest.mark.parametrize(
    ("given", "how", "verdicts", "words"),
    [pytest.param(*case, id=case[0], marks=() if case[0] in OFTEN else pytest.mark.full) for case in CASES],
)
def test_what_is_said_of_a_script(tmp_path: Path, given: str, how: dict[str, Any], verdicts: str, words: tuple[str, ...]) -> None:
    proof = _proved(tmp_path, *given.split(), **how)
    said = [f"in {proof.dtype}", *proof.notes]
    for row in proof.results:
        said += [row.message, f"{row.updates} updates", f"first in update {row.first.update if row.first is not None else None}"]
        said += [f"causes: {', '.join(cause for cause, _ in row.causes)}.", *(seen for _, seen in row.causes)]
        said += [f"gradient within {limit}" for limit in (1e-5, 1e-11) if row.gradient is not None and row.gradient < limit]
    if verdicts == "right":
        assert all(row.is_equal and not row.notes for row in proof.results), [show.details(row) for row in proof.results]
    else:
        assert ", ".join(row.verdict for row in proof.results) == verdicts, [show.details(row) for row in proof.results]
    assert [word for word in words if not any(word in text for text in said)] == [], said


def test_bf16_is_compared_with_one_process_in_bf16(tmp_path: Path) -> None:
    """A right script agrees under every kind of layout; a weight of a rank's own differs there, too."""
    rows = [row for row in matrix(["fsdp"], [1, 2], [1], sgd=False, bf16=True) if row.precision]
    assert [row.label for row in rows] == ["none, bf16", "fsdp, bf16"]
    right, wrong = (
        prove_target(Target(script=script(tmp_path, name)), rows[1:], 2, False).results
        for name in ("right_auto", "weight_of_a_rank")
    )
    assert right[0].is_equal and right[0].verdict != IN_FLOAT64, right
    assert wrong[0].verdict == "DIFFERS" and wrong[0].first is not None and wrong[0].first.tolerance > 1e-3, wrong


@pytest.mark.full
def test_an_own_loop_of_several_optimizers_is_compared_without_accumulation_and_with_its_own_optimizers(tmp_path: Path) -> None:
    proof = _proved(tmp_path, "two_networks", sgd=True, yours=True, float64=True)
    assert [result.verdict for result in proof.results] == ["not possible", "agrees"], proof.results
    assert "with several optimizers and accumulation" in proof.results[0].message


@pytest.mark.full
def test_a_script_that_resumes_is_proved_from_its_beginning(tmp_path: Path) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    command = [sys.executable, script(tmp_path, "resumed"), checkpoints]
    forked.run(command, cwd=tmp_path, env=clean_environment(), check=True, capture_output=True)
    assert list((tmp_path / "checkpoints").glob("step-*"))
    proof = _proved(tmp_path, "resumed", checkpoints, float64=True)
    assert [result.verdict for result in proof.results] == ["agrees"], proof.results


@pytest.mark.full
def test_an_uneven_last_batch_is_compared_in_stages_too(tmp_path: Path) -> None:
    """Of its ten samples a rank has three and then two."""
    rows = [row for row in matrix(None, [4], [2], sgd=False) if row.label.startswith("fsdp x pp")]
    results = prove_target(Target(script=script(tmp_path, "right_auto")), rows, 3, False).results
    assert results and {(row.verdict, row.updates) for row in results} == {("agrees", 3)}, results


@pytest.mark.full
def test_float64_has_the_last_word_where_rounding_flips_gates(tmp_path: Path) -> None:
    """Both rows are far apart in float32, by more than the mistake in one of them."""
    (right,) = _proved(tmp_path, "right_gates").results
    assert right.verdict == IN_FLOAT64 and "float32: update" in right.message and not right.undetermined, right
    (wrong,) = _proved(tmp_path, "behind_gates").results
    assert wrong.verdict == "DIFFERS" and wrong.first is not None and wrong.first.tensor == "3.1.bias", wrong
    assert wrong.first.relative == pytest.approx(0.02, rel=1e-3)


@pytest.mark.full
def test_a_proof_leaves_the_checkpoints_of_a_lightning_run_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (row,) = _proved(tmp_path, "saving", str(folder)).results
    assert row.is_equal and not list(folder.iterdir()), (show.details(row), list(folder.iterdir()))


@pytest.mark.full
def test_options_after_the_script_are_its_own_and_what_it_said_of_them_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    monkeypatch.chdir(tmp_path)
    assert main(["prove", "train.py", "--ranks", "2"]) == NOTHING_COMPARED
    said = capsys.readouterr().out
    assert "unrecognized arguments: --ranks 2" in said and "stand before the script" in said, said


def test_rows_on_the_same_samples_share_a_reference(tmp_path: Path) -> None:
    proof = _proved(tmp_path, "counted", ranks=[2, 4], accumulation=[1, 2])
    assert len(proof.results) == 3 and all(row.is_equal for row in proof.results), proof.results
    processes = (tmp_path / "counted.log").read_text().splitlines()
    assert len(processes) == 3, processes  # in float32, in float64, and to read the samples


@pytest.mark.full
def test_draws_that_depend_on_the_precision_do_not_widen_the_tolerance(tmp_path: Path) -> None:
    (row,) = _proved(tmp_path, "noise", updates=1).results
    assert row.verdict == "DIFFERS" and row.first is not None and row.first.tolerance < 1e-5, row


@pytest.mark.full
@pytest.mark.parametrize(("made", "half"), [("cast", "bfloat16"), ("made", "bfloat16"), ("cast", "float16")])
def test_parameters_in_half_precision_are_compared_in_float64(tmp_path: Path, made: str, half: str) -> None:
    for how, verdict in (("right", by_float64(half)), ("wrong", "DIFFERS")):
        (row,) = _proved(tmp_path, "half", how, made, half).results
        assert row.verdict == verdict, row
    assert row.first is not None and row.first.relative == pytest.approx(0.01, rel=1e-3), row


@pytest.mark.full
def test_a_loss_that_is_nan_in_one_process_too_is_no_measure_and_json_has_no_nan(tmp_path: Path) -> None:
    proof = _proved(tmp_path, "lost", updates=1)
    (row,) = proof.results
    assert row.verdict == "failed" and "the loss is inf or nan in update 0" in row.message
    row.loss, row.first = float("nan"), Difference(0, "forward", "loss", float("inf"), 0.0)
    text = json.dumps(proof.to_json(), allow_nan=False)
    assert json.loads(text)["rows"][0]["first"]["relative"] is None


@pytest.mark.full
def test_a_row_that_hangs_is_stopped_and_every_ranks_own_line_is_shown(tmp_path: Path) -> None:
    target = Target(script=script(tmp_path, "hanging"))
    (row,) = prove_target(target, matrix(["ddp"], [2], [1], sgd=False), 1, False, timeout_s=10, logs=tmp_path / "logs").results
    assert row.verdict == "failed" and "had not finished after 10 s" in row.message
    shown = "\n".join(show.details(row))
    assert "hanging.py" in shown and "line 10 in compute_loss" in shown and "site-packages" not in shown
    assert any((tmp_path / "logs").rglob("rank1.log"))


def test_a_strategy_that_is_only_named_has_the_options_of_the_scripts_own() -> None:
    ddp, blocks = ech.DDPStrategy(find_unused_parameters=True), ech.FSDPStrategy(blocks=["a"], mixed_precision=object())
    assert with_options_of(ddp, ech.DDPStrategy()) == ddp
    assert with_options_of(ddp, ech.DDPStrategy(shard_optimizer=True)) == ddp.but(shard_optimizer=True)
    assert with_options_of(ddp.but(shard_optimizer=True), ech.DDPStrategy()) == ddp
    assert with_options_of(blocks, ech.FSDPStrategy()) == blocks
    assert with_options_of(blocks, ech.FSDPStrategy(reshard_after_forward=False)) == blocks.but(reshard_after_forward=False)
    assert with_options_of(blocks.but(reshard_after_forward=False), ech.FSDPStrategy()) == blocks
    assert with_options_of(ddp, ech.FSDPStrategy()) == ech.FSDPStrategy()


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
    return Text(module=Attention(), layout="ddp")


def _tokens() -> ech.Loader:
    return ech.Loader(list(torch.randint(0, 16, (64, 12), generator=torch.Generator().manual_seed(0))), 16)


@pytest.mark.full
def test_parameters_without_a_gradient_are_said_and_not_failed() -> None:
    proof = ech.prove(_text, _tokens, layouts=["ddp"], ranks=[2], accumulation=[1, 2], updates=10, sgd=False)
    assert proof.holds, [show.details(r) for r in proof.results]
    undetermined = {name for r in proof.results for name in r.undetermined}
    assert undetermined == {"attend.in_proj_bias"}  # a third of it: the keys' part
    assert all(r.undetermined["attend.in_proj_bias"] <= 8 for r in proof.results if r.undetermined)
    assert any("true gradient of zero" in line for line in show.summary(proof))


@pytest.mark.full
@pytest.mark.parametrize(("asked", "compared"), [(3, [3, 2, 2]), (5, [5, 5, 5])])
def test_rows_that_differ_little_compare_fewer_updates_unless_an_epoch_ends(asked: int, compared: list[int]) -> None:
    proof = ech.prove(_text, _tokens, layouts=["ddp"], ranks=[2], accumulation=[1, 2], updates=asked)
    assert proof.holds and [r.updates for r in proof.results] == compared, proof.results
    assert any("for 2 updates" in note for note in proof.notes) == (asked == 3), proof.notes


@pytest.mark.full
def test_in_float64_nothing_is_undetermined() -> None:
    proof = ech.prove(_text, _tokens, layouts=["fsdp"], ranks=[2], accumulation=[1], updates=5, float64=True)
    assert proof.holds and proof.dtype == "float64"
    assert not any(r.undetermined for r in proof.results)
    assert all(r.parameter is not None and r.parameter < 1e-10 for r in proof.results)


@pytest.mark.full
def test_a_strategy_that_refuses_the_model_is_shown_and_does_not_fail_the_rest() -> None:
    layouts = {"ddp": "ddp", "fsdp": ech.FSDPStrategy(blocks=["no.such.block"])}
    proof = ech.prove(_text, _tokens, layouts=layouts, ranks=[2], accumulation=[1], updates=1, sgd=False)
    assert [r.verdict for r in proof.results] == ["agrees", "not possible"]
    assert "no.such.block" in proof.results[1].message and proof.holds


@pytest.mark.full
def test_a_script_that_crashes_is_shown_with_its_own_line_and_not_run_under_every_strategy(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("import torch\nraise RuntimeError('the disk is full')\n")
    rows = matrix(None, [1, 2], [1, 2], sgd=True, yours=True)
    proof = prove_target(Target(script=str(tmp_path / "crash.py")), rows, 1, False)
    assert [(r.yours, r.ranks, r.verdict) for r in proof.results] == [(True, 2, "failed"), (False, 1, "failed")]
    assert proof.exit_code == NOTHING_COMPARED and "rows were left out" in proof.notes[0]
    ((_, text),) = show.blocks(proof.results)
    assert any("crash.py" in line for line in text) and text[-2].endswith("RuntimeError: the disk is full"), text
    assert not any("echelon/" in line for line in text if "File" in line), text


@pytest.mark.full
@pytest.mark.parametrize(
    ("own", "rows", "code"),
    [
        ("ddp", [("ddp", 2, True, False), ("fsdp", 2, False, True)], OTHERS_DIFFER),
        ("fsdp", [("fsdp", 2, True, True), ("ddp", 2, False, False)], YOURS_DIFFERS),
        ("none", [("none", 1, True, False), ("ddp", 2, False, False), ("fsdp", 2, False, True)], OTHERS_DIFFER),
    ],
)
def test_the_scripts_own_configuration_is_first_and_the_exit_code_says_whether_it_differs(
    tmp_path: Path, own: str, rows: list[tuple[str, int, bool, bool]], code: int
) -> None:
    proof = _proved(tmp_path, "one_kind", own, layouts=["ddp", "fsdp"], updates=1, yours=True)
    assert [(r.label, r.ranks, r.yours, r.verdict == "DIFFERS") for r in proof.results] == rows
    assert proof.exit_code == proof.to_json()["exit_code"] == code


def test_rows_of_which_the_same_is_to_be_said_are_one_block_and_the_conclusion_counts_all() -> None:
    def row(label: str, verdict: str, **more: Any) -> Result:
        return Result(label, 2, verdict, **more)

    cause = [("a wrong scale", "the gradients are 2 times what they should be")]
    same = [row("ddp", "DIFFERS", causes=cause, yours=True), row("ddp, sgd", "DIFFERS", causes=cause)]
    ((named, text),) = show.blocks([*same, row("fsdp", "agrees")])
    assert named.startswith("ddp (yours) on 2; ddp, sgd on 2") and text.count("likely cause: a wrong scale") == 1
    for results, code, words in (
        (same, YOURS_DIFFERS, "own configuration (ddp) does not train"),
        ([row("ddp", "agrees", yours=True), row("cp", "DIFFERS")], OTHERS_DIFFER, "own configuration (ddp) trains as one"),
        ([row("ddp", "agrees"), row("cp", IN_PART)], NOT_ALL_TESTED, "1 agrees, 1 was compared in part"),
        ([row("ddp", "undecided", yours=True), row("cp", "agrees")], NOT_ALL_TESTED, "(ddp) was not compared"),
        ([row("ddp", "not possible", yours=True), row("cp", "agrees")], NOT_ALL_TESTED, "1 is not possible here"),
        ([row("ddp", "agrees", yours=True), row("cp", "not possible")], 0, "1 agrees, 1 is not possible here"),
        ([row("ddp", "failed"), row("cp", "failed")], NOTHING_COMPARED, "2 failed"),
        ([], NOTHING_COMPARED, "Nothing was compared."),
    ):
        proof = Proof("float32", results)
        assert proof.exit_code == code and words in show.conclusion(proof), (results, show.conclusion(proof))
    stopped = Proof("float32", [row("ddp", "agrees")], interrupted=True)
    assert not stopped.holds and show.conclusion(stopped).startswith("Interrupted")


@pytest.mark.full
def test_an_interrupt_shows_what_was_compared_and_leaves_no_process(tmp_path: Path) -> None:
    """The second row would wait for ever."""
    path = script(tmp_path, "hanging")
    Path(path).write_text(Path(path).read_text().replace(', layout="ddp"', ""))
    command = [sys.executable, "-m", "echelon", "prove", "--ranks", "2", "--layouts", "ddp", "--updates", "1", path]
    with subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        lines = iter(run.stdout.readline, "")
        assert any(line.startswith("none ") for line in lines)
        run.send_signal(signal.SIGINT)
        said = "".join(lines)
    assert run.returncode == 130 and "Interrupted" in said and "1 agrees" in said, said
    left = [p for p in psutil.process_iter(["cmdline"]) if path in " ".join(p.info["cmdline"] or ())]
    assert not left, left


@pytest.mark.full
def test_the_command_leaves_a_page_and_its_exit_code_says_it(
    echelon_command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb's exit code is the process's: a whole process is started for one of the four."""
    options = ["--layouts", "ddp", "--ranks", "2", "--accumulation", "1", "--no-sgd", "--updates", "2"]
    monkeypatch.chdir(tmp_path)
    right, mistaken = script(tmp_path, "right_auto"), script(tmp_path, "batch_norm")
    assert main(["prove", *options, "--json", right]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["verdict"] in ("agrees", "bit-equal")
    wrong: subprocess.CompletedProcess[str] = echelon_command("prove", *options, mistaken)
    assert wrong.returncode == 1 and "DIFFERS" in wrong.stdout and "likely cause: batch norm over the local batch" in wrong.stdout
    pages = [p.read_text() for p in sorted((tmp_path / "runs").glob("prove-*/prove.html"))]
    assert len(pages) == 2 and any("DIFFERS" in page for page in pages)
    assert main(["prove", "no_such.py"]) == 2
    (tmp_path / "half.py").write_text("import torch\nx = = 1\n")
    assert main(["prove", "half.py"]) == NOTHING_COMPARED and "line 2: invalid syntax" in capsys.readouterr().out
    assert main(["prove", "--runs", "half.py/runs", right]) == 2  # before any row
    assert main(["prove", "--ranks", "0", right]) == 2


def test_batches_are_joined_by_their_structure() -> None:
    a, b = {"x": torch.ones(2, 3), "n": [1, 2], "k": "same"}, {"x": torch.zeros(1, 3), "n": [3], "k": "same"}
    joined = join([a, b], [2, 1])
    assert joined["x"].shape == (3, 3) and joined["n"] == [1, 2, 3] and joined["k"] == "same"
    with pytest.raises(NotJoinable, match="shapes"):
        join([torch.ones(1, 2), torch.ones(1, 3)], [1, 1])
    with pytest.raises(NotJoinable, match="values"):
        join([(torch.ones(1), 1), (torch.ones(1), 2)], [1, 1])
    with pytest.raises(NotJoinable, match="other numbers"):
        join([(torch.ones(2, 4), torch.ones(3, 4))] * 2, [5, 5])
    assert digest(torch.ones(2, 2)) != digest(torch.ones(4)) != digest(torch.ones(4, dtype=torch.float64))
    # Of objects, whatever memory their tensors lie in; of sparse and nested tensors.
    one, same, other = (collections.deque([torch.full((3,), value)]) for value in (1.0, 1.0, 2.0))
    assert digest(one) == digest(same) != digest(other)
    assert digest(torch.eye(3).to_sparse()) == digest(torch.eye(3).to_sparse()) != digest(torch.ones(3, 3).to_sparse())
    nested = [torch.nested.nested_tensor([torch.ones(2), torch.ones(each)], layout=torch.jagged) for each in (3, 3, 4)]
    assert digest(nested[0]) == digest(nested[1]) != digest(nested[2])


BOXES = [torch.ones(n, 4) for n in (1, 3, 2)]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(3, 3, 8, 8), [{"boxes": boxes} for boxes in BOXES]),
        [{"image": torch.ones(3, 8, 8), "boxes": boxes} for boxes in BOXES],
        (tuple(torch.ones(3, 8, 8 + i) for i in range(3)), tuple({"boxes": boxes} for boxes in BOXES)),
        {"x": BOXES, "y": torch.arange(3), "names": ["a", "b", "c"], "split": "train"},
        defaultdict(list, x=torch.ones(3, 2), y=torch.arange(3)),
        [torch.ones(3, 4), torch.arange(3)],
        [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)],
        np.arange(6).reshape(3, 2),
    ],
    ids=["images and lists", "list of mappings", "zipped", "mapping", "with a default", "fields", "scalars", "array"],
)
def test_a_batch_is_what_its_samples_are_put_together(batch: Any) -> None:
    samples = Samples(batch, 3)
    assert samples.count == len(set(samples.checksums())) == 3 or not isinstance(batch, list)
    parts = [samples.part(0, 1), samples.part(1, 3)]
    assert digest(join(parts, [1, 2])) == digest(batch) and type(join(parts, [1, 2])) is type(batch)
    assert digest(on_host(batch)) == digest(batch) and type(on_host(batch)) is type(batch)
    with pytest.raises(NotDivisible):
        Samples({"x": torch.ones(2), "y": torch.ones(3)}, 5)


def test_random_numbers_are_those_of_float32_in_float64() -> None:
    """So that initial values, and the order of a shuffle after them, are the same."""

    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(3)
        layers = [nn.Linear(7, 5), nn.Embedding(9, 4), nn.GRU(3, 4), nn.Conv2d(2, 3, 3), nn.MultiheadAttention(8, 2)]
        nn.init.trunc_normal_(layers[0].weight)
        nn.init.orthogonal_(layers[1].weight)
        noise = [torch.randn(3, 4), torch.rand(3), torch.randn_like(layers[0].weight), torch.empty(4).exponential_()]
        chances = torch.full((9,), 0.5)
        choices = [
            torch.bernoulli(chances),
            torch.multinomial(chances, 3),
            nn.functional.dropout(torch.ones(40)),
            torch.randperm(9),
        ]
        return [*(p for layer in layers for p in layer.parameters()), *noise, *choices]

    single = drawn()
    torch.set_default_dtype(torch.float64)
    try:
        with without_narrow_casts():
            double = drawn()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(single, double, strict=True):
        assert other.dtype is (torch.float64 if one.is_floating_point() else one.dtype)
        assert torch.allclose(one.double(), other.double(), atol=1e-6)


def test_a_matrix_of_nothing_is_refused() -> None:
    with refused(ProveError):
        matrix(["ddp"], [], [1], sgd=True)
    with refused(LayoutError):
        matrix(["ddp", "nosuch"], [2], [1], sgd=True)
    labels = [(r.label, r.ranks) for r in matrix(["ddp", "hsdp"], [1, 2, 4], [1, 2], sgd=True)]
    assert ("ddp, accumulation 2", 2) in labels and ("hsdp", 4) in labels and ("hsdp", 2) not in labels
    assert ("ddp, sgd", 2) in labels and ("none", 1) in labels


# --- as the script runs: compiled, recomputed, in the precision that it asks for

OF_ITS_OWN = {
    "recomputed_with_other_dropout": "other random numbers in the backward pass",
    "clipping_before_unscaling": "gradients that are still scaled",
    "half_without_a_scaler": "gradients that underflow",
}


def _as_it_runs(folder: Path, name: str, *args: str, eager: bool = False) -> Proof:
    row = Row(YOURS, 2, yours=True, eager=eager)
    return prove_target(Target(script=script(folder, name), args=args), [row], 2, False)


@pytest.mark.full(but=("recomputed_with_other_dropout",))
@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_a_mistake_that_only_the_scripts_own_configuration_has_is_named(tmp_path: Path, name: str) -> None:
    (row,) = _as_it_runs(tmp_path, name).results
    assert row.verdict == "DIFFERS" and [cause for cause, _ in row.causes] == [OF_ITS_OWN[name]], show.details(row)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "args", "ran"),
    [
        ("right_compiled", ("bf16",), "ran compiled and in bf16"),
        ("right_compiled", ("budget", "inductor"), "ran compiled,"),
        ("right_compiled_adam", (), "ran compiled and in bf16"),
        ("half_without_a_scaler", ("right",), "ran in bf16"),
        ("clipping_before_unscaling", ("right",), "ran in fp16"),
    ],
)
def test_a_right_script_passes_as_it_runs(tmp_path: Path, name: str, args: tuple[str, ...], ran: str) -> None:
    proof = _as_it_runs(tmp_path, name, *args)
    (row,) = proof.results
    assert proof.holds and any(ran in note for note in proof.notes), [*show.details(row), *proof.notes]


@pytest.mark.full
def test_what_is_drawn_between_two_backward_passes_is_no_mistake(tmp_path: Path) -> None:
    proof = _as_it_runs(tmp_path, "two_passes_with_dropout")
    assert proof.holds, show.details(proof.results[0])


@pytest.mark.full
def test_compiled_code_that_no_row_ran_is_said(tmp_path: Path) -> None:
    """The mask of the backward pass is then the forward pass's, and the row agrees."""
    proof = _as_it_runs(tmp_path, "compiled_within_a_budget", eager=True)
    assert proof.holds and any("Compiled code was not tested" in note for note in proof.notes), proof


def test_the_scripts_own_configuration_comes_first() -> None:
    rows = matrix(["ddp"], [1, 2, 4], [1], sgd=False, yours=True)
    assert rows[0].yours and rows[0].ranks == 2 and not any(row.yours for row in rows[1:])
