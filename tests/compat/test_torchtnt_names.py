"""What no public program uses of TorchTNT can be imported, and its use says what to take instead. decisions.md has the count."""

from __future__ import annotations

import importlib
import subprocess
import sys
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
    """Of the names at the root only Trainer loads it. Absent modules also without their packages imported before; which are
    loaded then, since `import a.b.c as d` looks for c in b.
    """
    code = (
        "import sys, echelon, echelon.callbacks, echelon.observe.loggers, echelon.cli.main\n"
        "for name in {*echelon.__all__} - {'Trainer'}: getattr(echelon, name)\n"
        "print([name for name in sys.modules if name.startswith('echelon.compat')])\n"
        "import echelon.compat.torchtnt.framework.callbacks.torch_compile as there\n"
        "try: there.TorchCompile(1)\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=clean_environment())
    loaded, said = done.stdout.splitlines()
    assert loaded == "[]" and "TorchCompile is not part of echelon.compat. Instead: " in said, done.stderr
