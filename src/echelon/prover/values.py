"""A unit's parameters and buffers by the names that their author gave them, whole and on the host; its loss as a number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from echelon.loop.auto import AutoUnit
from echelon.parallel.registry import unwrapped

__all__ = [
    "flattened",
    "innermost",
    "loss_in",
    "modules_of",
    "named_values",
    "number_in",
    "parameters_of",
    "plain_name",
    "switch_off_dropout",
    "whole",
    "whole_parameters",
    "wrappers_of",
]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def parameters_of(unit: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The unit's parameters under the names that their author gave them."""
    for prefix, module in modules_of(unit):
        for name, parameter in module.named_parameters():
            yield prefix + plain_name(name), parameter


def whole_parameters(unit: Any) -> dict[str, torch.Tensor]:
    """All parameters, gathered, on the host. Collective if anything is sharded."""
    with contextlib.ExitStack() as gathered:
        for module in flattened(unit):
            gathered.enter_context(FullyShardedDataParallel.summon_full_params(module, writeback=False))
        return {n: whole(p) for n, p in parameters_of(unit)}


def flattened(unit: Any) -> list[nn.Module]:
    """Modules in the older FullyShardedDataParallel, whose parameters are parts of one flat tensor."""
    return [m for _, m in modules_of(unit) if isinstance(m, FullyShardedDataParallel)]


def named_values(unit: Any) -> dict[str, torch.Tensor]:
    """Buffers by name."""
    return {prefix + plain_name(n): b for prefix, module in modules_of(unit) for n, b in module.named_buffers()}


def modules_of(unit: Any) -> list[tuple[str, nn.Module]]:
    if isinstance(unit, AutoUnit):
        return [("", unit.prepared.unwrapped)]
    modules = unit.tracked_modules()
    return [(f"{name}." if len(modules) > 1 else "", module) for name, module in modules.items()]


def wrappers_of(unit: Any) -> list[nn.Module]:
    """The unit's modules as they are called."""
    return [unit.prepared.module] if isinstance(unit, AutoUnit) else list(unit.tracked_modules().values())


def switch_off_dropout(unit: Any) -> int:
    """In all modules of the unit: in another process nobody can repeat what they draw. Returns how many there were."""
    found = 0
    for _, module in modules_of(unit):
        for inner in module.modules():
            if isinstance(inner, _DROPOUTS) and inner.p > 0:
                inner.p, found = 0.0, found + 1
    return found


def innermost(module: nn.Module) -> nn.Module:
    """Inside a wrapper, which sends buffers round before it calls this; DataParallel calls copies of its module."""
    return module if isinstance(module, nn.DataParallel) else unwrapped(module)


def plain_name(name: str) -> str:
    """Without the prefixes of DistributedDataParallel, compile, checkpoint wrappers and the older FSDP."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    parts = [p for p in name.split(".") if p not in wrappers]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, gathered if it is sharded: collective then."""
    full = getattr(tensor, "full_tensor", None)
    copy = (full() if full is not None else tensor).detach().cpu().clone()
    return copy.to_dense() if copy.is_sparse else copy


def loss_in(result: Any) -> Any:
    """The loss in what a train_step returned: the scalar itself, the first of a tuple, or under the key "loss"."""
    if isinstance(result, dict):
        return result.get("loss")
    if isinstance(result, (tuple, list)) and result:
        return result[0]
    return result


def number_in(loss: Any) -> float | None:
    """A loss as a number; None if it is none."""
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 else None
    return float(loss) if isinstance(loss, (int, float)) else None
