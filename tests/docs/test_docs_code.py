"""Every code block of the README and of the site: it runs, or it is checked as far as this machine can, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.docs_blocks import PAGES, ROOT, blocks_of, check, run_page
from tests.kit.docs_preambles import BEFORE, FILES

# Pages of which `make test` runs everything; of the others it runs the Python, and `make test-all` the commands too.
QUICK = ("docs/moving/fairscale.md", "docs/moving/torchtnt.md")
# Blocks of Python that start ranks of their own, or load transformers, and are left to `make test-all`.
LONG = (
    "README.md",
    "docs/checkpoints.md",
    "docs/data.md",
    "docs/dragon.md",
    "docs/guides/fine_tune.md",
    "docs/guides/notebooks.md",
    "docs/guides/sweeps.md",
    "docs/prove.md",
    "docs/trainer.md",
)

_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def _runs(name: str, *, commands: bool) -> bool:
    blocks = [block for block in blocks_of(ROOT / name) if block.reason is None and block.language != "text"]
    return any(block.language == ("bash" if commands else "python") and block.title is None for block in blocks)


def test_every_block_has_a_category_and_what_cannot_run_is_checked() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    for block in blocks:
        if block.reason is not None:
            check(block)
        elif block.language == "python":
            compile(block.text, str(block), "exec")
    assert len(blocks) > 80
    assert sum(block.reason is not None for block in blocks) < len(blocks) / 4


def test_what_stands_before_a_block_is_used() -> None:
    used = {block.after for page in PAGES for block in blocks_of(page)}
    assert {*BEFORE, *FILES} - used == set()


@pytest.mark.full(
    but=(
        "docs/guides/choose_strategy.md",
        "docs/guides/long_sequences.md",
        "docs/guides/where_time_goes.md",
        "docs/strategies.md",
    )
)
@pytest.mark.parametrize("name", [name for name in _NAMES if name not in (*QUICK, *LONG) and _runs(name, commands=False)])
def test_the_python_of_a_page_runs(name: str, tmp_path: Path) -> None:
    run_page(ROOT / name, tmp_path, commands=False)


@pytest.mark.full
@pytest.mark.parametrize("name", QUICK)
def test_a_page_runs(name: str, tmp_path: Path) -> None:
    run_page(ROOT / name, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in _NAMES if name in LONG or (name not in QUICK and _runs(name, commands=True))])
def test_a_whole_page_runs(name: str, tmp_path: Path) -> None:
    run_page(ROOT / name, tmp_path, python=name in LONG)  # that of the others has run above
