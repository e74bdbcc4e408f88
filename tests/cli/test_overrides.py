"""What a launcher decides over a script's head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import echelon as ech
from echelon.common.errors import UsageError
from echelon.contracts.overrides import VARIABLE, Overrides, impose, overrides
from tests.kit.models import batch
from tests.kit.units import Regression


def test_the_environment_carries_what_is_set_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overrides() == Overrides()
    given = Overrides(layout="ddp", accumulation=2, compile=False)
    for name, value in given.to_env().items():
        monkeypatch.setenv(name, value)
    assert overrides() == given


@pytest.mark.parametrize("text", ["[", "[1]", "5", '{"stategy": "ddp"}', '{"parts": "4"}', '{"compile": 1}', "[" * 99999])
def test_a_variable_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match=VARIABLE):
        overrides()


def test_unit_and_loader_follow() -> None:
    impose(Overrides(layout="none", precision="bf16", accumulation=2, compile=False))
    try:
        unit = Regression(layout="fsdp", compile=ech.layouts.TorchCompileParams(backend="no such backend"))
        loader = ech.Loader(list(range(8)), 4)
    finally:
        impose(None)
    assert type(unit.prepared) is ech.layouts.Prepared
    assert unit.precision.dtype is not None and unit.gradient_accumulation_steps == loader.accumulation == 2
    ech.train(unit, [batch(4, 0)] * 2, max_epochs=1)


@pytest.mark.full
@pytest.mark.parametrize("option", ["--layout", "--strategy"])
def test_a_layout_of_the_command_line_takes_the_place_of_the_scripts(
    echelon_command: Callable[..., Any], tmp_path: Path, option: str
) -> None:
    (tmp_path / "train.py").write_text(
        "import echelon as ech\nfrom echelon.loop.checkpointing.changes import facts\nfrom tests.kit.units import Regression\n"
        "ech.init_from_env()\nunit = Regression(layout='none')\n"
        "print('made', type(unit.prepared).__name__, 'manifest', facts(unit, None)['layout'])\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = echelon_command("run", "--ranks", "1", option, "zero3", "train.py", env={"PYTHONPATH": root})
    assert done.returncode == 0 and "made FSDPPrepared manifest fsdp" in done.stdout, done.stderr
    wrong = echelon_command("run", "--ranks", "1", option, "fdsp", "train.py", env={"PYTHONPATH": root})
    assert wrong.returncode != 0 and "got 'fdsp'. Is it 'fsdp'?" in wrong.stderr
