"""torchtnt.framework.auto_unit: echelon's, with TorchTNT's further arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from echelon.compat.torchtnt.framework.callbacks.dcp_saver import without_effect
from echelon.compat.torchtnt.utils.prepare_module import compile_backward, on_mesh
from echelon.loop import auto, auto_predict
from echelon.loop.auto import TrainStepResults
from echelon.loop.averaged import SWALRParams, SWAParams

__all__ = ["AutoPredictUnit", "AutoUnit", "SWALRParams", "SWAParams", "TrainStepResults"]

T = TypeVar("T")


class AutoUnit(auto.AutoUnit[T]):
    """As `echelon.AutoUnit`.

    Args:
        enable_compiled_autograd: compile backward passes as well, from now on in this process.
        global_mesh: the ranks as a grid, for a TPStrategy or FSDP2Strategy.
        enable_loss_parallel: losses over logits that tensor parallelism has split by class are computed without gathering them.
        gradient_accumulation_sync: no effect: gradients travel once in a window, and the memory for them is bounded by the
            strategy.
    Raises:
        UsageError: compiled autograd of what is not compiled; a mesh for a strategy that has none.
    """

    def __init__(
        self,
        *,
        strategy: Any = None,
        enable_compiled_autograd: bool = False,
        global_mesh: Any = None,
        enable_loss_parallel: bool = False,
        gradient_accumulation_sync: bool = False,
        **options: Any,
    ) -> None:
        without_effect("AutoUnit", gradient_accumulation_sync=gradient_accumulation_sync or None)
        if enable_compiled_autograd:
            compile_backward(options.get("torch_compile_params"))
        super().__init__(strategy=strategy if global_mesh is None else on_mesh(strategy, global_mesh), **options)
        if enable_loss_parallel:  # only then: a step that is not AutoUnit's own is not known to be one
            self.train_step = _in_loss_parallel(self.train_step)  # type: ignore[method-assign]
            self.eval_step = _in_loss_parallel(self.eval_step)  # type: ignore[method-assign]


def _in_loss_parallel(step: Callable[[Any, Any], Any]) -> Any:
    @functools.wraps(step)
    def wrapped(state: Any, data: Any) -> Any:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            return step(state, data)

    return wrapped


class AutoPredictUnit(auto_predict.AutoPredictUnit[T]):
    """As `echelon.AutoPredictUnit`.

    Args:
        global_mesh: the ranks as a grid, for a TPStrategy or FSDP2Strategy.
    """

    def __init__(self, *, strategy: Any = None, global_mesh: Any = None, **options: Any) -> None:
        super().__init__(strategy=strategy if global_mesh is None else on_mesh(strategy, global_mesh), **options)
