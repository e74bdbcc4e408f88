"""Every code block of the README and of the site: it runs, or it is checked as far as this machine can, and says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.docs_blocks import PAGES, ROOT, Block, Wrong, blocks_of, check, run_page
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nx\n```\n", "must be one of python"),
        ("    indented\n", "must be one of python"),
        ("```yaml\nx: 1\n```\n", "must be one of python"),
        ("<!-- code: maybe -->\n```bash\ntrue\n```\n", "the comment before a block"),
        ("<!-- code: after nothing -->\n```python\nx\n```\n", "must be one of unit"),
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```bash\nfalse\n```\n", "ended with 1, not 0"),
        ("<!-- code: ends with 3 -->\n```bash\ntrue\n```\n", "ended with 0, not 3"),
        ('```python title="a.py"\nx = 1\n```\n', "no command of the page runs"),
        ("<!-- code: checked, since so -->\n```bash\nechelon run --rank 2 a.py\n```\n", "refused by its parser"),
        ("<!-- code: checked, since so -->\n```bash\nechelon train a.py\n```\n", "has no command"),
        ("<!-- code: checked, since so -->\n```bash\ncd x && rm -r y\n```\n", "how to check the command 'rm'"),
        ("<!-- code: checked, since so -->\n```bash\nmake nothing\n```\n", "make nothing"),
        ("<!-- code: checked, since so -->\n```bash\npip install 'echelon[none]'\n```\n", "no extra none"),
        ("<!-- code: checked, since so -->\n```bash\npython none.py\n```\n", "no such file"),
        ("<!-- code: checked, since so -->\n```bash\necho $(\n```\n", "syntax error|unexpected EOF"),
        ("<!-- code: checked, since so -->\n```python\nech.Nothing\n```\n", "echelon has no Nothing"),
        ("<!-- code: checked, since so -->\n```python\nech.SlurmConfig(nodes=2)\n```\n", "unexpected keyword argument 'nodes'"),
    ],
)
def test_planted_blocks_are_found(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kit.docs_blocks.ROOT", tmp_path if "make" not in text and "pip" not in text else ROOT)
    page = (tmp_path if "make" not in text and "pip" not in text else ROOT) / "planted.md"
    monkeypatch.setattr(Path, "read_text", _reading(page, text))
    with pytest.raises(Wrong, match=message):
        run_page(page, tmp_path)


def _reading(page: Path, text: str):  # type: ignore[no-untyped-def]
    read = Path.read_text
    return lambda self, *arguments, **options: text if self == page else read(self, *arguments, **options)


def test_commands_are_lines_joined_without_their_comments() -> None:
    text = "echelon run --ranks 2 \\\n    a.py   # a remark\n\n# another\nsed 's/a#b/c/' a.py\n"
    block = Block(ROOT / "x.md", 1, "bash", None, text)
    assert [re.sub(" +", " ", each) for each in block.commands] == ["echelon run --ranks 2 a.py", "sed 's/a#b/c/' a.py"]
