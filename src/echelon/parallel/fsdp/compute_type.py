"""The type in which `fully_shard` gathers parameters: what a precision means for a module that is split.

Autocast casts each weight from float32 where it is used, and the backward pass keeps the copies: a whole model in half precision
on every rank. So a split module's parameters are cast before they are gathered, shard by shard, which also halves what travels.
Autocast stays: it has no weight left to cast, and still takes losses, softmax and products of mixed types to the type that it
takes them to on one process. Inputs are not cast: a time step or a target in the arguments keeps its digits.

Shards, reduced gradients and optimizer state stay float32. What computes in float32 under autocast and cannot take weights of
another type, as batch norm cannot, is a unit of its own, gathered in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from echelon.parallel.recipe.blocks import Blocks
from echelon.parallel.recipe.precision import Precision

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["always_under_autocast", "decides", "in_full", "policy_for"]

_ALWAYS = (nn.modules.batchnorm._NormBase, nn.PReLU, nn.Bilinear, nn.EmbeddingBag)  # _NormBase: batch and instance norms
# A GPU's autocast computes these norms in float32, whatever it is given, and its embedding adds up gradients in float32.
_ON_CPU = (nn.LayerNorm, nn.GroupNorm, nn.Embedding)


def policy_for(part: nn.Module, precision: Precision | None, given: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """The user's policy, which wins; the precision decides what it leaves open.

    Args:
        part: what is split with it.
        given: the user's.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = given or MixedPrecisionPolicy()
    if not decides(precision, policy) or not _can_be_cast(part.parameters()):
        return policy
    assert precision is not None
    reduce = policy.reduce_dtype or torch.float32
    return replace(policy, param_dtype=precision.dtype, reduce_dtype=reduce, cast_forward_inputs=False)


def decides(precision: Precision | None, given: MixedPrecisionPolicy | None) -> bool:
    """Whether it is the precision that says in which type parameters are gathered."""
    return precision is not None and precision.dtype is not None and (given is None or given.param_dtype is None)


def _can_be_cast(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether none is of a type that autocast leaves alone, as float64; complex numbers would lose half of them."""
    kept = (torch.float32, torch.bfloat16, torch.float16)
    return all(p.dtype in kept or not (p.is_floating_point() or p.is_complex()) for p in parameters)


def in_full(module: nn.Module, device: torch.device) -> Blocks:
    """The submodules whose parameters are gathered in float32, innermost first."""
    on_cpu = device.type == "cpu"
    kinds = (*_ALWAYS, *_ON_CPU) if on_cpu else _ALWAYS

    def whole(part: nn.Module) -> bool:
        return isinstance(part, kinds) or parametrize.is_parametrized(part) or (on_cpu and _is_a_norm(part))

    found = [(n, m) for n, m in module.named_modules() if n and whole(m) and any(True for _ in m.parameters())]
    return sorted(found, key=lambda pair: -pair[0].count("."))


def _is_a_norm(part: nn.Module) -> bool:
    """A norm of whoever's, by `F.layer_norm` perhaps: vectors are all that it has."""
    return next(part.children(), None) is None and all(p.dim() <= 1 for p in part.parameters(recurse=False))


def always_under_autocast(module: nn.Module, precision: Precision, device: torch.device) -> None:
    """Let a call of the module from a hook, or from a script, be computed as in a step: its weights are in half precision there,
    too, and its arguments are not.
    """
    entered: list[Any] = []

    def before(_: nn.Module, args: Any) -> None:
        entered.append(None if torch.is_autocast_enabled(device.type) else precision.autocast(device))
        if entered[-1] is not None:
            entered[-1].__enter__()

    def after(_: nn.Module, args: Any, made: Any) -> None:
        # Empty if the call failed before this hook's other half.
        if entered and (context := entered.pop()) is not None:
            context.__exit__(None, None, None)

    module.register_forward_pre_hook(torch.compiler.disable(before))
    module.register_forward_hook(torch.compiler.disable(after), always_call=True)
