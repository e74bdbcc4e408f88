"""Methods of a loop's optimizer and scheduler that are left to a session to call."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

__all__ = ["knowing", "replace"]


def replace(thing: Any, name: str, by: Callable[..., Any]) -> None:
    original = getattr(thing, name)
    if not getattr(original, "knows_window", False):  # or what wraps it does: `functools.wraps` copies the mark
        setattr(thing, name, types.MethodType(knowing(original, by), thing))


def knowing(original: Callable[..., Any], by: Callable[..., Any], bound_to: Any = None) -> Callable[..., Any]:
    """A method in the place of `original`, that leaves it to `by` to call it."""
    call = original if bound_to is None else functools.partial(original, bound_to)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return by(call, *args, **options)

    method.knows_window = True  # type: ignore[attr-defined]
    return method
