"""What FairScale has and compat has not: import lines work, and a use says what to take instead."""

from __future__ import annotations

import importlib

import pytest

from echelon.common.errors import UsageError
from echelon.compat import fairscale
from echelon.compat.fairscale.absent import ALIASES, INSTEAD


def test_import_lines_of_what_is_not_here_work_and_uses_say_what_to_take() -> None:
    for module in (*INSTEAD, "nn.pipe.balance", "nn.pipe.skip.layout", "utils.testing"):
        found = importlib.import_module(f"echelon.compat.fairscale.{module}").Something
        with pytest.raises(UsageError, match=rf"fairscale\.{module}\.Something is not part of echelon.compat. Instead: ."):
            found(1)
    for name, same in ALIASES.items():
        modules = [importlib.import_module(f"echelon.compat.fairscale.{each}") for each in (name, same)]
        assert modules[0] is modules[1]
    import echelon.compat.fairscale.nn.pipe.balance as balance

    assert balance.__name__.endswith("pipe.balance") and fairscale.__version__ == "0.4.13"
