"""torchtnt.framework.callbacks.pytorch_profiler."""

from echelon.loop.callbacks.monitors import PyTorchProfiler

__all__ = ["PyTorchProfiler"]
