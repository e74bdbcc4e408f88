"""`make gpu` without a GPU: its reduced form runs every part to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu.llama import SIZES, Llama, flops_per_token
from bench.gpu.parts import PARTS
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import clean_environment
from tests.kit import forked

ROOT = Path(__file__).resolve().parents[2]


def start(tmp_path: Path, *args: str) -> Any:
    environment = {**clean_environment(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--out", str(tmp_path / "results.json"), *args]
    return forked.popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def results(tmp_path: Path) -> list[dict[str, Any]]:
    return json.loads((tmp_path / "results.json").read_text())["results"]  # type: ignore[no-any-return]


# What needs no launcher of its own, and no compiler.
QUICK = ("loop", "saves", "model: plain", "model: memory")
OTHERS = tuple(part.name for part in PARTS[1:] if not part.name.startswith(QUICK))


@pytest.mark.full
@pytest.mark.parametrize("only", [QUICK, OTHERS], ids=["quick", "others"])
def test_the_reduced_form_runs_every_part_to_its_end(tmp_path: Path, only: tuple[str, ...]) -> None:
    day = start(tmp_path, "--only", *only)
    shown, _ = day.communicate(timeout=300)
    assert day.returncode == 0, shown
    found = results(tmp_path)
    assert {row["part"] for row in found} == {part.name for part in PARTS if part is PARTS[0] or part.name.startswith(only)}
    assert [row for row in found if row["status"] == "failed"] == []
    facts = json.loads((tmp_path / "results.json").read_text())
    assert facts["command"].startswith('make gpu ARGS="--device cpu ')
    assert facts["commit"] and facts["date"] and facts["took_s"] > 0


@pytest.mark.full
def test_parameters_and_flops_of_the_model_are_those_that_torch_counts() -> None:
    for size in SIZES.values():
        with torch.device("meta"):
            module = Llama(size)
        assert sum(p.numel() for p in module.parameters()) == size.parameters
    size = SIZES["tiny"]
    tokens = torch.zeros(2, size.context, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        Llama(size)(tokens, tokens).backward()
    attention = 12 * size.depth * size.width * size.context  # of which torch counts nothing on a CPU
    assert counted.get_flop_counts()["Global"][torch.ops.aten.mm] == (flops_per_token(size) - attention) * tokens.numel()
