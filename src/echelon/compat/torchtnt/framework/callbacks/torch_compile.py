"""torchtnt.framework.callbacks.torch_compile."""

from echelon.loop.callbacks.housekeeping import TorchCompile

__all__ = ["TorchCompile"]
