"""Whether ranks meet in each training step, for numbers that `self.log(..., sync_dist=True)` takes over all of them.

A rank cannot know what others log, so all must meet or none. Where nothing can log so, no step waits for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Any

from echelon.world import agree

__all__ = ["meets"]

_WITHOUT = ("builtins", "echelon", "torch")


def meets(objects: Iterable[Any]) -> bool:
    """Whether a file in which the class of one of these is written names `sync_dist`, on any rank. Collective."""
    return agree.is_joined() and agree.any_rank(any(_names_it(cls) for each in objects for cls in type(each).__mro__))


def _names_it(cls: type) -> bool:
    if cls.__module__.partition(".")[0] in _WITHOUT:
        return False
    try:
        return "sync_dist" in inspect.getsource(sys.modules[cls.__module__])
    except (KeyError, OSError, TypeError):  # made in an interpreter: it may
        return True
