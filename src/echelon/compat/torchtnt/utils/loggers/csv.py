"""torchtnt.utils.loggers.csv."""

from echelon.observe.loggers.file import CSVLogger

__all__ = ["CSVLogger"]
