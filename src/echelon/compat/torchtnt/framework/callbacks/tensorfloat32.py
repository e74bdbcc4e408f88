"""torchtnt.framework.callbacks.tensorfloat32."""

from __future__ import annotations

import torch

from echelon.contracts.errors import UsageError
from echelon.loop.callbacks.whole_run import WholeRun
from echelon.loop.state import State
from echelon.loop.unit import Unit

__all__ = ["EnableTensorFloat32"]


class EnableTensorFloat32(WholeRun):
    """Lets GPUs compute products of float32 matrices, and convolutions, in TensorFloat-32 during a run: several times faster,
    with 10 bits of mantissa instead of 23. What was set before is set again when the run ends, however it ends.

    Args:
        float32_matmul_precision: "highest", "high" or "medium", see `torch.set_float32_matmul_precision`.
    """

    may_stop = False

    def __init__(self, float32_matmul_precision: str = "high") -> None:
        if float32_matmul_precision not in ("highest", "high", "medium"):
            raise UsageError(f"float32_matmul_precision {float32_matmul_precision!r}: 'highest', 'high' or 'medium'.")
        self._precision = float32_matmul_precision
        self._before = ("highest", True)

    def begin(self, state: State, unit: Unit) -> None:
        self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        _set_float32(self._precision, True)

    def finish(self, state: State, unit: Unit) -> None:
        _set_float32(*self._before)


def _set_float32(matmul: str, convolutions: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = convolutions
