"""Forget the gradients of an accumulation window that is given up, where `fully_shard` keeps them beside the parameters.

`FSDPModule.reset_iter_state` (torch 2.13) forgets what waits for an all-reduce; whole gradients that wait for their
reduce-scatter stay, and have no public name. Tested with torch 2.13; tests/loop/test_accumulation.py notices a change.
"""

from __future__ import annotations

from torch import nn

from echelon.parallel.shards import is_fully_sharded

__all__ = ["forget_gradients"]


def forget_gradients(module: nn.Module) -> None:
    """Of a root of `fully_shard`, between two forward passes."""
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()  # type: ignore[operator]
    for part in module.modules():
        if not is_fully_sharded(part):
            continue
        state = part._get_fsdp_state()  # type: ignore[operator]
        for group in getattr(state, "_fsdp_param_groups", ()):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
