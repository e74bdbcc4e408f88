"""`--profile` traces the steps and ranks that it names and no others; `--memory-snapshot` says what it cannot do."""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.cli import traces
from echelon.common.errors import CommandError, LauncherEnvironmentError
from echelon.contracts.profile import MEMORY_VARIABLE, VARIABLE, Profile
from echelon.contracts.run_dir import RUN_DIR_VARIABLE, RunDir
from tests.conftest import Ranks
from tests.kit.models import batch
from tests.kit.refusals import refused
from tests.kit.slow_ranks import Batches, Fault, Net, Unit, run_folder, train
from tests.kit.started import Started
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("steps=10:12", Profile(10, 12)),
        ("steps=3", Profile(3, 3)),
        ("ranks=3+0,steps=1:1000", Profile(1, 1000, (0, 3))),
        ("steps=10:12,ranks=all", Profile(10, 12, None)),
    ],
)
def test_what_a_profile_names(text: str, wanted: Profile) -> None:
    assert Profile.parse(text) == wanted == Profile.parse(str(wanted))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "10:12",
            "ranks=0",
            "steps=",
            "steps=12:10",
            "steps=0:3",
            "steps=-1:3",
            "steps=1:1001",
            "steps=1:2:3",
            "steps=\u0661",
        ),
        *("steps=1,steps=2", "steps=1,ranks=", "steps=1,ranks=0+", "steps=1,ranks=-1", "steps=1,rank=0", "steps=1,"),
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with refused(CommandError):
        Profile.parse(text)


def test_a_rank_that_there_is_not_is_refused_before_anything_starts() -> None:
    def asked(profile: str) -> dict[str, str]:
        return traces.in_env(argparse.Namespace(profile=profile, memory_snapshot=True), 2)

    assert asked("steps=2") == {VARIABLE: "steps=2:2,ranks=0", MEMORY_VARIABLE: "1"}
    with refused(CommandError):
        asked("steps=2,ranks=0+2")


def _traced(folder: str, profile: str, own: bool) -> list[str]:
    """Train 6 steps; what this rank logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("echelon").addHandler(handler)
    os.environ |= {VARIABLE: profile, MEMORY_VARIABLE: "1"}
    try:
        train(folder, "", None, own=own, steps=6)
    finally:
        logging.getLogger("echelon").removeHandler(handler)
        del os.environ[VARIABLE], os.environ[MEMORY_VARIABLE]
    return said


def _steps(trace: Path) -> list[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted({event["name"] for event in events if event.get("name", "").startswith("step ")})


@pytest.mark.full
@pytest.mark.parametrize("own", [False, True])
def test_a_trace_has_the_steps_of_the_ranks_that_were_named(ranks: Ranks, tmp_path: Path, own: bool) -> None:
    run = run_folder(tmp_path)
    said = ranks(2, _traced, str(tmp_path), "steps=3:4,ranks=1", own)
    folder = run.profiles / "000"
    assert sorted(p.name for p in folder.iterdir()) == ["steps-3-4.rank1.json.gz", "steps-3-4.rank1.txt"]
    assert _steps(folder / "steps-3-4.rank1.json.gz") == ["step 3", "step 4"]
    table = (folder / "steps-3-4.rank1.txt").read_text()
    assert table.startswith("rank 1, steps 3 to 4\n") and "aten::addmm" in table
    assert not said[1] and len(said[0]) == 1 and "there is no GPU here: nothing is written" in said[0][0]


def test_a_short_end_is_kept(ranks: Ranks, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    (said,) = ranks(1, _traced, str(tmp_path), "steps=5:90", False)
    assert [text for text in said if text.startswith("--profile")] == []
    assert _steps(run.profiles / "000" / "steps-5-6.rank0.json.gz") == ["step 5", "step 6"]


def _own_epochs() -> None:
    model: Any = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = ech.prepare(model, optimizer, [batch(4, i) for i in range(2)], layout="none")
    for _ in range(3):
        for x, y in loader:
            with ech.window(model) as window:
                window.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()


def _calls_of_train() -> None:
    unit = Regression()
    for epochs in (1, 2, 3):
        ech.train(unit, [batch(4, i) for i in range(2)], max_epochs=epochs)


@pytest.mark.parametrize("trains", [_own_epochs, _calls_of_train])
def test_steps_of_a_later_epoch_are_traced_and_those_that_go_on_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trains: Callable[[], None]
) -> None:
    """Each epoch, or call, is a training of its own: six steps in three."""
    run = run_folder(tmp_path)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv(VARIABLE, "steps=4:5")
    trains()
    assert {path.name: _steps(path) for path in (run.profiles / "000").glob("*.gz")} == {
        "steps-4-4.rank0.json.gz": ["step 4"],
        "steps-5-5.rank0.json.gz": ["step 5"],
    }
    assert [r.getMessage() for r in caplog.records if "--profile" in r.getMessage()] == []


TRAINS = """
import echelon as ech
from tests.kit.models import batch
from tests.kit.units import Regression

unit = Regression()
for epochs in (1, 2):
    ech.train(unit, [batch(4, 0), batch(4, 1)], max_epochs=epochs)
print("trained", flush=True)
"""


def test_steps_that_do_not_come_are_said_once_when_the_process_ends(started: Started) -> None:
    profile = ("--ranks", "1", "--name", "r", "--profile", "steps=5")
    run = started.run(*profile, started.script(TRAINS), env={"PYTHONPATH": os.getcwd()}, stderr=subprocess.STDOUT)
    said = run.communicate(timeout=120)[0].decode()
    assert run.returncode == 0 and said.count("--profile") == 1, said
    told = said.index("--profile steps=5:5,ranks=0: training ended after step 4, so nothing is traced")
    assert told > said.index("trained\n")


def test_a_step_that_fails_is_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv(VARIABLE, "steps=2:5")

    class Failing(Unit):
        def compute_loss(self, state: ech.State, data: Any) -> Any:
            if self.train_progress.num_steps_completed == 2:
                raise ValueError
            return super().compute_loss(state, data)

    quiet = Fault("", tmp_path)
    with pytest.raises(ValueError):
        ech.train(Failing(module=Net(quiet)), Batches(9, quiet), max_epochs=1)
    (trace,) = (run.profiles / "000").glob("*.gz")
    assert _steps(trace) == ["step 2", "step 3"]


def test_a_trace_that_cannot_be_written_costs_the_trace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_folder(tmp_path)
    monkeypatch.setenv(VARIABLE, "steps=2")
    RunDir(tmp_path).profiles.symlink_to(tmp_path / "elsewhere")
    train(str(tmp_path), "", None, "none", steps=4)
    assert "the trace cannot be written" in caplog.text and not (tmp_path / "elsewhere").exists()


def test_a_bad_value_of_the_environment_is_blamed_on_its_variable() -> None:
    for text in ("x", "steps=0:1", "steps=1:9999"):
        with refused(LauncherEnvironmentError):
            Profile.from_env({"ECHELON_PROFILE": text})
