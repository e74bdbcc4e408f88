"""Loops of other libraries' users, before and after they were moved to `echelon.prepare`: the same numbers, and few lines."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import clean_environment
from tests.kit import forked

MOVED = Path(__file__).parents[1] / "moved"


NAMES = sorted(path.name.removesuffix("_before.py") for path in MOVED.glob("*_before.py"))

# What Fabric 2.6.6 printed, which the tests do not install.
OF_FABRIC = {"fabric_basic": 2.767175, "fabric_accumulation": 0.371992, "fabric_checkpoints": 2.860741}


def _printed(text: str) -> float:
    return float(re.findall(r"(?:loss|accuracy) ([\d.]+)$", text, re.MULTILINE)[-1])


def _alone(script: Path, folder: Path) -> float:
    with forked.instead_of_new():
        run = subprocess.run(
            [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=180, env=clean_environment()
        )
    assert run.returncode == 0, run.stderr
    return _printed(run.stdout)


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in NAMES[::4] else pytest.mark.full) for n in NAMES])
def test_it_trains_what_it_trained(
    name: str, tmp_path: Path, echelon_command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "a").mkdir()
    after = MOVED / f"{name}_after.py"
    wanted = OF_FABRIC.get(name) or _alone(MOVED / f"{name}_before.py", tmp_path / "a")
    (tmp_path / "b").mkdir()
    assert _alone(after, tmp_path / "b") == pytest.approx(wanted, abs=3e-6)
    run = echelon_command("run", "--ranks", "2", "--device", "cpu", str(after))
    assert run.returncode == 0, run.stderr
    assert _printed(run.stdout) == pytest.approx(wanted, abs=3e-6)
