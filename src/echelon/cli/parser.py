"""The parser of every command: suggestions for misspelt options, and for options in the wrong place."""

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
    """Type of --runs. A shell does not expand the ~ of `--runs=~/runs`."""
    if not text:
        raise argparse.ArgumentTypeError("must be a folder, got ''; the current one is .")
    return os.path.expanduser(text)


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations: `--rank 2` may be an option of the script, so it must not match `--ranks`.

    All words after SCRIPT belong to the script. If one of them is an option of echelon that was not also given before SCRIPT,
    a line on standard error says so, unless the script's source contains that option.

    Attributes:
        needs_one_of: options of which the command needs at least one. If all that were given stand after SCRIPT, as in
            `echelon plan train.py --cluster 2x8xH100 --lr 0.1`, echelon's options up to a `--` are taken from the script's
            words, except those that the script's source contains.
    """

    def __init__(self, **options: Any) -> None:
        self._known: list[str] = []
        self.needs_one_of: frozenset[str] = frozenset()
        super().__init__(**{**options, "allow_abbrev": False})

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        self._known += [name for name in names if name.startswith("-")]
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        near = difflib.get_close_matches(unknown.partition(" ")[0].partition("=")[0], self._known, n=1)
        hint = f". Did you mean {near[0]}?" if unknown != message and near else ""
        # Without the usage: its dozen lines would hide the error.
        self.exit(2, f"{self.prog}: error: {message}{hint}\n`{self.prog} --help` shows all options.\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        parsed = super().parse_args(words, namespace)
        if getattr(parsed, "args", None) and getattr(parsed, "script", None) is not None:
            at = len(words) - len(parsed.args) - 1
            given = {_name(word) for word in words[:at]}
            late = self._late(parsed.script, parsed.args, given)
            if self.needs_one_of & late and not self.needs_one_of & given:
                own_words, its = self._taken(parsed.args, late)
                return super().parse_args([*words[:at], *own_words, parsed.script, *its], namespace)
            for name in dict.fromkeys(_name(word) for word in parsed.args if _name(word) in late):
                print(
                    f"echelon: {name} stands after {parsed.script}, so {parsed.script} gets it. "
                    f"For echelon: {self.prog} {name} ... {parsed.script}",
                    file=sys.stderr,
                )
        return parsed

    def _late(self, script: str, its: Sequence[str], given: set[str]) -> set[str]:
        """Echelon's options that stand among the script's words and that the script's source does not contain."""
        late = {_name(word) for word in _before_dashes(its) if word.startswith("--")} & set(self._known) - given
        try:
            text = read_bytes(os.path.realpath(script)).decode(errors="replace") if late else ""
        except OSError:  # a module, or a missing file, which another check refuses
            text = ""
        return {name for name in late if name not in text}

    def _taken(self, its: Sequence[str], late: set[str]) -> tuple[list[str], list[str]]:
        """Split into echelon's options, each with its value, and the words that stay the script's."""
        own_words: list[str] = []
        left: list[str] = []
        words = iter(_before_dashes(its))
        for word in words:
            if _name(word) not in late:
                left.append(word)
                continue
            own_words.append(word)
            if "=" not in word and self._option_string_actions[word].nargs is None:
                own_words += [value for value in [next(words, None)] if value is not None]
        return own_words, [*left, *its[len(_before_dashes(its)) + 1 :]]


def _before_dashes(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def _name(word: str) -> str:
    return word.partition("=")[0]
