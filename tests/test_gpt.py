"""The first thing a newcomer runs: examples/gpt.py by the real command, small."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GPT = str(Path(__file__).resolve().parents[1] / "examples" / "gpt.py")
SMALL = ["--width", "32", "--depth", "2", "--context", "32", "--batch", "8", "--save-every", "4"]
Command = Callable[..., subprocess.CompletedProcess[str]]


def _records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _run(command: Command, folder: Path, *args: str, launcher: tuple[str, ...] = ("--ranks", "2")) -> tuple[Path, str]:
    done = command("run", *launcher, GPT, *SMALL, *args)
    assert done.returncode == 0, done.stdout + done.stderr
    run = re.search(r"^run +(\S+)$", done.stderr, re.MULTILINE)
    assert run is not None, done.stderr
    return folder / run[1], done.stdout + done.stderr


def write_texts(folder: Path) -> None:
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"the number is {i}. " * 20)


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_two_ranks_train_evaluate_sample_and_leave_everything_behind(
    echelon_command: Command, tmp_path: Path, layout: str
) -> None:
    run, text = _run(echelon_command, tmp_path, "--steps", "6", "--layout", layout)
    records = _records(run)
    training = [r for r in records if "loss" in r]
    assert [r["step"] for r in training] == [1, 2, 3, 4, 5, 6]
    assert all(r["loss"] > 0 and r["lr"] > 0 and r["grad_norm"] > 0 and r["tokens_per_s"] > 0 for r in training)
    assert [set(r) for r in records if "eval_loss" in r] == [{"step", "eval_loss", "time"}]
    assert training[0]["loss"] > training[-1]["loss"]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    assert {"run.json", "metrics.jsonl", "report.html", "attempts"} <= {p.name for p in run.iterdir()}
    attempt = {p.name for p in (run / "attempts" / "000").iterdir()}
    assert {"rank0.log", "rank1.log", "exit.json", "events.rank0.jsonl"} <= attempt
    assert "held-out loss" in text and "a continuation of" in text and str(run.name) in text
    assert re.search(r"update \d+/6  loss \d\.\d+  lr \S+  \S+ tokens/s  \d:\d\d left", text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)  # without a terminal, no control characters


@pytest.mark.full
def test_the_strategies_train_the_same_model(echelon_command: Command, tmp_path: Path) -> None:
    losses = {}
    write_texts(tmp_path / "texts")
    for layout, ranks in (("none", "1"), ("ddp", "2"), ("fsdp", "2"), ("tp", "2")):
        # Two heads, one for each rank of "tp".
        options = ("--steps", "4", "--width", "128", "--layout", layout, "--data", "texts")
        run, _ = _run(echelon_command, tmp_path, *options, launcher=("--ranks", ranks))
        losses[layout] = [r.get("loss", r.get("eval_loss")) for r in _records(run)]
    assert losses["ddp"] == pytest.approx(losses["none"], abs=2e-5)
    assert losses["fsdp"] == pytest.approx(losses["none"], abs=2e-5)
    assert losses["tp"] == pytest.approx(losses["none"], abs=2e-5)


@pytest.mark.full
def test_resume_goes_on_as_if_nothing_had_happened(echelon_command: Command, tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    same = ("--data", "texts", "--layout", "ddp")
    whole, _ = _run(echelon_command, tmp_path, *same, "--steps", "6", launcher=("--ranks", "2", "--runs", "whole"))
    # The schedule depends on the number of steps: the first part is the same run, stopped by a failure after step 4.
    first, _ = _run(echelon_command, tmp_path, *same, "--steps", "6", launcher=("--ranks", "2", "--name", "gpt-part"))
    (first / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    resumed, text = _run(echelon_command, tmp_path, *same, "--steps", "6", "--resume")
    assert resumed != first and "training from update 4" in text
    want = [r["loss"] for r in _records(whole) if "loss" in r][4:]
    assert [r["loss"] for r in _records(resumed) if "loss" in r] == want
    one_rank = ("--ranks", "1", "--name", resumed.name)
    again, text = _run(echelon_command, tmp_path, *same, "--steps", "8", "--resume", launcher=one_rank)
    assert again == resumed and "training from update 6" in text
    assert [p.name for p in sorted((again / "attempts").iterdir())] == ["000", "001"]


@pytest.mark.full
def test_ones_own_text_is_learnt(echelon_command: Command, tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    run, text = _run(echelon_command, tmp_path, "--steps", "4", "--data", "texts")
    assert "(0.0 MB of text)" in text and len([r for r in _records(run) if "loss" in r]) == 4


@pytest.mark.parametrize(
    ("ranks", "args", "message"),
    [
        ("2", ("--batch", "7"), "global_batch 7 cannot be divided by 2 ranks"),
        ("1", ("--resume", "--layout", "none"), "no run of this script with a checkpoint"),
        pytest.param("1", ("--layout", "zeppelin"), "layout must be one of 'none', 'ddp', 'fsdp'", marks=pytest.mark.full),
        pytest.param("1", ("--data", "absent"), "folder must be a folder of text files, got absent", marks=pytest.mark.full),
        pytest.param("1", ("--batch", "10000000"), "at least one global batch of 10000000", marks=pytest.mark.full),
    ],
)
def test_bad_input_is_an_error_of_a_line_or_two(
    echelon_command: Command, tmp_path: Path, ranks: str, args: tuple[str, ...], message: str
) -> None:
    write_texts(tmp_path / "texts")
    done = echelon_command("run", "--ranks", ranks, GPT, *SMALL, "--steps", "2", "--data", "texts", *args)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
