"""Somebody who looks on when this process trains: `train` and `fit` ask here, once per call, before they begin.

So `echelon prove` sees what a script trains however the script came by `train`, and without a change to any module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from echelon.loop.callback import Callback

__all__ = ["Observer", "observed", "observing"]

# Gets the unit, the training loader and the callbacks of a call; returns the callbacks to use. What it raises ends the call.
Observer = Callable[[Any, Iterable[Any], list[Callback]], list[Callback]]

_observer: Observer | None = None


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Have every call of `train` and `fit` in this process go by `observer`, in place of an earlier one if there is one."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def observed(unit: Any, dataloader: Iterable[Any], callbacks: list[Callback] | None) -> list[Callback] | None:
    """The callbacks for a call that begins."""
    return callbacks if _observer is None else _observer(unit, dataloader, list(callbacks or []))
