"""`echelon move`: change a script's import lines from another library to `echelon.compat`."""

from __future__ import annotations

import argparse
import difflib
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.common.errors import CommandError
from echelon.common.files import read_bytes, write_whole
from echelon.common.terminal import printable, shortly

if TYPE_CHECKING:
    from echelon.cli.imports import Moved, Note

__all__ = ["add_arguments", "execute"]

_ABOUT = """\
Names of TorchTNT, FairScale, nntool, Dragon, Lightning and of transformers' Trainer become those of echelon.compat: in
import lines, nowhere else. Shows the difference; --write changes the files. A name that echelon.compat does not have is
listed with its replacement. The exit code is 1 if there is such a name, 2 if a file is not Python.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _ABOUT
    parser.add_argument("files", nargs="+", metavar="FILE", help="the script, and all files it imports that use the library")
    parser.add_argument("--write", action="store_true", help="change the files")


def execute(arguments: argparse.Namespace) -> int:
    """Run the command; returns 1 if compat lacks a name. No file is changed before all have been parsed."""
    moved = {path: _moved(path) for path in dict.fromkeys(map(Path, arguments.files))}
    names = changed = 0
    notes: list[tuple[Path, Note]] = []
    for path, (before, after) in moved.items():
        names, notes = names + after.names, [*notes, *((path, each) for each in after.notes)]
        if before == after.text:
            continue
        changed += 1
        _show(path, before, after)
        if arguments.write:
            _write(path, before, after.text)
    sys.stdout.flush()
    for path, note in notes:
        print(printable(f"{path}:{note.line}: E-NOT-HERE {note.name}: {note.why}"), file=sys.stderr)
    did = "changed" if arguments.write else "would change; --write does it"
    summary = f"{names} imported names are echelon.compat's now, {len(notes)} are not" if names or notes else "no import to move"
    print(f"echelon move: {changed} of {len(moved)} files {did}: {summary}.", file=sys.stderr)
    return 1 if notes else 0


def _moved(path: Path) -> tuple[bytes, Moved]:
    """A file's bytes, and the changed script.

    Raises:
        CommandError: it is not a file, is a link, is not Python, or would change elsewhere; or libcst is not installed.
    """
    try:
        from libcst import ParserSyntaxError
    except ImportError:
        raise CommandError("`echelon move` needs libcst. Install it: pip install 'echelon[move]'") from None
    from echelon.cli.imports import move

    if path.is_symlink():
        raise CommandError(f"{path} must be a file, got a link to {os.readlink(path)}. Name that file.")
    if path.suffix == ".ipynb":  # JSON, which may parse as a Python expression
        raise CommandError(f"{path} must be a script, got a notebook. Save it as one: jupyter nbconvert --to script {path}")
    try:
        text = read_bytes(path)
    except OSError as error:  # a folder, or a name without a file
        raise CommandError(f"{path} must be a file, got: {error.strerror}. Name scripts, as in `echelon move *.py`.") from None
    try:
        return text, move(text)
    except ParserSyntaxError as error:
        what = text.splitlines()[error.raw_line - 1 : error.raw_line]
        shown = shortly(b"".join(what).decode(errors="replace"))
        raise CommandError(f"{path}:{error.raw_line} must be Python 3, got {shown}. Fix it first.") from None
    except (
        UnicodeDecodeError,
        SyntaxError,
        LookupError,
    ) as error:  # not in the encoding that the file declares, or old line ends
        raise CommandError(f"{path} must be text in the encoding that it names, got {error}. Save it in that encoding.") from None


def _show(path: Path, before: bytes, after: Moved) -> None:
    old, new = (text.decode(after.encoding, "replace").splitlines() for text in (before, after.text))
    for line in difflib.unified_diff(old, new, str(path), str(path), lineterm=""):
        print(printable(line))


def _write(path: Path, before: bytes, text: bytes) -> None:
    """Replace a file in one step: a reader sees the old or the new text. Its mode stays.

    Raises:
        CommandError: the file has changed since it was read, for example in an editor.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if read_bytes(path) != before:
        raise CommandError(
            f"{path} must not change while `echelon move` runs, got another text, saved meanwhile. Run the command again."
        )
    write_whole(path, text, durable=True)
    path.chmod(mode)
