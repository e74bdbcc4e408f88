"""Refusals: a test asserts an error's class, which gives its code, and its fields. Its words are in tests/golden/messages.txt.

The file holds, by the function that asked, what it may read. So an error is worded anew in the library alone, and then
`pytest --write-golden tests/ROOM/test_FILE.py` writes anew the lines of the functions that ran: run all cases of them. Some
messages quote torch or Python, so words are compared with those versions alone by which the file was written.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import torch

from echelon.errors import EchelonError, UsageError

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden/messages.txt"
VERSIONS = f"# torch {torch.__version__.partition('+')[0]}, Python {sys.version_info[0]}.{sys.version_info[1]}"
WRITES_TO = "ECHO_TEST_GOLDEN"  # in the environment, while messages are collected: the folder, in which each process has a file

E = TypeVar("E", bound=EchelonError)

_ROOTS = "|".join(map(re.escape, (tempfile.gettempdir(), str(TESTS.parent))))
_IN_PATH = r"[^\s'\",:;()\[\]`/]*"
_PATH = re.compile(rf"(?:{_ROOTS})(?:/(?:{_IN_PATH}/)*({_IN_PATH}(?<![./])))?(?![\w-])")
_LASTS = re.compile(r"step-\d+|(?!tmp).*\.[a-z]\w*")  # names that the test or the library chose, and no folder of pytest's

# What is another in each run or on each machine, and what it is shown as.
_VARIES = [
    (re.compile(r"\b(?:0x[0-9a-f]+|[0-9a-f]{8,})\b"), "N"),
    (re.compile(r"\b\d+\.\d+(?:\.\d+)*(?:e[+-]?\d+)?\b|\b\d+e[+-]?\d+\b"), "N"),
    (re.compile(r"\b\d+(?= ?(?:ns|us|ms|s|min|h|B|bytes|[KMGT]i?B|%|seconds?|minutes?|hours?|cores?|CPUs?)\b)"), "N"),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b"), "DATE"),
    (re.compile(rf"\b{re.escape(getpass.getuser())} on [\w.-]+"), "USER on HOST"),
    (re.compile(rf"\b{re.escape(socket.gethostname())}\b"), "HOST"),
    (re.compile(r"(?<=\bjob )\d+|(?<=\bprocess )\d+|(?<=\bpid )\d+|(?<=\bport )\d+|(?<=\bline )\d+|(?<=\.py:)\d+|\d{5,}"), "N"),
    (re.compile(r"\s*Traceback \(most recent call last\):.*", re.DOTALL), ""),  # with places in torch
    (re.compile(r"(?<=[a-z]Error: ).+|(?<=Exception: ).+"), "..."),  # the words of others, or of an error within this one
    (re.compile(r"(?<=torch says: ).+", re.DOTALL), "..."),
    (re.compile(r"  +"), "  "),  # between the columns of a table, which are as wide as a path in them
]


def refused(kind: type[E], **fields: Any) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[E]]:
    """The body raises an error with the code of `kind`, with at least these fields, and with words that the golden file holds."""
    return _refused(_asks(sys._getframe(1)), kind, fields)


@contextlib.contextmanager
def _refused(asks: str, kind: type[E], fields: dict[str, Any]) -> Iterator[pytest.ExceptionInfo[E]]:
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.code == kind.code, f"{type(error).__name__}, which is no {kind.__name__}: {error}"
    assert {name: error.fields.get(name) for name in fields} == fields, error
    said = f"{error.code} {_lasting(str(error), error.fields.get('got'))}"
    if WRITES_TO in os.environ:
        with open(f"{os.environ[WRITES_TO]}/{os.getpid()}", "a") as file:
            file.write(json.dumps([asks, said]) + "\n")
    elif VERSIONS in golden() and said not in golden().get(asks, ()):
        told = f"{asks} was told:\n    {said}\nThe words are right? `pytest --write-golden {asks.partition('::')[0]}`. Known are:"
        raise AssertionError("\n    ".join([told, *golden().get(asks, ["none"])]))


def refusal(fn: Callable[..., object], *args: Any, kind: type[EchelonError] = UsageError, **options: Any) -> str:
    """What `fn` is refused with: for ranks, whose words the test compares."""
    with pytest.raises(kind) as caught:
        fn(*args, **options)
    return str(caught.value)


def answer(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What `fn` gives, or the words that it is refused with."""
    try:
        return fn(*args, **options)
    except UsageError as error:
        return str(error)


def _asks(frame: FrameType) -> str:
    """The outermost function of the file that asks: the test, or what a rank calls."""
    path, name, outer = frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_back
    while outer is not None:
        if outer.f_code.co_filename == path:
            name = outer.f_code.co_qualname
        outer = outer.f_back
    return f"{Path(path).relative_to(TESTS.parent).as_posix()}::{name.partition('.<locals>')[0]}"


def _lasting(text: str, got: Any = None) -> str:
    """Without what varies. A value that is a field, too, is asserted there; here it would be a line for each."""
    if isinstance(got, str):
        text = text.replace(f"got {got}", "got {got}")
    text = _PATH.sub(lambda path: f"PATH/{path[1]}" if _LASTS.fullmatch(path[1] or "") else "PATH", text)
    for varies, shown in _VARIES:
        text = varies.sub(shown, text)
    return re.sub(r"[^\n\S ]|[\x00-\x09\x7f]", "?", text.strip()).replace("\n", "\n        ")


@functools.cache
def golden() -> dict[str, list[str]]:
    """Code and words of each message, by the function that may be told it."""
    found, asks = dict[str, list[str]](), ""
    for line in GOLDEN.read_text().split("\n"):
        if line.startswith("        "):
            found[asks][-1] += f"\n{line}"
        elif line.startswith("    "):
            found[asks].append(line[4:])
        elif line:
            asks = line
            found[asks] = []
    return found


def collect() -> None:
    """Collect messages from here on, in this process and those that it starts."""
    os.environ[WRITES_TO] = tempfile.mkdtemp()


def write() -> None:
    """Write anew what was collected, and keep the rest."""
    told, folder = defaultdict[str, set[str]](set), Path(os.environ.pop(WRITES_TO))
    for path in folder.iterdir():
        for asks, said in map(json.loads, path.read_text().splitlines()):
            told[asks].add(said)
    shutil.rmtree(folder)
    golden.cache_clear()
    held = {asks: says for asks, says in golden().items() if not asks.startswith("#")} | told
    lines = [f"{asks}\n" + "".join(f"    {said}\n" for said in sorted(says)) for asks, says in sorted(held.items())]
    GOLDEN.write_text("\n".join([f"{VERSIONS}\n", *lines]))
