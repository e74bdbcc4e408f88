"""A copy of the code of a job, so that editing a file changes no job that still waits."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from echelon.contracts.errors import UsageError

__all__ = ["snapshot"]

_MOST_FILES = 5000
# Larger ones are data: the copy has a link to the original.
_LARGEST = 4 << 20


def snapshot(script: Path, folder: Path, top: Path | None = None) -> Path:
    """Copy the repository of `script`, as git sees it with changes and new files, else the script's own folder, or `top`.

    Args:
        script: a file.
        folder: of the copy; it is replaced.
        top: a folder above `script` all of which must be in the copy.
    Returns:
        The script within the copy.
    Raises:
        UsageError: more files than anybody's code has.
    """
    script = script.resolve()
    found = _in_git(script)
    if found is not None and top is not None and not top.resolve().is_relative_to(found[0]):
        found = None
    top, files = found or ((top or script.parent).resolve(), None)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    count = 0
    for file in files if files is not None else _walk(top, folder.resolve()):
        source, target = top / file, folder / file
        count += 1
        if count > _MOST_FILES:
            raise UsageError(
                f"{top} has more than {_MOST_FILES} files to copy for the job. Put the code into a git repository, "
                "with data in .gitignore, or submit with --no-snapshot."
            )
        if not source.is_file():  # deleted, and not yet committed
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.stat().st_size > _LARGEST:
            target.symlink_to(source.resolve())
        else:
            shutil.copy2(source, target)
    return folder / script.relative_to(top)


def _in_git(script: Path) -> tuple[Path, list[str]] | None:
    """Top folder and files of the repository that has `script`; None if git is not there or does not know the script."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(script.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    try:
        top = Path(git("rev-parse", "--show-toplevel").strip())
        listed = git("ls-files", "-z", "--full-name", "--cached", "--others", "--exclude-standard", "--", str(top)).split("\0")
    except (OSError, subprocess.SubprocessError):
        return None
    files = list(dict.fromkeys(f for f in listed if f))
    return (top, files) if str(script.relative_to(top)) in files else None


def _walk(top: Path, without: Path) -> Iterator[str]:
    for here, folders, files in os.walk(top):
        at = Path(here)
        folders[:] = [
            f
            for f in folders
            if not f.startswith(".")
            and f != "__pycache__"
            and not (at / f / "pyvenv.cfg").exists()  # a virtual environment
            and not (at / f / "run.json").exists()  # runs
            and not without.is_relative_to((at / f).resolve())
        ]
        yield from (str((at / f).relative_to(top)) for f in files if not f.startswith("."))
