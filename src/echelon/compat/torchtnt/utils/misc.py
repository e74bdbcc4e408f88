"""torchtnt.utils.misc."""

from __future__ import annotations

import torch
from torch import nn

from echelon.common.errors import UsageError

__all__ = ["days_to_secs", "transfer_batch_norm_stats", "transfer_weights"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def days_to_secs(days: int | None) -> int | None:
    """
    Raises:
        UsageError: fewer than 0 days.
    """
    if days is not None and days < 0:
        raise UsageError(f"days must be non-negative, but was given {days}")
    return None if days is None else days * 24 * 60 * 60


@torch.no_grad()
def transfer_weights(src_module: nn.Module, dst_module: nn.Module) -> None:
    """Copy the parameters of one module into those of another of the same structure, in order.

    Raises:
        UsageError: other shapes, or another number of them; nothing is copied.
    """
    source, target = list(src_module.parameters()), list(dst_module.parameters())
    if [p.shape for p in source] != [p.shape for p in target]:
        raise UsageError(f"the modules differ: {len(source)} parameters and {len(target)}, of the same shapes they must be.")
    for new, old in zip(source, target, strict=True):
        old.copy_(new)


@torch.no_grad()
def transfer_batch_norm_stats(src_module: nn.Module, dst_module: nn.Module) -> None:
    """Copy the running statistics and momenta of one module's batch norms into those of another of the same structure.

    Raises:
        UsageError: another number of batch norms, or other statistics in them.
    """
    source, target = ([m for m in module.modules() if isinstance(m, _BATCH_NORMS)] for module in (src_module, dst_module))
    if len(source) != len(target):
        raise UsageError(
            f"Modules must have same number of batch norm layers. Src module has {len(source)}, dst module has {len(target)}."
        )
    for new, old in zip(source, target, strict=True):
        values, into = dict(new.named_buffers(recurse=False)), dict(old.named_buffers(recurse=False))
        if {name: value.shape for name, value in values.items()} != {name: value.shape for name, value in into.items()}:
            raise UsageError("the modules differ: a batch norm has statistics that its counterpart has not.")
        for name, value in values.items():
            into[name].copy_(value)
        old.momentum = new.momentum
