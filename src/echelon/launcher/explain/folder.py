"""What is asked of files in a run's folder, where an enemy may have put others."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

from echelon.contracts.files import open_file

__all__ = ["is_file", "is_folder", "is_held", "object_in"]


def object_in(text: str) -> dict[str, Any] | None:
    """However deep: of a flight record, of which there may be thousands, only what is known is looked at."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_folder(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False


def is_file(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def is_held(lock: Path) -> bool:
    """Whether a launcher has the run."""
    try:
        file = open_file(lock)
    except OSError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)
    return False
