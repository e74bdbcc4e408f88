"""torchtnt.framework.callbacks.garbage_collector."""

from echelon.loop.callbacks.housekeeping import GarbageCollector

__all__ = ["GarbageCollector"]
