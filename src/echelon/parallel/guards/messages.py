"""Explains torch's errors about code that gets parts of parameters or features where it expects whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.guards.guard import Guard, explain
from echelon.parallel.names import class_name
from echelon.parallel.shards import is_split
from echelon.parallel.tensor.layers import shared_axis, split_outputs

__all__ = ["SHAPES", "SplitMessages", "explain_step", "explained", "gathers_in", "meaning"]

# torch's words for a part of the features where all are expected.
SHAPES = (
    "shapes cannot be multiplied",
    "must match the size of tensor",
    "is invalid for input of size",
    "must match except in dim",
)

# torch's words for operands of two dtypes: matrix products and norms, indices that are written to, convolutions.
_TYPES = ("the same dtype", "dtypes match", "same dtypes", "expected scalar type", "should be the same")
# torch's names of the dtypes in which parameters may be gathered.
_IN_WORDS = {torch.bfloat16: "BFloat16", torch.float16: "Half"}


def gathers_in(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Record the dtype in which the module's parameters are gathered; None for their own."""
    vars(module)["_gathered_in"] = dtype


class SplitMessages(Guard):
    """Explains torch's errors in passes of a module that is split over ranks, for example if a script calls a part of a sharded
    model directly (tests/parallel/test_strategy_limits.py).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def explain(self, error: BaseException) -> LayoutError | None:
        message = meaning(self._module, str(error)) if isinstance(error, RuntimeError | AssertionError) else None
        return None if message is None else LayoutError(f"{message} torch says: {str(error).partition(chr(10))[0]}")


@contextmanager
def explained(module: nn.Module) -> Iterator[None]:
    """Context around passes of a module that is split over ranks.

    Raises:
        UsageError: instead of torch's error, which is its cause.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        explain([SplitMessages(module)], error)
        raise


# torch's words for an optimizer's operation on all elements of a parameter, or on parameters of several meshes.
_OF_STEPS = (
    "in-place operations that require placement changes",
    "cross mesh",
    "must have the same mesh",
    "no sharding strategy",
    "mixed torch.Tensor and DTensor",
    "would remove or reshape sharded dimension",
    "flatten unevenly sharded tensor",
)


def explain_step(optimizer: torch.optim.Optimizer, error: Exception) -> None:
    """
    Raises:
        UsageError: instead of torch's error, which is its cause: the optimizer cannot work with parts of parameters.
    """
    if _is_torchs_assertion(error) or any(each in str(error) for each in _OF_STEPS):
        whole = "'ddp'" if isinstance(optimizer, torch.optim.LBFGS) else "'ddp' or 'zero1'"  # zero1 refuses LBFGS, too
        raise LayoutError(
            f"{type(optimizer).__name__} cannot step parameters that are split over the ranks (torch {torch.__version__}). Train "
            f"under {whole}, whose parameters are whole, or use another optimizer; an optimizer of your own must make "
            f"its state by torch.zeros_like(p). torch says: {str(error) or 'AssertionError'}"
        ) from error


def _is_torchs_assertion(error: Exception) -> bool:
    """Whether torch's code for split tensors has raised it: without words, if an operation in place has operands split unlike."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_by = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, AssertionError) and raised_by.startswith("torch.distributed.tensor")


def meaning(module: nn.Module, text: str) -> str | None:
    """The explanation of torch's words for a module that is split over ranks; None if they have no known meaning."""
    name = class_name(module)
    if "appears to not have been used in the graph" in text and "_pipeline_gate" in vars(module):
        return (
            f"compute_loss takes a gradient of the outputs of {name} with respect to its inputs, but in a pipeline another stage "
            "has the inputs. Train without pp."
        )
    if "appears to not have been used in the graph" in text and any(map(is_split, module.parameters())):
        return (
            f"if the gradient is that of parameters of {name}: they are split over the ranks, and its passes use gathered ones "
            "in their place. Take gradients of inputs or activations, or train under 'ddp' or 'zero1'."
        )
    if "RegisterPostBackward" in text and "inplace" in text:
        return (
            f"{name} or one of its blocks changes its input in place (x += ..., nn.ReLU(inplace=True) at its beginning), which "
            "is impossible if blocks are sharded one by one. Make a new tensor (x = x + ...); or train under 'ddp'."
        )
    if "uniform" in text and "dtype" in text:  # whole gradients are kept in another dtype than the passes compute in
        return (
            f"parameters of one block of {name} have gradients in some micro-batches of an accumulation window and none in "
            "others, so in a lower precision their reduction cannot wait for the last micro-batch. Leave out "
            "requires_gradient_sync=False."
        )
    if "mixed torch.Tensor and DTensor" in text or "on inputs with different meshes" in text:
        if shared_axis(module) is not None:
            return (
                f"code of {name} reads a parameter that is split over the ranks. Leave a layer out of the tensor-parallel plan "
                f"if code outside of it reads its weight; and take the loss from a call of {name} itself, not of a part of it."
            )
        return (
            f"the loss must come from a call of {name} itself: its parameters are split over the ranks, as their gradients are, "
            "and only its forward gathers them; a direct call of a method or a submodule, or a read of a parameter, does not. Do "
            "the work in forward, chosen by an argument, and read a block's parameter in the block's own forward, or by "
            "full_tensor() on all ranks; or train under 'ddp' or 'zero1'. Give a copy of it, such as an average or a target, to "
            "prepare() together with it, so that the copy is split alike; buffers stay whole, so average them separately from "
            "parameters (ModelEmaV3(foreach=False), AveragedModel(use_buffers=False)). Outside of forward, "
            "parameter.new_zeros(...) makes a DTensor: use torch.zeros(..., device=...)."
        )
    if "must have the same mesh" in text:
        return (
            f"parameters of {name} are split over different ranks, so no operation can take several of them together, as "
            "torch.nn.utils.clip_grad_norm_ does. Clip by window.clip_grad_norm_(max_norm), clip_grad_norm= of an AutoUnit, or "
            "echelon.layouts.clip_grad_norm_(module, max_norm) in a step of your own; compute other sums parameter by "
            "parameter, from full_tensor()."
        )
    half = vars(module).get("_gathered_in")
    if half in _IN_WORDS and _IN_WORDS[half] in text and any(each in text for each in _TYPES):
        return (
            f"parameters of {name} are gathered in {half}, and one of them is used with a tensor of another dtype. A layer "
            "within torch.autocast(..., enabled=False) must get its input in its weight's dtype: "
            "layer(x.to(layer.weight.dtype)). To have its weight in float32 there, as under 'ddp', pass "
            "FSDPStrategy(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.float32)), which is fsdp= of Layout: then "
            "autocast casts weights where they are used."
        )
    if "storage of size 0" in text:
        return (
            f"the backward pass reached parameters of {name} that were not gathered for it: a block returns tensors inside of "
            "an object that is not searched for tensors, such as a generator or a function. Return them in a tuple, a dict or a "
            "dataclass; or train under 'ddp'."
        )
    if "Sparse" in text and ("fsdp::" in text or "backend" in text):
        return (
            f"{name} has sparse gradients, which cannot be split over the ranks. Make its embeddings with sparse=False, or train "
            "under 'ddp'."
        )
    if shared_axis(module) is not None and any(each in text for each in SHAPES):
        parts = split_outputs(module)
        such = f", such as {parts[-1]}," if parts else ""
        return (
            f"tensor parallelism: code of {name} expects all features and gets this rank's part of them, or the reverse. A layer "
            f"that is 'colwise' in the plan{such} must be followed by a 'rowwise' layer, with only functions of single features "
            "between them; 'colwise_gather' returns all features, and 'rowwise_split' takes all."
        )
    return None
