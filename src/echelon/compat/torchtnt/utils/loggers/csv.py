"""torchtnt.utils.loggers.csv."""

from pathlib import Path

from echelon.observe.loggers import file

__all__ = ["CSVLogger"]


class CSVLogger(file.CSVLogger):
    """As `echelon.loggers.CSVLogger`.

    Args:
        async_write: without effect: a write appends a few lines, and does not need a thread.
    """

    def __init__(
        self, path: str | Path, steps_before_flushing: int = 100, log_all_ranks: bool = False, async_write: bool = False
    ) -> None:
        super().__init__(path, steps_before_flushing, log_all_ranks)
