"""torchtnt.framework.callbacks.tensorfloat32."""

from echelon.loop.callbacks.housekeeping import EnableTensorFloat32

__all__ = ["EnableTensorFloat32"]
