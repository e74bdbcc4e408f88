"""The code blocks of the README and of docs/: which there are, how each is run, and what is checked of those that cannot be.

A page is run from its top to its end in one empty folder. Blocks of Python with a title are its files, others are programs; each
command of a block of Bash is a program, too. A comment before a block says what a reader does not see:

    <!-- code: after NAME -->              put in front, or into the folder: tests/kit/docs_preambles.py
    <!-- code: ends with 75 -->            the exit code of its last command
    <!-- code: checked, since REASON -->   not run: its commands are parsed, its Python is compiled and its names looked up
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from packaging.requirements import Requirement

import echelon
from echelon.cli.main import VERBS
from echelon.cli.parser import Parser
from echelon.launcher.job import parse_duration
from tests.conftest import clean_environment
from tests.kit import forked
from tests.kit.docs_preambles import BEFORE, FILES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "BENCHMARKS.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "bash", "text")  # text is output, and what is neither

_COMMENT = re.compile(r"<!-- code: (.*?) -->\s*\Z", re.DOTALL)
_WISHES = re.compile(r"after (?P<after>\w+)|ends with (?P<ends>\d+)|checked, since (?P<reason>\S.*)", re.DOTALL)
_TITLE = re.compile(r' title="([\w.-]+)"')
_SHELL = re.compile(r"[|;&<>$`*?(){}#]|^\w+=")  # a command with one of these is the shell's affair


class Wrong(Exception):
    """A block is not what a block must be, or did not run."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    title: str | None
    text: str
    after: str | None = None
    ends: int = 0
    reason: str | None = None  # why it is only checked

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Lines of Bash, those that a backslash divides joined, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in (re.sub(r"(^|\s)#( .*)?$", "", line).strip() for line in lines) if line]


def blocks_of(page: Path) -> list[Block]:
    found, before = [], ""
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            found.append(
                _block(page, token.map[0] + 1, token.info if token.type == "fence" else "(indented)", token.content, before)
            )
        before = token.content if token.type == "html_block" else ""
    return found


def _block(page: Path, line: int, info: str, text: str, before: str) -> Block:
    where = f"{page.name}:{line}"
    language, _, rest = info.strip().partition(" ")
    title = _TITLE.fullmatch(f" {rest}")
    if language not in LANGUAGES or (rest and title is None):
        raise Wrong(f'{where}: a block must be one of {", ".join(LANGUAGES)}, a file\'s with title="NAME", got {info!r}')
    wishes: dict[str, Any] = {}
    comment = _COMMENT.search(before)
    for wish in re.split(r";\s+(?=after |ends with |checked)", comment[1]) if comment else []:
        known = _WISHES.fullmatch(wish)
        if known is None:
            raise Wrong(f"{where}: the comment before a block must be as tests/kit/docs_blocks.py says, got {wish!r}")
        wishes |= {name: value for name, value in known.groupdict().items() if value}
    after, known_names = wishes.get("after"), BEFORE if language == "python" else FILES
    if after is not None and after not in known_names:
        raise Wrong(f"{where}: `after {after}` must be one of {', '.join(known_names)}")
    wishes["ends"] = int(wishes.get("ends", 0))
    return Block(page, line, language, title and title[1], text, **wishes)


# Running a page


def run_page(page: Path, folder: Path, *, python: bool = True, commands: bool = True) -> None:
    """All blocks of a page, in order, perhaps without its programs, or without commands and the files that these start."""
    files: dict[str, Block] = {}
    started = ""
    for block in blocks_of(page):
        if block.reason is not None:
            check(block)
        elif block.title is not None:
            compile(block.text, str(block), "exec")
            files[block.title] = block
            (folder / block.title).write_text(block.text)
        elif block.language == "python" and python:
            _run_python(block, folder)
        elif block.language == "bash" and commands:
            for name, text in FILES.get(block.after or "", {}).items():
                (folder / name).write_text(text)
            _run_commands(block, folder)
            started += block.text
    idle = [str(block) for name, block in files.items() if name not in started]
    if idle and commands:
        raise Wrong(f"no command of the page runs the file of {', '.join(idle)}")


def _run_python(block: Block, folder: Path) -> None:
    script = folder / f"block{block.line}.py"
    script.write_text(f"{BEFORE.get(block.after or '', '')}\n{block.text}")
    _demand(block, block.ends, [sys.executable, script.name], folder)


def _run_commands(block: Block, folder: Path) -> None:
    *first, last = block.commands
    for command, code in [*((each, 0) for each in first), (last, block.ends)]:
        _demand(block, code, _words(command), folder)


def _words(command: str) -> list[str]:
    """What a shell would start, with this Python for the programs that are installed beside it."""
    words = shlex.split(command)
    modules = {"echelon": ["-m", "echelon"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
    if words[0] in modules and not _SHELL.search(command):
        return [sys.executable, *modules[words[0]], *words[1:]]
    return ["bash", "-euo", "pipefail", "-c", command]


def _demand(block: Block, code: int, command: Sequence[str], folder: Path) -> None:
    environment = {
        **clean_environment(),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    done = forked.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    if done.returncode != code:
        raise Wrong(
            f"{block}: {shlex.join(command[-3:])} ended with {done.returncode}, not {code}:\n{done.stdout}\n{done.stderr}"
        )


# Checking what cannot be run


def check(block: Block) -> None:
    """That the commands are understood by what they start, and that the Python names what there is."""
    if block.language == "python":
        _check_python(block)
    else:
        _check_shell(block.text, str(block))
        for command in block.commands:
            for part in _parts(command):
                _check_command(part, block)


def _check_shell(text: str, where: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    if done.returncode:
        raise Wrong(f"{where}: {done.stderr}")


def _parts(command: str) -> Iterator[list[str]]:
    """The words of each simple command of a line."""
    words = shlex.shlex(command, posix=True, punctuation_chars=";&|")
    words.whitespace_split, words.commenters = True, ""
    part: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set(";&|"):
            if part:
                yield part
            part = []
        else:
            part.append(word)


_NOT_OURS = {".", "cd", "docker", "eval", "git", "kubectl", "source"}  # of which only the shell's grammar is checked


def _check_command(words: list[str], block: Block) -> None:
    while re.match(r"[A-Z]+=", words[0]):
        words = words[1:]
    name, rest = words[0], words[1:]
    if name == "echelon":
        check_echelon(rest, str(block))
    elif name == "make":
        _check_make(rest, block)
    elif name == "pip":
        _check_pip(rest, block)
    elif name in ("python", "python3"):
        _check_program(rest, block)
    elif name not in _NOT_OURS:
        raise Wrong(f"{block}: nothing here knows how to check the command {name!r}")


def check_echelon(words: list[str], where: str) -> None:
    """By the parser of the command itself, and its durations by what reads them."""
    if words and words[0] in ("--help", "--version"):
        return
    if not words or words[0] not in VERBS:
        raise Wrong(f"{where}: echelon has no command {' '.join(words[:1])!r}")
    parser = Parser(prog=f"echelon {words[0]}")
    importlib.import_module(f"echelon.cli.{words[0]}").add_arguments(parser)
    try:
        parsed = parser.parse_args(words[1:])
    except SystemExit as end:
        if end.code:
            raise Wrong(f"{where}: `echelon {shlex.join(words)}` is refused by its parser") from None
        return
    for option in ("time", "warn", "stop_after", "stall_after"):
        value = getattr(parsed, option, None)
        if isinstance(value, str):
            parse_duration(value)


def _check_make(words: list[str], block: Block) -> None:
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        raise Wrong(f"{block}: make {shlex.join(words)}: {done.stderr}")


def _check_pip(words: list[str], block: Block) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words[1:]:
        if word.startswith("-"):
            continue
        asked = Requirement(re.sub(r"^\.", "echelon", word))
        unknown = asked.extras - extras.keys() if asked.name == "echelon" else set()
        if unknown:
            raise Wrong(f"{block}: there is no extra {', '.join(unknown)}")


def _check_program(words: list[str], block: Block) -> None:
    if words[0] == "-m":
        there = importlib.util.find_spec(words[1]) is not None
    else:
        titles = {each.title for each in blocks_of(block.page)}
        there = (ROOT / words[0]).is_file() or words[0] in {*titles, "train.py"}
    if not there:
        raise Wrong(f"{block}: python {words[0]}: there is no such file")


def _check_python(block: Block) -> None:
    """Names of `ech`, and the keywords of calls of these."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and _is_deep(node.module or ""):
            raise Wrong(f"{block}: {node.module} is deeper than a user imports from")
        if (name := _of_echelon(node)) is not None and _there(name) is None:
            raise Wrong(f"{block}: echelon has no {name}")
        if isinstance(node, ast.Call) and (name := _of_echelon(node.func)) is not None:
            keywords = {each.arg: None for each in node.keywords if each.arg}
            try:
                inspect.signature(_there(name)).bind_partial(*[None] * len(node.args), **keywords)
            except TypeError as error:
                raise Wrong(f"{block}: ech.{name}: {error}") from None


def _of_echelon(node: ast.AST) -> str | None:
    """NAME of `ech.NAME`, MODULE.NAME of `ech.MODULE.NAME`."""
    if not isinstance(node, ast.Attribute):
        return None
    if isinstance(node.value, ast.Name) and node.value.id == "ech":
        return node.attr
    inner = _of_echelon(node.value)
    return f"{inner}.{node.attr}" if inner in vars(echelon)["_MODULES"] else None


def _there(name: str) -> Any:
    """What a public name stands for, or a module of public names; None if it is neither."""
    module, _, name = name.rpartition(".")
    home = importlib.import_module(f"echelon.{module}") if module else echelon
    known = (*home.__all__, *(vars(echelon)["_MODULES"] if not module else ()))
    return getattr(home, name) if name in known else None


def _is_deep(module: str) -> bool:
    return module.startswith("echelon.") and not module.startswith("echelon.compat.") and module.count(".") > 1
