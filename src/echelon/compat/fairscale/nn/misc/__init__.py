"""`fairscale.nn.misc`: parameters as one tensor; and where `checkpoint_wrapper` used to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.compat.fairscale.names import later
from echelon.compat.fairscale.nn.checkpoint import checkpoint_wrapper

if TYPE_CHECKING:
    from echelon.compat.fairscale.nn.misc.flatten_params_wrapper import FlattenParamsWrapper

__all__ = ["FlattenParamsWrapper", "checkpoint_wrapper"]

_BUCKETS = "nothing: what travels in one message is decided inside."

__getattr__ = later(
    "nn.misc",
    {"FlattenParamsWrapper": "nn.misc.flatten_params_wrapper"},
    {
        "GradBucket": _BUCKETS,
        "ParamBucket": _BUCKETS,
    },
)
