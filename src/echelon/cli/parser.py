"""The parser of every verb: what it does about options that are nearly right, or that stand in the wrong place."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from echelon.common.files import read_bytes

__all__ = ["Parser", "runs_folder"]


def runs_folder(text: str) -> str:
    """Of --runs. A shell leaves the ~ of `--runs=~/runs` to the program."""
    if not text:
        raise argparse.ArgumentTypeError("must be a folder, got ''; the present one is .")
    return os.path.expanduser(text)


class Parser(argparse.ArgumentParser):
    """Options are written in full: `--rank 2`, taken for `--ranks`, would be an option of some scripts.

    Words after a SCRIPT are the script's. One of them that echelon knows, and that was not given to echelon too, is mentioned
    on standard error, unless the script's own text has it.
    """

    def __init__(self, **options: Any) -> None:
        self._known: list[str] = []
        super().__init__(**{**options, "allow_abbrev": False})

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        self._known += [name for name in names if name.startswith("-")]
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        near = difflib.get_close_matches(unknown.partition(" ")[0].partition("=")[0], self._known, n=1)
        hint = f". Did you mean {near[0]}?" if unknown != message and near else ""
        # Without the usage, whose dozen lines would hide the one that matters.
        self.exit(2, f"{self.prog}: error: {message}{hint}\n`{self.prog} --help` shows all options.\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        parsed = super().parse_args(words, namespace)
        if getattr(parsed, "args", None) and getattr(parsed, "script", None) is not None:
            before = words[: len(words) - len(parsed.args) - 1]
            self._mention(parsed.script, parsed.args, {_name(word) for word in before})
        return parsed

    def _mention(self, script: str, its: Sequence[str], given: set[str]) -> None:
        late = [word for word in its if word.startswith("--") and _name(word) in self._known and _name(word) not in given]
        try:
            text = read_bytes(os.path.realpath(script)).decode(errors="replace") if late else ""
        except OSError:  # a module, or no file at all, which is refused elsewhere
            text = ""
        for name in dict.fromkeys(map(_name, late)):
            if name not in text:
                print(
                    f"echelon: {name} stands after {script}, so {script} gets it. For echelon: {self.prog} {name} ... {script}",
                    file=sys.stderr,
                )


def _name(word: str) -> str:
    return word.partition("=")[0]
