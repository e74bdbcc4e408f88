"""Checks of files in a run's folder, into which another user may have put files."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

__all__ = ["is_file", "is_folder", "object_in"]


def object_in(text: str) -> dict[str, Any] | None:
    """The JSON object in a text, nested to any depth: readers of flight records look at known fields only."""
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
