"""torchtnt.utils.version."""

from __future__ import annotations

from typing import Any

import torch

from echelon.compat.torchtnt.absent import absent

__all__ = ["is_torch_version_geq"]


def is_torch_version_geq(version: str) -> bool:
    """Whether torch is at least this version."""
    installed: Any = torch.__version__  # compares as a version, not as text
    return bool(installed >= version)


__getattr__ = absent("utils.version")
