"""`echelon move`: a script of another library, with import lines that name `echelon.compat`."""

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
import lines, nowhere else. Shows the difference; --write makes it. What echelon.compat does not have is named with what to
take instead. The exit code is 1 if there is such a name, 2 if a file is no Python.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _ABOUT
    parser.add_argument("files", nargs="+", metavar="FILE", help="a script, or a file that it imports; all that use the library")
    parser.add_argument("--write", action="store_true", help="change the files")


def execute(arguments: argparse.Namespace) -> int:
    """Run the command; returns 1 if a name is not here. No file is changed before all are understood."""
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
    """A file's bytes, and what becomes of them.

    Raises:
        CommandError: it is no file, a link, no Python, or would not be kept as it is; or libcst is not installed.
    """
    try:
        from libcst import ParserSyntaxError
    except ImportError:
        raise CommandError("`echelon move` needs libcst. Install it: pip install 'echelon[move]'") from None
    from echelon.cli.imports import move

    if path.is_symlink():
        raise CommandError(f"{path} must be a file, got a link to {os.readlink(path)}. Name that file.")
    if path.suffix == ".ipynb":  # whose text happens to be an expression of Python
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
        raise CommandError(f"{path}:{error.raw_line} must be Python 3, got {shown}. Mend it first.") from None
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:  # another encoding than the file says, old line ends
        raise CommandError(f"{path} must be text in the encoding that it names, got {error}. Save it anew.") from None


def _show(path: Path, before: bytes, after: Moved) -> None:
    old, new = (text.decode(after.encoding, "replace").splitlines() for text in (before, after.text))
    for line in difflib.unified_diff(old, new, str(path), str(path), lineterm=""):
        print(printable(line))


def _write(path: Path, before: bytes, text: bytes) -> None:
    """In one step: whoever reads the file meanwhile has the old or the new one. Its mode stays.

    Raises:
        CommandError: somebody, such as an editor, has saved it since it was read.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if read_bytes(path) != before:
        raise CommandError(f"{path} must be as it was read, got another text, saved meanwhile. Run the command again.")
    write_whole(path, text, durable=True)
    path.chmod(mode)
