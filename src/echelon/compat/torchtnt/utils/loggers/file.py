"""torchtnt.utils.loggers.file."""

from echelon.observe.loggers.file import FileLogger

__all__ = ["FileLogger"]
