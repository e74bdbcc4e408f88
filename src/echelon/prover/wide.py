"""In float64, casts to fewer digits in the script's own code are casts to float64, and in an optimizer those to half precision.

`logits.float()` and `softmax(..., dtype=torch.float32)` mean "in full precision"; in a model of float64 they would be its
narrowest part, and float64 could decide nothing. So would be a model and batches in half precision, and what Muon and its like
compute in bfloat16: products that each sharding sums up in another order.

Random operators take other numbers from an RNG for float64 than for float32, after which all is other: initial values, noise, the
order of a shuffle. So they draw in float32 here, and what they drew is widened.

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

__all__ = ["tensor_first", "without_narrow_casts"]

_SINGLE, _HALF = (torch.float32,), (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def without_narrow_casts() -> Iterator[None]:
    """For what this thread calls. Optimizers keep float32, in which fused kernels count steps."""
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

    def rest(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(p.dtype in _HALF for group in optimizer.param_groups for p in group["params"]):
            return  # whose states are of the parameters' own type
        self._rests = True
        for state in optimizer.state.values():  # which it may have made before its first step
            state.update({k: v.double() for k, v in state.items() if isinstance(v, torch.Tensor) and v.dtype in _HALF})

    def go_on(self, *_: Any) -> None:
        self._rests = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tensor_first(func, args), kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _drawn(func, args, kwargs)
        dtype = kwargs.get("dtype")
        # What an optimizer makes in half precision meets what it casts.
        if dtype in _HALF if self._rests else dtype in (*_SINGLE, *_HALF) and _is_cast(args, dtype):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def tensor_first(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """torch hands a tensor that stands for a number to a dispatch mode as a number, and does not take it back (2.13)."""
    if args and isinstance(args[0], (int, float, complex)) and func._schema.arguments[0].type.kind() == "TensorType":
        return torch.tensor(args[0]), *args[1:]
    return args


def _drawn(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What is drawn from shapes and chances alone: in float32, then widened. Others compute with what they draw."""
    name = func._schema.name.removeprefix("aten::")
    if name in _IN_PLACE and args[0].dtype is torch.float64:
        return args[0].copy_(func(torch.empty_like(args[0], dtype=torch.float32), *args[1:], **kwargs))
    if name in _FROM_CHANCES and args[0].dtype is torch.float64:
        drawn = func(args[0].float(), *args[1:], **kwargs)
        return drawn.double() if drawn.is_floating_point() else drawn
    if name in _FACTORIES and _type_of(args, kwargs) is torch.float64:
        return func(*args, **{**kwargs, "dtype": torch.float32}).double()
    return func(*args, **kwargs)


def _type_of(args: Any, kwargs: dict[str, Any]) -> torch.dtype:
    like = args[0].dtype if isinstance(args[0], torch.Tensor) else torch.get_default_dtype()
    dtype: torch.dtype = kwargs.get("dtype") or like
    return dtype


_IN_PLACE = ("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_")
_FROM_CHANCES = ("bernoulli", "multinomial")
_FACTORIES = ("rand", "randn", "rand_like", "randn_like")


def _is_cast(args: Any, dtype: torch.dtype) -> bool:
    """New tensors keep the type that is asked for: a file's values, for one, are loaded into them."""
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype is not dtype
