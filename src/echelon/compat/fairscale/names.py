"""Names that a module of FairScale has, and here are loaded when they are first used, or have a successor instead."""

from __future__ import annotations

from functools import partial

from echelon.compat import names

__all__ = ["later"]

later = partial(names.later, "fairscale")
