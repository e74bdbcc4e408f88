"""Whether the backward pass goes through the random numbers that the forward pass drew.

Both see the same ones if the gradient does not depend on the RNG state between the two. What is computed again, by torch.compile
within a memory budget or by checkpointing that does not keep the RNG state, may draw anew: another dropout mask than the loss
had. Nothing else is asked of a program: neither that its loss is smooth, nor that all of it is differentiated.
"""

from __future__ import annotations

from typing import Any

import torch

from echelon.prover.reference import Pass, Reference
from echelon.prover.workarounds import seeding_backward

__all__ = ["backward_draws"]

_ROUNDING = 1e-4  # what kernels that add up in another order may change, of the largest element
_TIMES_REPEATED = 100


def backward_draws(reference: Reference) -> dict[str, Any]:
    """Try the first micro-batch with two RNG states between forward and backward pass.

    Returns:
        `depends`: the parameter whose gradient is another one then, and by how much, relative; None if all are the same, or
        where the pass cannot be repeated.
    """
    reference.keeps_dropout = True
    reference.begin(write=False)
    reference.enter_epoch(reference.updates[0][0].epoch)
    data, tries = reference.updates[0][0].data, []
    for seed in (1, 1, 2):
        with seeding_backward(seed):
            tries.append(reference.tried(Pass(data)))
    (loss, one), (again, same), (third, other) = tries
    if not loss == again == third:
        return {"depends": None}
    far = {name: _distance(one[name], other[name]) for name in one if name in other}
    near = max((_distance(one[name], same[name]) for name in one if name in same), default=0.0)
    name = max(far, key=far.__getitem__, default="")
    return {"depends": (name, far[name]) if name and far[name] > max(_ROUNDING, _TIMES_REPEATED * near) else None}


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    size = float(one.abs().max()) if one.numel() else 0.0
    return float((one - other).abs().max()) / size if size else 0.0
