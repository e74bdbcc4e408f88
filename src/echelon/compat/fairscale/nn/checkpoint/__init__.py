"""`fairscale.nn.checkpoint`: activations that are computed again instead of being kept."""

from __future__ import annotations

from echelon.compat.fairscale.absent import NAMES
from echelon.compat.fairscale.names import later
from echelon.nn import checkpoint_wrapper

__all__ = ["checkpoint_wrapper"]

__getattr__ = later("nn.checkpoint", {}, NAMES["nn.checkpoint"])
