"""Which modules of a unit the user has made parallel by hand, and how: found once for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.parallel.names import without_compile
from echelon.parallel.prepared import Prepared
from echelon.parallel.registry import Kind, kind_of
from echelon.world.init import World

__all__ = ["Recognised"]


class Recognised:
    """The Prepared of modules by name: each is recognised once, until another takes its place.

    A copy, or what another process gets of it, starts over.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[nn.Module, Kind | None, Prepared[Any]]] = {}

    def of(self, modules: Mapping[str, nn.Module]) -> dict[str, Prepared[Any]]:
        return {name: self._one(name, module) for name, module in modules.items()}

    def _one(self, name: str, module: nn.Module) -> Prepared[Any]:
        kind, known = kind_of(without_compile(module)), self._known.get(name)
        if known is None or known[0] is not module or known[1] is not kind:  # `fully_shard` changes a module in place
            known = self._known[name] = module, kind, Prepared.of(module, World.current(torch.device("cpu")))
        return known[2]

    def __reduce__(self) -> Any:
        return Recognised, ()
