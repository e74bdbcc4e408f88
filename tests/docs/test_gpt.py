"""The first thing a newcomer runs: examples/gpt.py by the real command, small."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GPT = str(Path(__file__).resolve().parents[2] / "examples" / "gpt.py")
Command = Callable[..., subprocess.CompletedProcess[str]]


def _records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _run(command: Command, folder: Path, *args: str, launcher: tuple[str, ...] = ("--ranks", "2")) -> tuple[Path, str]:
    done = command("run", *launcher, GPT, "--toy", *args)
    assert done.returncode == 0, done.stdout + done.stderr
    run = re.search(r"^run +(\S+)$", done.stderr, re.MULTILINE)
    assert run is not None, done.stderr
    return folder / run[1], done.stdout + done.stderr


def write_texts(folder: Path) -> None:
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"the number is {i}. " * 20)


@pytest.mark.full
def test_two_ranks_train_evaluate_sample_and_leave_everything_behind(echelon_command: Command, tmp_path: Path) -> None:
    run, text = _run(echelon_command, tmp_path, "--updates", "6", "--layout", "ddp")
    records = _records(run)
    training = [r for r in records if "loss" in r]
    assert [r["step"] for r in training] == [1, 2, 3, 4, 5, 6]
    assert all(r["loss"] > 0 and r["lr"] > 0 and r["grad_norm"] > 0 and r["tokens_per_s"] > 0 for r in training)
    assert [set(r) for r in records if "eval_loss" in r] == [{"step", "eval_loss", "time"}]
    assert training[0]["loss"] > training[-1]["loss"]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    assert {"run.json", "metrics.jsonl", "report.html", "attempts"} <= {p.name for p in run.iterdir()}
    attempt = {p.name for p in (run / "attempts" / "000").iterdir()}
    assert {"rank0.log", "rank1.log", "exit.json", "events.rank0.jsonl"} <= attempt
    assert "held-out loss" in text and "import os\n\n\ndef " in text and str(run.name) in text
    assert re.search(r"update \d+/6  loss \d\.\d+  lr \S+  \S+ tokens/s  \d:\d\d left", text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)  # without a terminal, no control characters


@pytest.mark.full
def test_the_strategies_train_the_same_model(echelon_command: Command, tmp_path: Path) -> None:
    losses = {}
    write_texts(tmp_path / "texts")
    for layout, ranks in (("none", "1"), ("ddp", "2"), ("fsdp", "2"), ("tp", "2")):
        options = ("--updates", "4", "--layout", layout, "--data", "texts")
        run, text = _run(echelon_command, tmp_path, *options, launcher=("--ranks", ranks))
        assert "held-out loss" in text
        losses[layout] = [r.get("loss", r.get("eval_loss")) for r in _records(run)]
    assert losses["ddp"] == pytest.approx(losses["none"], abs=2e-5)
    assert losses["fsdp"] == pytest.approx(losses["none"], abs=2e-5)
    assert losses["tp"] == pytest.approx(losses["none"], abs=2e-5)


@pytest.mark.full
def test_the_same_command_goes_on_as_if_nothing_had_happened(echelon_command: Command, tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    same = ("--data", "texts", "--layout", "ddp", "--updates", "6")
    named = ("--ranks", "2", "--name", "part")
    first, _ = _run(echelon_command, tmp_path, *same, launcher=named)
    want = [r["loss"] for r in _records(first) if "loss" in r][3:]
    # As if it had been stopped by a failure after update 3.
    (first / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    (first / "metrics.jsonl").unlink()
    again, text = _run(echelon_command, tmp_path, *same, launcher=named)
    assert again == first and "training from update 3" in text and len(want) == 3
    assert [r["loss"] for r in _records(again) if "loss" in r] == want
    longer, text = _run(echelon_command, tmp_path, *same[:-1], "8", launcher=("--ranks", "1", "--name", "part"))
    assert longer == first and "training from update 6" in text
    assert [p.name for p in sorted((longer / "attempts").iterdir())] == ["000", "001", "002"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "args", "message"),
    [
        ("3", (), "global_batch 8 cannot be divided by 3 ranks"),
        ("1", ("--layout", "zeppelin"), "layout must be one of 'none', 'ddp', 'fsdp'"),
        ("1", ("--data", "absent"), "folder must be a folder of text files"),
    ],
)
def test_bad_input_is_an_error_of_a_line_or_two(
    echelon_command: Command, tmp_path: Path, ranks: str, args: tuple[str, ...], message: str
) -> None:
    write_texts(tmp_path / "texts")
    done = echelon_command("run", "--ranks", ranks, GPT, "--toy", "--updates", "2", "--data", "texts", *args)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
