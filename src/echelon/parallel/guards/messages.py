"""What torch says when code meets parts of parameters or of features where it expects the whole, in words that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.guards.guard import Guard
from echelon.parallel.names import class_name
from echelon.parallel.tensor.layers import shared_axis, split_outputs

__all__ = ["SHAPES", "SplitMessages", "explain_step", "explained", "gathers_in", "meaning"]

# What torch says of a part of the features where all are expected.
SHAPES = (
    "shapes cannot be multiplied",
    "must match the size of tensor",
    "is invalid for input of size",
    "must match except in dim",
)

# What torch says of operands of two types: matrix products and norms, indices that are written to, convolutions.
_TYPES = ("the same dtype", "dtypes match", "same dtypes", "expected scalar type", "should be the same")
# What it calls the types in which parameters may be gathered.
_IN_WORDS = {torch.bfloat16: "BFloat16", torch.float16: "Half"}


def gathers_in(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Say in which type the module's parameters are gathered to compute; None is their own."""
    vars(module)["_gathered_in"] = dtype


class SplitMessages(Guard):
    """Explains what torch says in passes of a module that is split over ranks.

    It saves who calls a part of a sharded model by itself (tests/parallel/test_layout_errors.py).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def explain(self, error: BaseException) -> LayoutError | None:
        message = meaning(self._module, str(error)) if isinstance(error, RuntimeError | AssertionError) else None
        return None if message is None else LayoutError(f"{message} torch says: {str(error).partition(chr(10))[0]}")


@contextmanager
def explained(module: nn.Module) -> Iterator[None]:
    """Around passes of a module that is split over ranks.

    Raises:
        UsageError: in the place of torch's error, which is its cause.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        if (message := SplitMessages(module).explain(error)) is None:
            raise
        raise message.with_traceback(error.__traceback__) from error  # whose line it is


# What torch says of an operation that an optimizer does with all elements of a parameter, or with parameters of several meshes.
_OF_STEPS = (
    "in-place operations that require placement changes",
    "cross mesh",
    "must have the same mesh",
    "no sharding strategy",
    "mixed torch.Tensor and DTensor",
    "would remove or reshape sharded dimension",
)


def explain_step(optimizer: torch.optim.Optimizer, error: RuntimeError) -> None:
    """
    Raises:
        UsageError: in the place of torch's error, which is its cause: the optimizer cannot work with parts of parameters.
    """
    if any(each in str(error) for each in _OF_STEPS):
        raise LayoutError(
            f"{type(optimizer).__name__} cannot step parameters that are split over the ranks (torch {torch.__version__}). Train "
            "under 'ddp' or 'zero1', whose parameters are whole, or take another optimizer; one of your own makes its state like "
            f"the parameter, by torch.zeros_like(p). torch says: {error}"
        ) from error


def meaning(module: nn.Module, text: str) -> str | None:
    """What torch's words mean for a module that is split over ranks; None if they say nothing of that."""
    name = class_name(module)
    if "appears to not have been used in the graph" in text and "_pipeline_gate" in vars(module):
        return (
            f"compute_loss asks for a gradient of what {name} gives, by what goes into it: in a pipeline another stage has that. "
            "Train without pp."
        )
    if "RegisterPostBackward" in text and "inplace" in text:
        return (
            f"{name} or a block of it changes in place what it is given (x += ..., nn.ReLU(inplace=True) at its beginning), "
            "which cannot be where blocks are sharded one by one. Let it make a new tensor (x = x + ...); or train under 'ddp'."
        )
    if "uniform" in text and "dtype" in text:  # of whole gradients, which are kept in another type than that of the passes
        return (
            f"parameters of one block of {name} have gradients in some micro-batches of an accumulation window and none in "
            "others, which cannot wait for the last one in a lower precision. Leave out requires_gradient_sync=False."
        )
    if "mixed torch.Tensor and DTensor" in text or "on inputs with different meshes" in text:
        if shared_axis(module) is not None:
            return (
                f"code of {name} reads a parameter that is split over the ranks. Leave a layer whose weight other code than its "
                f"own reads out of the tensor-parallel plan; and take the loss from a call of {name} itself, not of a part."
            )
        return (
            f"the loss must come from a call of {name} itself: its parameters are split over the ranks, and are put together in "
            "its forward only, not for a method or a part that is called directly, nor where they are read. Let forward do it, "
            "with an argument that says what; or train under 'ddp' or 'zero1'. A copy of it, such as an average or a target, is "
            "given to prepare() with it, and is split as it is; buffers stay whole, so average them apart from parameters "
            "(ModelEmaV3(foreach=False), AveragedModel(use_buffers=False)). What parameter.new_zeros(...) makes outside of "
            "forward is a DTensor: make it by torch.zeros(..., device=...)."
        )
    if "must have the same mesh" in text:
        return (
            f"parameters of {name} are split over different ranks, so that no operation takes several of them together, as "
            "torch.nn.utils.clip_grad_norm_ does. Clip by window.clip_grad_norm_(max_norm), or clip_grad_norm= of an AutoUnit; "
            "sum up anything else parameter by parameter, from full_tensor()."
        )
    half = vars(module).get("_gathered_in")
    if half in _IN_WORDS and _IN_WORDS[half] in text and any(each in text for each in _TYPES):
        return (
            f"parameters of {name} are gathered in {half}, and one of them meets numbers of another type. A layer within "
            "torch.autocast(..., enabled=False) must have its input in the type of its weight: layer(x.to(layer.weight.dtype)). "
            "To have its weight in float32 there, as under 'ddp', give "
            "FSDPStrategy(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.float32)), which is fsdp= of Layout: then "
            "autocast casts weights where they are used."
        )
    if "storage of size 0" in text:
        return (
            f"the backward pass came to parameters of {name} that were not put together for it: a block gives tensors in "
            "something in which none can be found, such as a generator or a function. Give them in a tuple, a dict or a "
            "dataclass; or train under 'ddp'."
        )
    if "Sparse" in text and ("fsdp::" in text or "backend" in text):
        return (
            f"{name} has gradients that are sparse tensors, which cannot be split over the ranks. Make its embeddings with "
            "sparse=False, or train under 'ddp'."
        )
    if shared_axis(module) is not None and any(each in text for each in SHAPES):
        parts = split_outputs(module)
        such = f", such as {parts[-1]}," if parts else ""
        return (
            f"tensor parallelism: code of {name} takes all features, and gets a rank's part of them, or the reverse. After a "
            f"layer that is 'colwise' in the plan{such} comes a 'rowwise' one, with functions of single features between them; "
            "'colwise_gather' gives all features, and 'rowwise_split' takes all."
        )
    return None
