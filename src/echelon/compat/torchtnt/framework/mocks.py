"""Mocks that tests use instead of a module or a unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import NonCallableMock

from torch import nn

from echelon.parallel.patching import replace_class

__all__ = ["as_module", "gives_batches"]

_LISTS = ("parameters", "buffers", "modules", "children", "named_parameters", "named_buffers", "named_modules", "named_children")


def as_module(module: Any) -> Any:
    """Let a mock count as a module, without parts unless it has return values for them; return anything else as it is."""
    if isinstance(module, NonCallableMock):
        for each in (module, module.to.return_value):
            for name in _LISTS:
                listed = getattr(each, name)
                if isinstance(listed, NonCallableMock) and isinstance(listed.return_value, NonCallableMock):
                    listed.side_effect = listed.side_effect or _nothing
        if not isinstance(module, nn.Module):
            replace_class(module, "mocks", nn.Module)
    return module


def gives_batches(unit: Any, phases: Iterable[str]) -> None:
    """Let a mock's `get_next_*_batch` return the loader's next batch, unless it has a return value."""
    for phase in phases if isinstance(unit, NonCallableMock) else ():
        fetch = getattr(unit, f"get_next_{phase}_batch", None)
        if isinstance(fetch, NonCallableMock) and isinstance(fetch.return_value, NonCallableMock):
            fetch.side_effect = fetch.side_effect or _next


def _next(state: Any, batches: Iterator[Any]) -> Any:
    return next(batches)


def _nothing(*args: Any, **options: Any) -> Any:
    return iter(())
