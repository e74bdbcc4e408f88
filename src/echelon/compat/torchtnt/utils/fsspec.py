"""torchtnt.utils.fsspec."""

from __future__ import annotations

from typing import Any

from echelon.common.errors import UsageError

__all__ = ["get_filesystem"]


def get_filesystem(path: str, **kwargs: Any) -> Any:
    """The fsspec filesystem in which a path or URL lies.

    Raises:
        UsageError: fsspec is not installed.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise UsageError("get_filesystem needs fsspec: pip install 'echelon[remote]'.") from None
    return url_to_fs(path, **kwargs)[0]
