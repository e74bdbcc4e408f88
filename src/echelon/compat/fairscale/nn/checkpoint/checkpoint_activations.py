"""Where FairScale's `checkpoint_wrapper` is defined: `echelon.nn.checkpoint_wrapper`."""

from __future__ import annotations

from echelon.compat.fairscale.absent import NAMES
from echelon.compat.fairscale.names import later
from echelon.nn import checkpoint_wrapper

__all__ = ["checkpoint_wrapper"]

_MODULE = "nn.checkpoint.checkpoint_activations"

__getattr__ = later(_MODULE, {}, NAMES[_MODULE])
