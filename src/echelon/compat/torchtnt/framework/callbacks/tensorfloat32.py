"""torchtnt.framework.callbacks.tensorfloat32."""

from __future__ import annotations

import torch

from echelon.common.errors import UsageError
from echelon.loop.callbacks.whole_run import WholeRun
from echelon.loop.state import State
from echelon.loop.unit import Unit

__all__ = ["EnableTensorFloat32"]


class EnableTensorFloat32(WholeRun):
    """Lets GPUs compute products of float32 matrices, and convolutions, in TensorFloat-32 during a run: several times faster,
    with 10 bits of mantissa instead of 23. What was set before is set again when the run ends, however it ends.

    Args:
        float32_matmul_precision: "highest", "high" or "medium", see `torch.set_float32_matmul_precision`.
    Attributes:
        original_float32_matmul_precision, original_cuda_matmul, original_cudnn: what was set before; None outside a run.
    """

    may_stop = False

    def __init__(self, float32_matmul_precision: str = "high") -> None:
        if float32_matmul_precision not in ("highest", "high", "medium"):
            raise UsageError(f"float32_matmul_precision {float32_matmul_precision!r}: 'highest', 'high' or 'medium'.")
        self.float32_matmul_precision = float32_matmul_precision
        self.original_float32_matmul_precision: str | None = None
        self.original_cuda_matmul: bool | None = None
        self.original_cudnn: bool | None = None

    def begin(self, state: State, unit: Unit) -> None:
        self.original_float32_matmul_precision = torch.get_float32_matmul_precision()
        self.original_cuda_matmul = torch.backends.cuda.matmul.allow_tf32
        self.original_cudnn = torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision(self.float32_matmul_precision)
        # Which also sets torch.backends.cuda.matmul.allow_tf32: torch refuses to be told by both.
        torch.backends.cudnn.allow_tf32 = True

    def finish(self, state: State, unit: Unit) -> None:
        assert self.original_float32_matmul_precision is not None
        assert self.original_cudnn is not None
        torch.set_float32_matmul_precision(self.original_float32_matmul_precision)
        torch.backends.cudnn.allow_tf32 = self.original_cudnn
        self.original_float32_matmul_precision = self.original_cuda_matmul = self.original_cudnn = None
