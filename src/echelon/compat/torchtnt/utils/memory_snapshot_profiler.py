"""torchtnt.utils.memory_snapshot_profiler."""

from echelon.world.memory_snapshot import MemorySnapshotParams, MemorySnapshotProfiler, MemorySnapshotProfilerBase

__all__ = ["MemorySnapshotParams", "MemorySnapshotProfiler", "MemorySnapshotProfilerBase"]
