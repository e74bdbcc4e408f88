"""`--device`, and what is chosen without it where there are fewer GPUs than ranks."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.cli import prove as prove_command
from echelon.cli import run, submit
from echelon.errors import ScriptError
from echelon.launcher.job import auto_ranks
from echelon.loop.target import Target
from echelon.prover import prove
from echelon.prover.matrix import matrix
from echelon.prover.proof import Proof
from tests.kit.refusals import refused


def _parsed(command: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_every_command_that_starts_ranks_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (run, submit, prove_command):
        assert _parsed(command, "--device", "cpu", "train.py").device == "cpu"
        assert _parsed(command, "train.py").device is None
    assert submit.job_spec(_parsed(submit, "--device", "cpu", "train.py"), "train.py").env == {"ECHELON_DEVICE": "cpu"}
    monkeypatch.delenv("ECHELON_DEVICE", raising=False)
    monkeypatch.setitem(os.environ, "ECHELON_DEVICE", "cuda")  # what `execute` sets goes with the test
    with refused(ScriptError):
        run.execute(_parsed(run, "--device", "cpu", "--ranks", "1", "no-such-script.py"))
    assert os.environ["ECHELON_DEVICE"] == "cpu"


def test_auto_counts_cores_where_ranks_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.launcher.job.visible_devices", lambda: ["0"] * 1000)
    assert auto_ranks() == 1000
    monkeypatch.setenv("ECHELON_DEVICE", "cpu")
    assert auto_ranks() < 1000


@pytest.mark.parametrize(("gpus", "asked", "want"), [(1, None, "cpu"), (4, None, None), (0, None, None), (1, "cuda", "cuda")])
def test_prove_takes_the_cpu_if_there_are_fewer_gpus_than_ranks(
    monkeypatch: pytest.MonkeyPatch, gpus: int, asked: str | None, want: str | None
) -> None:
    seen: list[str | None] = []

    class Proving:
        def __init__(self, target: Target, *_: Any) -> None:
            seen.append(target.device)
            self.proof = Proof("float32")

        def results(self, rows: Any) -> list[Any]:
            return []

    monkeypatch.setattr(prove, "Proving", Proving)
    monkeypatch.setattr(prove, "visible_devices", lambda: [str(i) for i in range(gpus)])
    made = prove.prove_target(Target(script="x.py", device=asked), matrix(["ddp"], (1, 2, 4), (1,), sgd=False), 1, False)
    assert seen == [want]
    assert [note.startswith("4 ranks have 1 GPU here: everything ran on the CPU.") for note in made.notes] == [True] * (
        want == "cpu"
    )


def test_a_target_says_its_device_before_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_DEVICE", "cuda")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "script.py"
    script.write_text("import os\nassert os.environ['ECHELON_DEVICE'] == 'cpu'\n")
    Target(script=str(script), device="cpu").run()
