"""Python's own logging, where many ranks run the same line: which of them says it, and who did."""

from __future__ import annotations

import logging
from collections.abc import Collection, MutableMapping
from typing import Any, Literal

from echelon.common.errors import LoggerError, require
from echelon.observe.loggers.logger import rank

__all__ = ["RankLogger", "get_logger"]

Ranks = int | Collection[int] | Literal["all"]


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages rank 0 alone writes, unless they are given `ranks`: a number, several, or "all".

    A message of other ranks than 0 begins with its rank. Every record has the attribute `rank`, for formats and filters.
    """

    def log(self, level: int, msg: object, *args: object, ranks: Ranks = 0, **kwargs: Any) -> None:  # type: ignore[override]
        if not self.isEnabledFor(level):
            return
        here = rank()
        if not _says(ranks, here):
            return
        if ranks != 0:
            msg = f"[rank {here}] {msg}"
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "rank": here}
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
        super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs


def _says(ranks: Ranks, here: int) -> bool:
    if isinstance(ranks, str):
        require(ranks == "all", "ranks", "a rank, several, or 'all'", ranks, kind=LoggerError)
        return True
    return here == ranks if isinstance(ranks, int) else here in ranks


def get_logger(name: str | None = None) -> RankLogger:
    """`logging.getLogger(name)`, of which rank 0 alone writes.

        log = echelon.loggers.get_logger(__name__)
        log.info("%d samples", n)                      # rank 0
        log.warning("nan in batch %d", i, ranks="all")  # [rank 3] nan in batch 7

    Levels, handlers and formats are Python's: without `logging.basicConfig(level=logging.INFO)` only warnings are shown.
    """
    return RankLogger(logging.getLogger(name), None)
