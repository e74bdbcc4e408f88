"""Who may have written a file that this process is about to trust: this user, root, or another user.

The rule is ssh's: a file that decides what runs must belong to this user or to root, and only its owner may write to it and to
its folder. root trusts only root, since a user could otherwise have root run anything. Folders further up may belong to others
and be writable by a group, as project folders are: replacing a run's folder there is detected by a checksum that travels another
way (`launcher.protocol`). A folder that everybody can write to, without the sticky bit, is refused.
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
    """Why another user may have created or changed a file with this status, and the remedy; empty if none may have."""
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
            "This happens if a file server maps root, or a container maps all other users, to nobody: be an ordinary user "
            "there, or choose a folder on a local disk, with --runs."
        )
    if me == 0:
        return f"root trusts only root: run the command as {_name(owner)}, with `sudo -u`, or choose another --name or --runs."
    return "Only its owner can continue it: choose another --name or --runs."


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def check_parents(path: Path) -> None:
    """Check the folders above a path.

    Raises:
        UsageError: any user could replace this folder.
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
    """The content of `folder/name`, two levels deep in a run's folder, and a reason to distrust it, or "".

    Every folder is opened once and checked through its descriptor, so that the checked file is the one that is read.

    Args:
        folder: such as "runs/a/job"; it must not be a link itself, but its parent may be reached through links.
    Raises:
        OSError: the file does not exist.
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
