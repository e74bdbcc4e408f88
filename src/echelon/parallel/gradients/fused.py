"""torch's own Adam and AdamW in one kernel for all parameters of a GPU, where the script has not chosen another way.

torch's default there is `foreach`: a dozen kernels, each of which reads and writes all parameters or their state. The fused
kernel does so once. It takes DTensors, too.
"""

from __future__ import annotations

import torch

__all__ = ["fuse"]

DEVICES = {"cuda"}


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Have each group updated by the fused kernel from its first step on, as `AdamW(..., fused=True)` is.

    Left as they are: other classes, subclasses among them, whose step may be another; an optimizer that has a state, which would
    have to move; groups with `fused`, `foreach`, `capturable` or `differentiable` given, or with parameters elsewhere.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or optimizer.state:
        return
    for group in optimizer.param_groups:
        chosen = group["fused"] is not None or group["foreach"] is not None or group["capturable"] or group["differentiable"]
        if not chosen and all(p.device.type in DEVICES and p.is_floating_point() for p in group["params"]):
            group["fused"] = True
