"""APIs that torch 2.11 and 2.12 lack or spell differently from torch 2.13, for this room. Delete with support for 2.12."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather_single", "ddp_options", "reduce_scatter_single", "shards_integers"]

# torch 2.13's names; it warns of the older ones at every rank's first call.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shards_integers() -> bool:
    """Whether `fully_shard` takes parameters that are not floating-point, such as quantized ones. torch 2.11 fails on them."""
    version: Any = torch.__version__  # compares as a version
    return bool(version >= (2, 13))


def ddp_options(constructor: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of DistributedDataParallel, by torch 2.13's names, as the installed torch takes them: without those that it
    lacks and that are False or None.
    """
    known = inspect.signature(constructor).parameters
    taken = {name: value for name, value in options.items() if name in known or value}
    if "forward_sync_buffers" in options and "forward_sync_buffers" not in known:
        taken["broadcast_buffers"] = options["forward_sync_buffers"]  # the older name of the same option
        taken.pop("forward_sync_buffers", None)
    return taken
