"""Which parameters a module had before it was sharded: an optimizer that still holds them trains nothing.

Splitting a parameter makes another one. Nobody else knows the old one then; here it is remembered, weakly, with its name.

That saves who makes the optimizer before the module is sharded (tests/parallel/test_stale_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["name_before", "note"]

_names = WeakTensorKeyDictionary()


def note(before: Iterable[tuple[str, nn.Parameter]], after: Iterable[nn.Parameter]) -> None:
    """Remember what was replaced.

    Args:
        before: a module's parameters by name, before it was made parallel.
        after: its parameters afterwards.
    """
    kept = {id(parameter) for parameter in after}
    for name, parameter in before:
        if id(parameter) not in kept:  # whatever it is called now
            _names[parameter] = name


def name_before(parameter: nn.Parameter) -> str | None:
    """The name that it had in a module that holds another one now; None if nothing took its place."""
    found: str | None = _names.get(parameter)
    return found
