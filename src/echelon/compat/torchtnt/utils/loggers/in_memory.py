"""torchtnt.utils.loggers.in_memory."""

from echelon.observe.loggers.memory import InMemoryLogger

__all__ = ["InMemoryLogger"]
