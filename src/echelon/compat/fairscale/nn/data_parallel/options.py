"""What FullyShardedDataParallel's arguments may be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.contracts.errors import UsageError

__all__ = ["ProcessGroupName", "check", "own_parameters", "reduce_group"]

logger = logging.getLogger(__name__)

_HELD_ANYWAY = {"disable_reshard_on_root": True, "bucket_cap_mb": 25}


class ProcessGroupName(StrEnum):
    """What `process_group_reduce_scatter` may be beside a group; torch overlaps its messages whichever it is."""

    default = "default"
    reduce_scatter = "reduce_scatter"


def reduce_group(given: Any, group: dist.ProcessGroup | None) -> Any:
    if isinstance(given, dist.ProcessGroup) or (hasattr(given, "rank") and hasattr(given, "size")):
        return given
    if given is not None and given not in tuple(ProcessGroupName):
        raise TypeError("unsupported type for reduce_scatter process group")
    return group if group is not None else dist.group.WORLD


def check(module: nn.Module, given: dict[str, Any], device: torch.device) -> None:
    if given["fp32_reduce_scatter"] and not given["mixed_precision"]:
        raise ValueError("fp32_reduce_scatter requires mixed_precision=True")
    if given["move_grads_to_cpu"] != given["move_params_to_cpu"] and device.type != "cpu":
        raise UsageError(f"move_grads_to_cpu={given['move_grads_to_cpu']}: gradients lie where the shards do. Leave it out.")
    own = dict(own_parameters(module))
    half = given["compute_dtype"] is torch.float16 and not given["mixed_precision"]
    if half and any(p.dtype is not torch.float16 for p in own.values()):
        raise ValueError("Expecting FP16 param type in pure FP16 mode.")
    if not half and any(p.dtype is torch.float16 for p in own.values()):
        raise ValueError("Expecting FP16 param type in FP32 & MP modes.")
    changed = [name for name, usual in _HELD_ANYWAY.items() if given[name] != usual]
    if changed and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.info("FullyShardedDataParallel(%s=...) has no effect: torch decides", "=..., ".join(changed))


def own_parameters(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Those that are in no wrapper within the module."""
    if isinstance(module, TorchFSDP):
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield path + name, parameter
    for name, child in module.named_children():
        yield from own_parameters(child, f"{path}{name}.")
