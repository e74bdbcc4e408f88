"""`checkpoint_wrapper`, and what tells a module in it that it will be recomputed, or is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from echelon.parallel.patching import replace
from echelon.parallel.recipe import activation

__all__ = ["checkpoint_wrapper", "disable_checkpointing", "is_checkpointing", "is_recomputing"]


class _Now(threading.local):
    """What this thread is doing: a backward pass on a GPU recomputes in a thread of its own."""

    checkpointing = recomputing = disabled = False


_now = _Now()


def is_checkpointing() -> bool:
    """Whether this is the forward pass of a module that will be recomputed; asked from within the module."""
    return _now.checkpointing


def is_recomputing() -> bool:
    """Whether this is the recomputation of a module; asked from within the module."""
    return _now.recomputing


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Inside, modules keep their activations."""
    before, _now.disabled = _now.disabled, True
    try:
        yield
    finally:
        _now.disabled = before


def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False, *, context_fn: Any = None) -> nn.Module:
    """As `echelon.nn.checkpoint_wrapper`; the functions above know of modules that are wrapped by this one."""
    if not isinstance(module.forward, activation.Recompute):
        replace(module, "forward", "recompute", _Recompute(module, offload_to_cpu, context_fn))
    return module


class _Recompute(activation.Recompute):
    """Does not hold its module, so that it is freed with its last reference, as with FairScale; a graph holds it (`contexts`)."""

    def __init__(self, module: nn.Module, offload_to_cpu: bool, contexts: Any) -> None:
        forward = module.forward
        is_its_own = getattr(forward, "__self__", None) is module
        self._take(module, None if is_its_own else forward, offload_to_cpu, contexts)

    def _take(self, module: nn.Module, function: Any, offload: bool, contexts: Any) -> None:
        self._of, self._function = weakref.ref(module), function
        self._offload, self._contexts = offload, contexts

    @property
    def _module(self) -> Any:  # type: ignore[override]
        return self._of()

    @property
    def _forward(self) -> Any:  # type: ignore[override]
        module = self._of()
        return self._function or type(module).forward.__get__(module)  # type: ignore[union-attr]

    def __getstate__(self) -> tuple[Any, ...]:
        return self._of(), self._function, self._offload, self._contexts

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._take(*state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs) if _now.disabled else super().__call__(*args, **kwargs)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = super().contexts()
        return _Doing("checkpointing", first), _Doing("recomputing", again)


class _Doing:
    """Context that sets a flag of `_now`, and `also`. torch may enter the same one again, and they lie within each other."""

    def __init__(self, flag: str, also: AbstractContextManager[Any]) -> None:
        self._flag, self._also = flag, also
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(getattr(_now, self._flag))
        setattr(_now, self._flag, True)
        self._also.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        setattr(_now, self._flag, self._before.pop())
        return self._also.__exit__(*raised)
