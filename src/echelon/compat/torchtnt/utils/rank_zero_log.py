"""torchtnt.utils.rank_zero_log: what only rank 0 says."""

from __future__ import annotations

import logging
from collections.abc import Callable
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


def _at(level: int) -> Callable[..., None]:
    def log(*args: Any, logger: logging.Logger | None = None, stacklevel: int = 1, **kwargs: Any) -> None:
        if get_global_rank() == 0:
            (logger or _logger).log(level, *args, stacklevel=stacklevel + 1, **kwargs)

    return log


rank_zero_debug, rank_zero_info, rank_zero_warn = _at(logging.DEBUG), _at(logging.INFO), _at(logging.WARNING)
rank_zero_error, rank_zero_critical = _at(logging.ERROR), _at(logging.CRITICAL)
