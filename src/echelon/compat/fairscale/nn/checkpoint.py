"""`fairscale.nn.checkpoint`, and where `checkpoint_wrapper` is or was besides: activations that are computed again."""

from __future__ import annotations

from echelon.compat.fairscale.absent import later
from echelon.nn import checkpoint_wrapper

__all__ = ["checkpoint_wrapper"]

__getattr__ = later("nn.checkpoint")
