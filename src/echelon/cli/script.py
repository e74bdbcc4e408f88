"""Check that a script or module exists and is Python, before any rank starts."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import stat
import warnings
from importlib.machinery import PathFinder
from pathlib import Path

from echelon.common.errors import ScriptError
from echelon.common.files import working_folder
from echelon.common.terminal import say

__all__ = ["check_module", "check_script"]

# Paths that name another file in each process.
_STREAM = re.compile(r"/dev/(stdin|fd/|stdout|stderr)|/proc/[^/]+/fd/")
_MOST_BYTES = 64 << 20
_NEVER = {f"__name__ == {name!r}" for name in ("main", "_main_", "__main", "main__")}


def check_script(script: str) -> None:
    """
    Raises:
        UsageError: there is no such file, it cannot be read again by every rank, or it is not Python.
    """
    source = _source_of(script)
    try:
        with warnings.catch_warnings(action="ignore"):  # the ranks will show them
            compile(source, script, "exec", dont_inherit=True)
            program = ast.parse(source)
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise ScriptError(f"script {script} is not Python: {line}{error.msg}.") from error
    except ValueError as error:  # null bytes: some binary
        raise ScriptError(f"script {script} is not Python: {error}. Name a .py file, or a module after -m.") from error
    except (RecursionError, MemoryError) as error:
        raise ScriptError(f"script {script} is nested too deeply for Python.") from error
    if not program.body:
        say(f"{script} is empty, so nothing runs")
    _warn_of_guard(program, script)


def _source_of(script: str) -> bytes:
    """The script's source. A pipe or a stream can be read only once, so the ranks would find it empty: it is refused."""
    path = Path(script)
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise ScriptError(f"script {script} is a folder. Give the Python file to run, or a module with -m.")
        if not stat.S_ISREG(kind) or _STREAM.match(os.path.abspath(path)):
            raise ScriptError(
                f"script {script} must be a file, got {'standard input' if stat.S_ISREG(kind) else _kind(kind)}: every rank and "
                "every restart reads it. Write the program to a file, and give that file."
            )
        with path.open("rb") as file:
            source = file.read(_MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        stdin = ". Standard input cannot be run: write the program to a file" if script == "-" else ""
        raise ScriptError(f"script {script} does not exist (looked in {working_folder()}){stdin}.") from None
    except OSError as error:
        raise ScriptError(f"script {script} cannot be read: {error.strerror}.") from error
    if len(source) > _MOST_BYTES:
        raise ScriptError(f"script {script} is not Python: it has more than {_MOST_BYTES >> 20} MiB.")
    return source


def _kind(mode: int) -> str:
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _warn_of_guard(program: ast.Module, script: str) -> None:
    """Warn of `if __name__ == "main":`, as on Dragon's page: it is never true in a script, which then does nothing."""
    for node in program.body:
        if not isinstance(node, ast.If) or ast.unparse(node.test) not in _NEVER:
            continue
        inside = {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))}
        made = " No CollectiveGroup is made there." if "CollectiveGroup" in inside else ""
        say(
            f"{script}, line {node.lineno}: {ast.unparse(node.test)} is never true of a script, so its body "
            f'does not run.{made} Write `if __name__ == "__main__":`.'
        )


def check_module(name: str) -> None:
    if name.endswith(".py") or "/" in name:
        raise ScriptError(f"-m must be followed by a dotted name, such as package.train, got {name}. Leave -m out to run a file.")
    top = name.partition(".")[0]
    if PathFinder.find_spec(top, [os.getcwd()]) is None and (not top or importlib.util.find_spec(top) is None):
        raise ScriptError(f"module {name} was not found: there is no {top!r} in {os.getcwd()}, nor on Python's path.")
