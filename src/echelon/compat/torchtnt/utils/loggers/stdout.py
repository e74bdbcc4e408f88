"""torchtnt.utils.loggers.stdout."""

from echelon.observe.loggers.stdout import StdoutLogger

__all__ = ["StdoutLogger"]
