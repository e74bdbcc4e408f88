"""`fairscale.nn.misc`: where `checkpoint_wrapper` used to be."""

from __future__ import annotations

from echelon.compat.fairscale.absent import NAMES
from echelon.compat.fairscale.names import later
from echelon.compat.fairscale.nn.checkpoint import checkpoint_wrapper

__all__ = ["checkpoint_wrapper"]

__getattr__ = later("nn.misc", {}, NAMES["nn.misc"])
