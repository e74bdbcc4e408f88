"""A copy of a job's code, so that an edit does not change a waiting job."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.common.errors import ClusterError, require

__all__ = ["Copy", "copy_code", "snapshot"]

_MOST_FILES = 5000
# Larger files are data: the copy has a link to the original.
_LARGEST = 4 << 20


@dataclass(frozen=True)
class Copy:
    """A finished copy of the folder `top`, in `folder`."""

    top: Path
    folder: Path

    def path_of(self, path: str) -> str:
        """The absolute path of a file's or folder's copy; the path itself if it was not copied."""
        full = Path(path or ".").resolve()
        if full.is_relative_to(self.top):
            copy = self.folder / full.relative_to(self.top)
            if copy.exists():
                return str(copy)
        return path or str(full)


def snapshot(script: Path, folder: Path, top: Path | None = None) -> Path:
    """Copy the repository of `script`, including changes and new files; without git, the script's own folder, or `top`.

    Args:
        script: a file.
        folder: for the copy; it is replaced.
        top: a folder above `script` that the copy must contain.
    Returns:
        The path of the script in the copy.
    Raises:
        UsageError: too many files.
    """
    copy = copy_code(script, folder, top=top)
    return folder / script.resolve().relative_to(copy.top)


def copy_code(
    script: Path,
    folder: Path,
    *,
    top: Path | None = None,
    root: str | None = None,
    suffixes: Sequence[str] | None = None,
    without: Sequence[str] = (),
) -> Copy:
    """Copy code as `snapshot` does, with more choices.

    Args:
        top: as in `snapshot`.
        root: the folder to copy, instead of the repository or the script's folder.
        suffixes: of files to copy; None for all.
        without: names of folders to leave out.
    """
    script = script.resolve()
    in_git = _in_git(script)
    if in_git is not None and top is not None and not top.resolve().is_relative_to(in_git[0]):
        in_git = None
    base, files = in_git or ((top or script.parent).resolve(), None)
    if root is not None:
        base, files = _below(root, base, files)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    count = 0
    for file in files if files is not None else _walk(base, folder.resolve()):
        source, target = base / file, folder / file
        if (suffixes is not None and not file.endswith(tuple(suffixes))) or set(without) & set(Path(file).parts[:-1]):
            continue
        if files is not None and _in_a_run(base, source.parent):
            continue
        count += 1
        if count > _MOST_FILES:
            raise ClusterError(
                f"{base} has more than {_MOST_FILES} files to copy for the job. Put the code into a git repository, "
                "with data in .gitignore, or run without a copy: --no-snapshot, or pack_code=False."
            )
        if not source.is_file():  # deleted, but not committed yet
            continue
        _copy_file(source, target)
    return Copy(base, folder.resolve())


def _below(root: str, base: Path, files: list[str] | None) -> tuple[Path, list[str] | None]:
    """The chosen folder, and the files of `base` in it, if git knows them."""
    chosen = Path(root).resolve()
    require(chosen.is_dir(), "code_root", "a folder", root, kind=ClusterError)
    if files is None or not chosen.is_relative_to(base):
        return chosen, None
    return chosen, [str((base / f).relative_to(chosen)) for f in files if (base / f).is_relative_to(chosen)]


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.stat().st_size > _LARGEST:
        target.symlink_to(source.resolve())
    else:
        shutil.copy2(source, target)
        target.chmod(target.stat().st_mode & 0o700)


def _in_a_run(top: Path, folder: Path) -> bool:
    """Whether a folder is inside a run folder. Git lists runs that are not ignored, and runs hold copies of the code."""
    return any((at / "run.json").exists() for at in (folder, *folder.parents) if at != top and at.is_relative_to(top))


def _in_git(script: Path) -> tuple[Path, list[str]] | None:
    """Top folder and files of the repository that has `script`; None without git, or if git does not know the script."""

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
    for folder, folders, files in os.walk(top):
        at = Path(folder)
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
