"""torchtnt.framework.callbacks.garbage_collector."""

from echelon.loop.callbacks.garbage import GarbageCollector

__all__ = ["GarbageCollector"]
