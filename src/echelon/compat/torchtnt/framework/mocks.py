"""Mocks in a module's place, in tests of units."""

from __future__ import annotations

from typing import Any
from unittest.mock import NonCallableMock

from torch import nn

from echelon.parallel.patching import replace_class

__all__ = ["as_module"]

_LISTS = ("parameters", "buffers", "modules", "children", "named_parameters", "named_buffers", "named_modules", "named_children")


def as_module(module: Any) -> Any:
    """A mock counts as a module without parts, unless it was told what it has; anything else is left to be judged."""
    if isinstance(module, NonCallableMock):
        for each in (module, module.to.return_value):
            for name in _LISTS:
                listed = getattr(each, name)
                if isinstance(listed, NonCallableMock) and isinstance(listed.return_value, NonCallableMock):
                    listed.side_effect = listed.side_effect or _nothing
        if not isinstance(module, nn.Module):
            replace_class(module, "mocks", nn.Module)
    return module


def _nothing(*args: Any, **options: Any) -> Any:
    return iter(())
