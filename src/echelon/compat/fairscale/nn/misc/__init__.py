"""`fairscale.nn.misc`: where `checkpoint_wrapper` used to be."""

from __future__ import annotations

from echelon.compat.fairscale.names import later
from echelon.compat.fairscale.nn.checkpoint import checkpoint_wrapper

__all__ = ["checkpoint_wrapper"]

_BUCKETS = "nothing: what travels in one message is decided inside."

__getattr__ = later(
    "nn.misc",
    {},
    {
        "FlattenParamsWrapper": "strategy 'fsdp', which splits parameters as they are.",
        "GradBucket": _BUCKETS,
        "ParamBucket": _BUCKETS,
    },
)
