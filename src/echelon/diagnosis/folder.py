"""What is asked of files in a run's folder, where an enemy may have put others."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

__all__ = ["is_file", "is_folder", "object_in"]


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
