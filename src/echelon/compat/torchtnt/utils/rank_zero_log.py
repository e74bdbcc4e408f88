"""torchtnt.utils.rank_zero_log: what only rank 0 says."""

from __future__ import annotations

import logging
from typing import Any

from echelon.compat.torchtnt.utils.distributed import get_global_rank

__all__ = [
    "rank_zero_critical",
    "rank_zero_debug",
    "rank_zero_error",
    "rank_zero_info",
    "rank_zero_print",
    "rank_zero_warn",
]

_logger = logging.getLogger(__name__)


def rank_zero_print(*args: Any, **kwargs: Any) -> None:
    if get_global_rank() == 0:
        print(*args, **kwargs)


def _log(name: str, args: Any, logger: logging.Logger | None, stacklevel: int = 1, **kwargs: Any) -> None:
    """The record names the line that called the function below."""
    if get_global_rank() == 0:
        getattr(logger or _logger, name)(*args, stacklevel=stacklevel + 2, **kwargs)


def rank_zero_debug(*args: Any, logger: logging.Logger | None = None, **kwargs: Any) -> None:
    _log("debug", args, logger, **kwargs)


def rank_zero_info(*args: Any, logger: logging.Logger | None = None, **kwargs: Any) -> None:
    _log("info", args, logger, **kwargs)


def rank_zero_warn(*args: Any, logger: logging.Logger | None = None, **kwargs: Any) -> None:
    _log("warning", args, logger, **kwargs)


def rank_zero_error(*args: Any, logger: logging.Logger | None = None, **kwargs: Any) -> None:
    _log("error", args, logger, **kwargs)


def rank_zero_critical(*args: Any, logger: logging.Logger | None = None, **kwargs: Any) -> None:
    _log("critical", args, logger, **kwargs)
