"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import clean_environment
from tests.kit import forked

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
LOOP, UNIT, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
# How many updates each has made, in the end.
MADE = {LOOP: "window.update + 1", UNIT: "unit.train_progress.num_updates_completed"}


@pytest.mark.full(but=("command2-loop",))
@pytest.mark.parametrize("script", [LOOP, UNIT], ids=["loop", "unit"])
@pytest.mark.parametrize("command", [["python"], ["echelon", "run", "--ranks", "2"], ["torchrun", "--nproc-per-node", "2"]])
def test_the_scripts_run_under_each_launcher(tmp_path: Path, command: list[str], script: str) -> None:
    # torchrun's ranks share one pipe, in which their lines may run together: each leaves its word in a file of its own.
    report = f"open(f'rank{{ech.rank()}}', 'w').write(f'{{{MADE[script]}}} of {{ech.world_size()}}')\n"
    (tmp_path / "train.py").write_text(f"{script}\n{report}")
    start = {"python": [], "echelon": ["-m", "echelon"], "torchrun": ["-m", "torch.distributed.run"]}[command[0]]
    run = subprocess.run if command == ["python"] else forked.run
    done = run(
        [sys.executable, *start, *command[1:], "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    size = 1 if command[0] == "python" else 2
    assert [path.read_text() for path in sorted(tmp_path.glob("rank*"))] == [f"128 of {size}"] * size


@pytest.mark.full
@pytest.mark.parametrize("script", [LOOP, UNIT], ids=["loop", "unit"])
def test_they_go_on_when_they_are_started_again(
    tmp_path: Path, echelon_command: Callable[..., subprocess.CompletedProcess[str]], script: str
) -> None:
    """One epoch, and then the run as it is shown, from the folder that it names."""
    for first, epochs in (("0 of 64", "1"), ("64 of 128", "2")):
        (tmp_path / "train.py").write_text(
            script.replace("(loader, 2)", f"(loader, {epochs})").replace("_epochs=2", f"_epochs={epochs}")
        )
        done = echelon_command("run", "--ranks", "2", "train.py")
        assert done.returncode == 0 and f"training from update {first}" in done.stderr + done.stdout, done.stderr + done.stdout
    assert sorted(p.name for p in tmp_path.glob("*/step-*"))[-1] == "step-00000128"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w./]+)\)", README))))
def test_every_link_leads_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_example_option_exists(echelon_command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    text = forked.run(
        [sys.executable, str(ROOT / "examples" / "gpt.py"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    shown = set(re.findall(r"gpt\.py (--[a-z-]+)", README))
    assert shown and all(option in text for option in shown)
