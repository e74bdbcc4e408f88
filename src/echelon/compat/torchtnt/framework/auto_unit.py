"""torchtnt.framework.auto_unit: echelon's, with TorchTNT's further arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from echelon.compat.torchtnt.framework.callbacks.dcp_saver import without_effect
from echelon.contracts.errors import UsageError
from echelon.loop import auto, auto_predict
from echelon.loop.auto import TrainStepResults
from echelon.loop.averaged import SWALRParams, SWAParams
from echelon.parallel.fsdp2 import FSDP2Strategy
from echelon.parallel.strategy import resolve

__all__ = ["AutoPredictUnit", "AutoUnit", "SWALRParams", "SWAParams", "TrainStepResults"]

T = TypeVar("T")


def _over(strategy: Any, global_mesh: Any) -> Any:
    """The strategy with the ranks' grid, which TorchTNT gives beside it."""
    if global_mesh is None:
        return strategy
    if hasattr(strategy, "over"):  # TorchTNT's TPStrategy
        return strategy.over(global_mesh)
    chosen = resolve(strategy)
    if not isinstance(chosen, FSDP2Strategy) or chosen.mesh is not None:
        raise UsageError(f"global_mesh is for TPStrategy, or an FSDP2Strategy without mesh=; here it meets {chosen!r}.")
    return replace(chosen, mesh=global_mesh.dp_mesh)


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
            if options.get("torch_compile_params") is None:
                raise UsageError("enable_compiled_autograd: only a compiled module's backward is. Give torch_compile_params.")
            import torch._dynamo  # its config has no other door

            torch._dynamo.config.compiled_autograd = True
        super().__init__(strategy=_over(strategy, global_mesh), **options)
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
        super().__init__(strategy=_over(strategy, global_mesh), **options)
