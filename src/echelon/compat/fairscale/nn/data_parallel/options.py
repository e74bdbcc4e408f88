"""What FullyShardedDataParallel's arguments may be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.common.errors import LayoutError
from echelon.compat.fairscale.nn.data_parallel.torch_fsdp import claimed

__all__ = ["Options", "ProcessGroupName", "check", "own_parameters"]

logger = logging.getLogger(__name__)

_HELD_ANYWAY = {"disable_reshard_on_root": True, "bucket_cap_mb": 25}


class ProcessGroupName(StrEnum):
    """What `process_group_reduce_scatter` may be beside a group; torch overlaps its messages whichever it is."""

    default = "default"
    reduce_scatter = "reduce_scatter"


@dataclass(frozen=True)
class Options:
    """FullyShardedDataParallel's arguments after the module and its group, in their order."""

    process_group_reduce_scatter: Any
    reshard_after_forward: bool
    disable_reshard_on_root: bool
    mixed_precision: bool
    fp32_reduce_scatter: bool
    flatten_parameters: bool
    move_params_to_cpu: bool
    compute_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    move_grads_to_cpu: bool | None
    bucket_cap_mb: int
    compute_device: torch.device | None
    no_broadcast_optim_state: bool | None
    state_dict_device: torch.device | None
    clear_autocast_cache: bool
    force_input_to_fp32: bool
    verbose: bool
    cpu_offload: bool
    state_dict_on_rank_0_only: bool
    gradient_predivide_factor: float | None

    @property
    def offloads(self) -> bool:
        """Whether shards live in host memory, by either name."""
        return self.move_params_to_cpu or self.cpu_offload

    @property
    def low_precision(self) -> torch.dtype | None:
        """What is computed in, if that is not what parameters are kept in."""
        return (self.compute_dtype or torch.float16) if self.mixed_precision else None

    def attributes(self, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Any]:
        """What programs read of the wrapper: the arguments, with what stands for None."""
        low = self.low_precision
        return vars(self) | {
            "process_group_reduce_scatter": reduce_group(self.process_group_reduce_scatter, group),
            "move_params_to_cpu": self.offloads,
            "cpu_offload": self.offloads,
            "move_grads_to_cpu": self.offloads if self.move_grads_to_cpu is None else self.move_grads_to_cpu,
            "compute_dtype": self.compute_dtype or low or torch.float32,
            "buffer_dtype": self.buffer_dtype or self.compute_dtype or low or torch.float32,
            "state_dict_device": self.state_dict_device or device,
            "uncollected_opt_state": {},
        }


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
        raise LayoutError(f"move_grads_to_cpu={given['move_grads_to_cpu']}: gradients lie where the shards do. Leave it out.")
    own = dict(own_parameters(module))
    half = given["compute_dtype"] is torch.float16 and not given["mixed_precision"]
    if half and any(p.dtype is not torch.float16 for p in own.values()):
        raise ValueError("Expecting FP16 param type in pure FP16 mode.")
    if not half and any(p.dtype is torch.float16 for p in own.values()):
        raise ValueError("Expecting FP16 param type in FP32 & MP modes.")
    if twice := claimed(own):
        raise LayoutError(f"{', '.join(twice)}: another wrapper has the same parameters. Wrap what has all that use them.")
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
