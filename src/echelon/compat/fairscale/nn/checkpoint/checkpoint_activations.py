"""`checkpoint_wrapper` and what tells a module that it is being recomputed, which are echelon's own."""

from __future__ import annotations

from echelon.parallel.activation import checkpoint_wrapper, disable_checkpointing, is_checkpointing, is_recomputing

__all__ = ["checkpoint_wrapper", "disable_checkpointing", "is_checkpointing", "is_recomputing"]
