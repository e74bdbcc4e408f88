"""Which parameters a module had before it was sharded: an optimizer that still holds them trains nothing.

Splitting a parameter makes another one. Nobody else knows the old one then; here it is remembered, weakly, with its name.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

from torch import nn

__all__ = ["name_before", "note"]

# By identity: tensors compare element by element.
_names: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}


def note(before: Iterable[tuple[str, nn.Parameter]], after: Iterable[nn.Parameter]) -> None:
    """Remember what was replaced.

    Args:
        before: a module's parameters by name, before it was made parallel.
        after: its parameters afterwards.
    """
    kept = {id(parameter) for parameter in after}
    for name, parameter in before:
        if id(parameter) not in kept:  # whatever it is called now
            key = id(parameter)
            _names[key] = weakref.ref(parameter, functools.partial(_forget, key)), name


def _forget(key: int, _: object) -> None:
    _names.pop(key, None)


def name_before(parameter: nn.Parameter) -> str | None:
    """The name that it had in a module that holds another one now; None if nothing took its place."""
    found = _names.get(id(parameter))
    return found[1] if found is not None and found[0]() is parameter else None
