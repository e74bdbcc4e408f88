"""Names that a module of another system has, and here are loaded when they are first used, or have a successor instead."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from echelon.contracts.errors import UsageError

__all__ = ["later"]


def later(system: str, module: str, homes: Mapping[str, str], successors: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`.

    Args:
        system: the package below `echelon.compat`.
        module: its name below `system`.
        homes: name -> the module below `system` that has it: what is slow to import.
        successors: name -> what to use in its place, since it is not here.
    """
    here = f"echelon.compat.{system}"

    def getattr_(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(f"{here}.{homes[name]}"), name)
            setattr(sys.modules[f"{here}.{module}"], name, value)
            return value
        if name in successors:
            raise UsageError(f"{system}.{module}.{name} is not part of echelon.compat. Instead: {successors[name]}")
        raise AttributeError(f"module '{here}.{module}' has no attribute {name!r}")

    return getattr_
