"""Each kind of error has a code that stays, facts as fields, and a page that says what to do."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon import errors
from echelon.cli.main import main
from echelon.common.error_pages import PAGES, as_markdown, class_of
from echelon.common.errors import UsageError, require
from tests.conftest import clean_environment

KINDS = [kind for name in errors.__all__ if issubclass(kind := getattr(errors, name), errors.EchelonError)]
PAGE = Path(__file__).parents[2] / "docs/errors.md"


def test_each_kind_has_a_code_of_its_own_and_a_page() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes) and sorted(codes) == sorted(PAGES)
    assert [class_of(kind.code) for kind in KINDS] == KINDS
    assert PAGE.read_text() == as_markdown(), "write anew what as_markdown() gives"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_goes_to_another_process_with_its_code_and_fields(kind: type[Any]) -> None:
    more = {"rank": 1, "exit_code": 3} if issubclass(kind, errors.RankFailedError) else {"name": "ranks", "got": "0"}
    error = kind("a text", **more)
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), there.code, there.fields) == (kind, "a text", kind.code, more)
    assert vars(there) == vars(error)


class Unit(ech.AutoUnit[Any]):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        return self.module(data).mean(), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.1), None


class Shape(Unit):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        return self.module(data), None


class Logs(Unit):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        state.log("scores", torch.ones(10))
        return self.module(data).mean(), None


def _data() -> list[torch.Tensor]:
    return [torch.ones(2, 3)] * 2


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1))


RAISED: dict[str, Callable[[], Any]] = {
    "E-USAGE": lambda: ech.seed(-1),
    "E-ENVIRONMENT": lambda: ech.RankInfo.from_env({"RANK": "0"}),
    "E-LAYOUT": lambda: Unit(module=_net(), layout="fdsp"),
    "E-PRECISION": lambda: Unit(module=_net(), precision="bf8"),
    "E-LOOP": lambda: ech.train(Unit(module=_net()), _data()),
    "E-LOSS": lambda: ech.train(Shape(module=_net()), _data(), max_epochs=1),
    "E-UNIT": lambda: ech.train(_net(), _data(), max_epochs=1),  # type: ignore[arg-type]
    "E-OWN-LOOP": lambda: ech.window(_net()),
    "E-LAUNCH": lambda: ech.launch(print, ranks=0),
    "E-LOGGER": lambda: ech.train(Logs(module=_net()), _data(), max_epochs=1),
    "E-CALLBACK": lambda: ech.train(
        Unit(module=_net()), _data(), max_epochs=1, eval=_data(), callbacks=[ech.EarlyStopping("acc", mode="max", patience=2)]
    ),
    "E-CHECKPOINT-NOT-FOUND": lambda: ech.DistributedCheckpointSaver.restore("checkpoints/step-00000500", Unit(module=_net())),
}


@pytest.mark.parametrize("code", RAISED)
def test_the_example_of_a_page_is_what_is_raised(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.EchelonError) as caught:
        RAISED[code]()
    assert (caught.value.code, str(caught.value)) == (code, PAGES[code].example)


def test_a_refused_argument_has_its_facts() -> None:
    with pytest.raises(UsageError) as caught:
        require(False, "keep", "at least 1", 0, "Give 1.")
    assert caught.value.fields == {"name": "keep", "expected": "at least 1", "got": "0"}


def test_the_terminal_shows_the_page_of_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "E-LAYOUT"]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("LayoutError", PAGES["E-LAYOUT"].meaning, PAGES["E-LAYOUT"].remedy))


@pytest.mark.parametrize("launched", [True, False])
def test_an_uncaught_error_names_its_page(tmp_path: Path, forked_programs: None, launched: bool) -> None:
    (tmp_path / "t.py").write_text("import echelon as ech\nech.Loader([1, 2], 0)\n")
    command = [sys.executable, *(["-m", "echelon", "run", "--ranks", "1"] if launched else []), "t.py"]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 1 and done.stderr.count("`echelon explain E-LOADER`") == 1, done.stderr
