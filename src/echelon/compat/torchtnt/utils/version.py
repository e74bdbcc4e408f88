"""torchtnt.utils.version."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

from echelon.common.errors import UsageError

if TYPE_CHECKING:
    from packaging.version import Version

__all__ = ["get_python_version", "get_torch_version", "is_torch_version_geq", "is_windows"]


def is_windows() -> bool:
    return platform.system() == "Windows"


def get_python_version() -> Version:
    return _version(platform.python_version())


def get_torch_version() -> Version:
    return _version(str(torch.__version__))


def is_torch_version_geq(version: str) -> bool:
    """Whether torch is at least this version."""
    found: Any = torch.__version__  # compares as a version, not as text
    return bool(found >= version)


def _version(text: str) -> Version:
    try:
        from packaging.version import Version
    except ImportError:
        raise UsageError("versions as values need the package packaging: pip install packaging.") from None
    return Version(text)
