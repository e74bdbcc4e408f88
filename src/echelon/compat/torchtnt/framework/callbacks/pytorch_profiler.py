"""torchtnt.framework.callbacks.pytorch_profiler."""

from echelon.loop.callbacks.profiler import PyTorchProfiler

__all__ = ["PyTorchProfiler"]
