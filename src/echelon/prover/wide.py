"""In float64, casts to float32 in the script's own code are casts to float64.

`logits.float()` and `softmax(..., dtype=torch.float32)` mean "in full precision"; in a model of float64 they would be its
narrowest part, and float64 could decide nothing.

torch 2.13 has no public name for TorchDispatchMode. The public TorchFunctionMode will not do: it is off in a backward pass, in
which checkpointed blocks run their forward pass again, and would do so in another type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["without_narrow_casts"]


@contextlib.contextmanager
def without_narrow_casts() -> Iterator[None]:
    """For what this thread calls. Optimizers keep their types: fused kernels count steps in float32."""
    mode = _Wide()
    handles = [register_optimizer_step_pre_hook(mode.rest), register_optimizer_step_post_hook(mode.go_on)]
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Wide(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rests = False

    def rest(self, *_: Any) -> None:
        self._rests = True

    def go_on(self, *_: Any) -> None:
        self._rests = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32 and not self._rests and _is_cast(args):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def _is_cast(args: Any) -> bool:
    """New tensors keep the type that is asked for: a file's values, for one, are loaded into them."""
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype is not torch.float32
