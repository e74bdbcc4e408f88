"""Names that a module of FairScale has, and here are loaded when they are first used, or have a successor instead."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from echelon.contracts.errors import UsageError

__all__ = ["later"]

_HERE = "echelon.compat.fairscale"


def later(module: str, homes: Mapping[str, str], successors: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`.

    Args:
        module: its name below `fairscale`.
        homes: name -> the module below `fairscale` that has it: what pulls in torch's FSDP, half a second.
        successors: name -> what to use in its place, since it is not here.
    """

    def getattr_(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(f"{_HERE}.{homes[name]}"), name)
            setattr(sys.modules[f"{_HERE}.{module}"], name, value)
            return value
        if name in successors:
            raise UsageError(f"fairscale.{module}.{name} is not part of echelon.compat. Instead: {successors[name]}")
        raise AttributeError(f"module '{_HERE}.{module}' has no attribute {name!r}")

    return getattr_
