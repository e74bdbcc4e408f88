"""torchtnt.framework.callbacks.memory_snapshot."""

from echelon.loop.callbacks.profiling import MemorySnapshot

__all__ = ["MemorySnapshot"]
