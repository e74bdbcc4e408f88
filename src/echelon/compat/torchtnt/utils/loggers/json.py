"""torchtnt.utils.loggers.json."""

from echelon.observe.loggers.file import JSONLogger

__all__ = ["JSONLogger"]
