"""Whether what is to be run is there, and is Python: before any rank starts."""

from __future__ import annotations

import ast
import importlib.util
import os
import warnings
from importlib.machinery import PathFinder
from pathlib import Path

from echelon.contracts.errors import UsageError
from echelon.contracts.terminal import say

__all__ = ["check_module", "check_script"]

_NEVER = {f"__name__ == {name!r}" for name in ("main", "_main_", "__main", "main__")}


def check_script(script: str) -> None:
    path = Path(script)
    if not path.exists():
        raise UsageError(f"script {script} does not exist (looked in {Path.cwd()}).")
    if path.is_dir():
        raise UsageError(f"script {script} is a folder. Give the Python file to run, or a module with -m.")
    try:
        source = path.read_bytes()
        with warnings.catch_warnings(action="ignore"):  # the rank says them
            compile(source, script, "exec", dont_inherit=True)
            _warn_of_guard(ast.parse(source), script)
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise UsageError(f"script {script} is not Python: {line}{error.msg}.") from error
    except ValueError as error:  # null bytes: some binary
        raise UsageError(f"script {script} is not Python: {error}.") from error
    except OSError as error:
        raise UsageError(f"script {script} cannot be read: {error.strerror}.") from error


def _warn_of_guard(program: ast.Module, script: str) -> None:
    """`if __name__ == "main":`, as on Dragon's page, is never true of a script: it ends well and does nothing."""
    for node in program.body:
        if not isinstance(node, ast.If) or ast.unparse(node.test) not in _NEVER:
            continue
        inside = {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))}
        made = " No CollectiveGroup is made there." if "CollectiveGroup" in inside else ""
        say(
            f"{script}, line {node.lineno}: {ast.unparse(node.test)} is never true of a script, so what is behind it "
            f'does not run.{made} Write `if __name__ == "__main__":`.'
        )


def check_module(name: str) -> None:
    if name.endswith(".py") or "/" in name:
        raise UsageError(f"-m must be followed by a dotted name, such as package.train, got {name}. Leave -m out to run a file.")
    top = name.partition(".")[0]
    if PathFinder.find_spec(top, [os.getcwd()]) is None and (not top or importlib.util.find_spec(top) is None):
        raise UsageError(f"module {name} was not found: there is no {top!r} in {os.getcwd()}, nor on Python's path.")
