"""Everything that prove patches in other libraries while a script runs, because there is no supported way.

All are needed with CPython 3.11 to 3.14, torch 2.13.0 and numpy 2; no upstream issue is known. tests/prover/test_observer.py
fails when one of them is no longer needed or possible.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from echelon.parallel.patching import for_now

__all__ = [
    "noting_autocast",
    "noting_collectives",
    "noting_compilation",
    "noting_seeds",
    "noting_warnings_of",
    "scaling_losses",
    "seeding_backward",
    "without_autocast",
]


@contextlib.contextmanager
def noting_seeds(seeded: set[str]) -> Iterator[None]:
    """Add "torch", "numpy" or "python" to `seeded` when the script seeds that stream itself.

    A generator's state does not tell: drawing from it changes it, too.
    """
    with contextlib.ExitStack() as replaced:
        for stream, owner, name in (("torch", torch, "manual_seed"), ("numpy", np.random, "seed"), ("python", random, "seed")):

            def seed(original: Callable[..., Any], *args: Any, stream: str = stream, **options: Any) -> Any:
                seeded.add(stream)
                return original(*args, **options)

            replaced.enter_context(_around(owner, name, seed))
        yield


@contextlib.contextmanager
def noting_warnings_of(logger: logging.Logger, note: Callable[[str], None]) -> Iterator[None]:
    """Call `note` with each message of the logger, which still logs it."""

    def noting(record: logging.LogRecord) -> bool:
        note(record.getMessage())
        return True

    logger.addFilter(noting)
    try:
        yield
    finally:
        logger.removeFilter(noting)


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
    """Call `note` when the script itself calls a collective. Calls by torch and echelon belong to the layout."""
    import torch.distributed.nn.functional

    places = [(sys.modules[module], name) for module, names in _COLLECTIVES.items() for name in names]
    places += [(torch.distributed.nn, name) for _, name in places if hasattr(torch.distributed.nn, name)]

    def collective(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if caller.partition(".")[0] not in ("torch", "echelon"):
            note()
        return original(*args, **options)

    with contextlib.ExitStack() as replaced:
        for module, name in places:
            if hasattr(module, name):
                replaced.enter_context(_around(module, name, collective))
        yield


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off, also the script's own: a type with few digits would hide what a layout does to them.

    torch can switch autocast on and off, but cannot keep somebody else's `with torch.autocast(...)` from switching it on.
    """
    signature = inspect.signature(torch.autocast.__init__)

    def disabled(original: Callable[..., None], *args: Any, **options: Any) -> None:
        original(**{**signature.bind(*args, **options).arguments, "enabled": False})

    with _around(torch.autocast, "__init__", disabled):
        yield


@contextlib.contextmanager
def noting_autocast(note: Callable[[torch.dtype], None]) -> Iterator[None]:
    """Call `note` with the type of each autocast region, the script's own and echelon's."""

    def noting(original: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if self._enabled:
            note(self.fast_dtype)

    with _around(torch.autocast, "__init__", noting):
        yield


@contextlib.contextmanager
def noting_compilation(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` when something is given to torch.compile."""

    def noting(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        note()
        return original(*args, **options)

    with _around(torch, "compile", noting):
        yield


@contextlib.contextmanager
def scaling_losses(factor: float, made: Callable[[], None], stepped: Callable[[], None]) -> Iterator[None]:
    """Multiply the first scale of each gradient scaler; call `made` when an enabled one is made, `stepped` after its updates."""
    signature = inspect.signature(torch.amp.GradScaler.__init__)

    def scaled(original: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
        given = signature.bind(self, *args, **options)
        given.apply_defaults()
        given.arguments["init_scale"] *= factor
        original(*given.args, **given.kwargs)
        if self.is_enabled():
            made()

    def updated(original: Callable[..., None], *args: Any, **options: Any) -> None:
        original(*args, **options)
        stepped()

    with _around(torch.amp.GradScaler, "__init__", scaled), _around(torch.amp.GradScaler, "update", updated):
        yield


@contextlib.contextmanager
def seeding_backward(seed: int) -> Iterator[None]:
    """Begin each backward pass with this seed, whoever calls it, and put the RNG states back after it."""

    def acting(original: Callable[..., None], *args: Any, **options: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            original(*args, **options)

    with _around(torch.autograd, "backward", acting):
        yield


def _around(owner: Any, name: str, by: Callable[..., Any]) -> AbstractContextManager[None]:
    """Have `by(original, ...)` called in place of a function or method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **options: Any) -> Any:
        return by(original, *args, **options)

    return for_now(owner, **{name: replaced})
