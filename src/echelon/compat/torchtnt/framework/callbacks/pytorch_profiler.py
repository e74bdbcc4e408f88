"""torchtnt.framework.callbacks.pytorch_profiler."""

from echelon.loop.callbacks.profiling import PyTorchProfiler

__all__ = ["PyTorchProfiler"]
