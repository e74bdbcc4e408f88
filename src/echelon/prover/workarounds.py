"""What prove replaces in other libraries while a script runs, for want of a supported way: all of it, and nothing else.

Both are needed with CPython 3.11 to 3.14, torch 2.13.0 and numpy 2; no upstream issue is known. tests/test_observer.py
fails when one of them is no longer needed or possible.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["noting_collectives", "noting_seeds", "without_autocast"]


@contextlib.contextmanager
def noting_seeds(seeded: set[str]) -> Iterator[None]:
    """Add "torch", "numpy" or "python" to `seeded` when the script seeds that stream itself.

    A generator's state does not tell: one that was drawn from differs from the start, too.
    """
    places = {"torch": (torch, "manual_seed"), "numpy": (np.random, "seed"), "python": (random, "seed")}
    originals = {stream: getattr(*place) for stream, place in places.items()}

    def noting(stream: str) -> Callable[..., Any]:
        @functools.wraps(originals[stream])
        def seed(*args: Any, **options: Any) -> Any:
            seeded.add(stream)
            return originals[stream](*args, **options)

        return seed

    for stream, place in places.items():
        setattr(*place, noting(stream))
    try:
        yield
    finally:
        for stream, place in places.items():
            setattr(*place, originals[stream])


_COLLECTIVES = {
    "torch.distributed": (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
        *("broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    ),
    "torch.distributed.nn.functional": (
        *("all_gather", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "gather", "reduce", "reduce_scatter"),
    ),
}


@contextlib.contextmanager
def noting_collectives(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` when the script itself calls a collective; those of torch and of echelon are the strategy's business."""
    import torch.distributed.nn.functional

    places = [(sys.modules[module], name) for module, names in _COLLECTIVES.items() for name in names]
    places += [(torch.distributed.nn, name) for _, name in places if hasattr(torch.distributed.nn, name)]
    originals = [(module, name, getattr(module, name)) for module, name in places if hasattr(module, name)]

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(*args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.partition(".")[0] not in ("torch", "echelon"):
                note()
            return original(*args, **options)

        return collective

    for module, name, original in originals:
        setattr(module, name, noting(original))
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Also where a script casts by itself: a type with few digits would hide what a strategy does to them.

    torch can switch autocast on and off, but not keep a `with torch.autocast(...)` of somebody else's from doing so.
    """
    original = torch.autocast.__init__
    signature = inspect.signature(original)

    def disabled(self: Any, *args: Any, **options: Any) -> None:
        given = signature.bind(self, *args, **options).arguments
        original(**{**given, "enabled": False})

    torch.autocast.__init__ = disabled  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]
