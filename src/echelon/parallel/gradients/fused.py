"""torch's Adam and AdamW in one kernel for all parameters on a GPU, unless the script has chosen otherwise.

torch's default on a GPU is `foreach`: a dozen kernels, each of which reads and writes all parameters or their state. The fused
kernel does so once. It takes DTensors, too.
"""

from __future__ import annotations

import torch

__all__ = ["fuse"]

DEVICES = {"cuda"}


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Have the fused kernel update each group from the first step on, as with `AdamW(..., fused=True)`.

    Unchanged are: other classes, also subclasses, whose step may differ; an optimizer that already has a state, which would have
    to move; groups with `fused`, `foreach`, `capturable` or `differentiable` set, or with parameters on other devices.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or optimizer.state:
        return
    for group in optimizer.param_groups:
        chosen = group["fused"] is not None or group["foreach"] is not None or group["capturable"] or group["differentiable"]
        if not chosen and all(p.device.type in DEVICES and p.is_floating_point() for p in group["params"]):
            group["fused"] = True
