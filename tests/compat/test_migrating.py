"""What differs from other libraries (docs/moving): rows as programs, and import lines.

The rows of Lightning and of Hugging Face have tests in their own files.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from echelon.common.errors import UsageError
from echelon.compat import fairscale
from echelon.compat.fairscale.absent import ALIASES, INSTEAD
from tests.compat import migrating_rows
from tests.compat.migrating_rows import ALONE, TOGETHER
from tests.conftest import Ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [DOCS / name for name in ("moving/fairscale.md", "moving/torchtnt.md", "moving/nntool.md", "dragon.md")]


@pytest.mark.full
def test_rows_as_programs_in_one_process() -> None:
    assert migrating_rows.failures(ALONE) == []


@pytest.mark.full
@pytest.mark.standing_ranks
def test_rows_as_programs_on_two_ranks(ranks: Ranks) -> None:
    assert ranks(2, migrating_rows.failures, TOGETHER) == [[], []]


def test_import_lines() -> None:
    """Every import in a table, the old ones with the name changed; and what "..." stands for is left out."""
    lines = [line for page in PAGES for line in page.read_text().splitlines() if line.startswith("| ")]
    tried = 0
    for _, module, _, names in (
        each.split(" ", 3) for each in re.findall(r"`(from [a-z][\w.]* import [^`]+)`", "\n".join(lines))
    ):
        root = module.partition(".")[0]
        found: Any = importlib.import_module(module if root in ("echelon", "torch") else f"echelon.compat.{module}")
        for name in set(names.split(", ")) - {"..."}:
            assert hasattr(found, name), f"{module} has no {name}"
            tried += 1
    assert tried > 50


def test_what_is_not_there() -> None:
    table = PAGES[0].read_text().partition("## What is not here")[2]
    lines = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert migrating_rows.not_there([names.strip() for names, _ in lines]) == []


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
