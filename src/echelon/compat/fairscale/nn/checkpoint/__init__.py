"""`fairscale.nn.checkpoint`: activations that are computed again instead of being kept."""

from __future__ import annotations

from echelon.compat.fairscale.nn.checkpoint.checkpoint_activations import checkpoint_wrapper, is_checkpointing, is_recomputing

__all__ = ["checkpoint_wrapper", "is_checkpointing", "is_recomputing"]
