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


def rank_zero_debug(*args: Any, logger: logging.Logger | None = None, stacklevel: int = 1, **kwargs: Any) -> None:
    if get_global_rank() == 0:
        (logger or _logger).debug(*args, stacklevel=stacklevel + 1, **kwargs)


def rank_zero_info(*args: Any, logger: logging.Logger | None = None, stacklevel: int = 1, **kwargs: Any) -> None:
    if get_global_rank() == 0:
        (logger or _logger).info(*args, stacklevel=stacklevel + 1, **kwargs)


def rank_zero_warn(*args: Any, logger: logging.Logger | None = None, stacklevel: int = 1, **kwargs: Any) -> None:
    if get_global_rank() == 0:
        (logger or _logger).warning(*args, stacklevel=stacklevel + 1, **kwargs)


def rank_zero_error(*args: Any, logger: logging.Logger | None = None, stacklevel: int = 1, **kwargs: Any) -> None:
    if get_global_rank() == 0:
        (logger or _logger).error(*args, stacklevel=stacklevel + 1, **kwargs)


def rank_zero_critical(*args: Any, logger: logging.Logger | None = None, stacklevel: int = 1, **kwargs: Any) -> None:
    if get_global_rank() == 0:
        (logger or _logger).critical(*args, stacklevel=stacklevel + 1, **kwargs)
