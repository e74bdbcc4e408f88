"""Who may have written what this process is about to believe: this user, root, or somebody else.

The rule is that of ssh: a file that decides what runs belongs to this user or to root, and nobody else can write to it, nor to
the folder that it is in. root trusts root alone: a user could otherwise have root run what he likes. Folders further up may
belong to others and be written by a group, as project folders are: whoever renames a run's folder there is noticed by a
checksum that travels another way (`launcher.protocol`). What everybody may write to, without the sticky bit, is refused.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from echelon.common.errors import RunFolderError
from echelon.common.files import open_file

__all__ = ["check_parents", "read_trusted", "why_untrusted"]

_NOBODY = 65534


def why_untrusted(path: Path, status: os.stat_result) -> str:
    """Why what has this status may be somebody else's doing, and the remedy; empty if it is not."""
    me = os.geteuid()
    if status.st_uid not in (me, 0):
        return f"{path} belongs to {_name(status.st_uid)}, and you are {_name(me)}. {_remedy(me, status.st_uid)}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
        return f"{who} can write to {path}, and so change what runs: chmod go-w it, if nobody has."
    return ""


def _remedy(me: int, owner: int) -> str:
    if owner == _NOBODY:
        return (
            "So it looks where a server of files maps root, or a container all other users, to nobody: be an ordinary user "
            "there, or take a folder on a local disk, with --runs."
        )
    if me == 0:
        return f"root believes root alone: do it as {_name(owner)}, with `sudo -u`, or take another --name or --runs."
    return "Only its owner can go on with it: take another --name or --runs."


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def check_parents(path: Path) -> None:
    """
    Raises:
        UsageError: everybody could put another folder in the place of this one.
    """
    whole = path.absolute()
    for folder in dict.fromkeys((*whole.parents, *whole.resolve().parents)):
        try:
            mode = os.stat(folder).st_mode
        except OSError as error:
            raise RunFolderError(f"cannot see who may write to {folder}, a parent of {path}: {error.strerror}.") from error
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise RunFolderError(
                f"everybody can write to {folder}, and so replace {path}. Use chmod o-w or +t on it, or choose another folder "
                "with --runs."
            )


def read_trusted(folder: Path, name: str, most: int) -> tuple[bytes, str]:
    """The content of `folder/name`, two folders deep in a run's folder, and a reason to distrust it, or "".

    Every folder is opened once and looked at through its descriptor: what was looked at is what is read.

    Args:
        folder: such as "runs/a/job"; links may lead to its parent, but it must not be a link itself.
    Raises:
        OSError: there is no such file.
    """
    above = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        inner = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            with open(open_file(name, folder=inner), "rb") as file:
                states = zip((folder.parent, folder, folder / name), map(os.fstat, (above, inner, file.fileno())), strict=True)
                why = next(filter(None, (why_untrusted(path, status) for path, status in states)), "")
                return file.read(most), why
        finally:
            os.close(inner)
    finally:
        os.close(above)
