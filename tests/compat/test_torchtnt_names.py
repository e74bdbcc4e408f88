"""What no public program uses of TorchTNT can be imported, and its use says what to take instead. decisions.md has the count."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from echelon.common.errors import NotHereError
from echelon.compat.torchtnt import absent
from tests.conftest import clean_environment

HERE = Path(__file__).parent
OURS = "echelon.compat.torchtnt"
NAMES = [(module, name) for module, (names, _) in absent.MODULES.items() for name in names.split() or ["anything"]] + [
    (module, name) for module, lost in absent.NAMES.items() for names in lost for name in names.split()
]


def _said(use: Any) -> str:
    with pytest.raises(NotHereError) as refused:
        use()
    return str(refused.value)


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_name_that_is_not_here_says_what_to_take(module: str, name: str) -> None:
    package = module.rpartition(".")[0]
    told = absent.instead(module, name) or absent.instead(module)
    assert (
        told
        and told.endswith((".", ")"))
        and _said(getattr(importlib.import_module(f"{OURS}.{module}"), name))
        == (f"torchtnt.{module}.{name} is not part of echelon.compat. Instead: {told}")
    )
    if absent.instead(module, name):  # TorchTNT's packages have what their modules have
        assert _said(getattr(importlib.import_module(f"{OURS}.{package}"), name)).endswith(told)


@pytest.mark.full
def test_the_core_knows_nothing_of_compat_whose_absent_modules_say_what_to_use() -> None:
    """import-linter holds the floors, of which compat is the highest. Of the names at the root only Trainer loads it.

    Absent modules also without their packages imported before; which are loaded then, since `import a.b.c as d` looks for c in b.
    """
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
    (floors,) = [contract for contract in project["contracts"] if contract["name"].startswith("Floors")]
    assert "echelon.compat" in floors["layers"][0].split(" | ") and "ignore_imports" not in floors
    code = (
        "import sys, echelon, echelon.loop.callbacks, echelon.observe.loggers, echelon.cli.main\n"
        "for name in {*echelon.__all__} - {'Trainer'}: getattr(echelon, name)\n"
        "print([name for name in sys.modules if name.startswith('echelon.compat')])\n"
        "import echelon.compat.torchtnt.framework.callbacks.torch_compile as there\n"
        "from echelon.compat.torchtnt.utils.misc import days_to_secs\n"
        "from echelon.compat.torchtnt.utils.nan import check_for_nan_or_inf\n"
        "for use in (there.TorchCompile, days_to_secs, check_for_nan_or_inf):\n"
        "    try:\n"
        "        use(1)\n"
        "    except Exception as error:\n"
        "        print(error.code, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=clean_environment())
    loaded, *said = done.stdout.splitlines()
    assert loaded == "[]" and said == [
        f"E-NOT-HERE torchtnt.{name} is not part of echelon.compat. Instead: {instead}"
        for name, instead in (
            (
                "framework.callbacks.torch_compile.TorchCompile",
                "a Callback of your own, of a few lines; or keep TorchTNT's file.",
            ),
            ("utils.misc.days_to_secs", "load_state_dict, and datetime.timedelta."),
            ("utils.nan.check_for_nan_or_inf", "torch.autograd.detect_anomaly, or AutoUnit(detect_anomaly=True)."),
        )
    ], done.stderr
