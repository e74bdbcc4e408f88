"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import clean_environment

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SCRIPT, RESUMED, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("command", [["python"], ["echelon", "run", "--ranks", "2"], ["torchrun", "--nproc-per-node", "2"]])
def test_the_training_script_runs_under_each_launcher(tmp_path: Path, command: list[str]) -> None:
    # torchrun's ranks share one pipe, in which their lines may run together: each leaves its word in a file of its own.
    report = (
        "rank = ech.launching.World.current()\nopen(f'rank{rank.rank}', 'w').write(f'{unit.window.updates} of {rank.size}')\n"
    )
    (tmp_path / "train.py").write_text(f"{SCRIPT}\n{report}")
    start = {"python": [], "echelon": ["-m", "echelon"], "torchrun": ["-m", "torch.distributed.run"]}[command[0]]
    run = subprocess.run if command == ["python"] else forked.run
    done = run(
        [sys.executable, *start, *command[1:], "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    size = 1 if command[0] == "python" else 2
    assert [path.read_text() for path in sorted(tmp_path.glob("rank*"))] == [f"128 of {size}"] * size


def test_the_lines_that_make_a_run_go_on_do(
    tmp_path: Path, echelon_command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The run is broken off after its first epoch; the second time it goes on from there."""
    definitions = SCRIPT[: SCRIPT.index("ech.train(")]
    stop = "unit.on_train_epoch_end = lambda state: state.stop() if unit.train_progress.num_epochs_completed == 1 else None\n"
    began = "unit.on_train_start = lambda state: print('begins at', unit.train_progress.num_updates_completed)\n"
    (tmp_path / "train.py").write_text(definitions + stop + began + RESUMED)
    for update in (0, 64):
        done = echelon_command("run", "--ranks", "2", "train.py")
        assert done.returncode == 0, done.stderr
        assert f"begins at {update}" in done.stdout
    assert [p.name for p in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["step-00000064", "step-00000128"]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w./]+)\)", README))))
def test_every_link_leads_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_example_option_exists(echelon_command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    text = forked.run(
        [sys.executable, str(ROOT / "examples" / "gpt.py"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    shown = set(re.findall(r"gpt\.py (--[a-z-]+)", README))
    assert shown and all(option in text for option in shown)
