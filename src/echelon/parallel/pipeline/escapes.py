"""What a stage computes and keeps beside its units' outputs: an attribute, an entry of a list, what a hook has caught.

Later stages run on other ranks and would not see it, so a loss that adds it up would leave it out in silence. That something is
kept is seen by the ends of autograd's graph, of which each trained parameter has one: it lives as long as a graph that it is in.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from echelon.parallel.pipeline.stages import Unit

__all__ = ["Escapes"]

_MARK = "echelon"

# A thread that looks where this one is, such as world/whereabouts.py, holds its frames for a moment, with all that is in them.
_PAUSES_S = (0.0, 0.01, 0.1, 0.5)


class Escapes:
    """Watches the units of a stage in one pass."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = list(units)
        self._marked: dict[str, list[nn.Parameter]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the pass. Parameters are looked at when their unit is called: those of shards are whole then."""
        nodes: list[Node] = []  # as long as the pass lasts, so that its graph has these
        with ExitStack() as stack:
            for unit in self._units:
                hook = unit.module.register_forward_pre_hook(lambda module, args, unit=unit: self._mark(unit, nodes))
                stack.callback(hook.remove)
            yield

    def _mark(self, unit: Unit, nodes: list[Node]) -> None:
        if unit.name in self._marked or not torch.is_grad_enabled():
            return
        self._marked[unit.name] = []
        for parameter in unit.module.parameters():
            if not parameter.requires_grad or _is_marked(parameter):
                continue
            _metadata(parameter)[_MARK] = True
            if _is_marked(parameter):  # somebody holds the node itself, as for a hook: it outlives graphs
                del _metadata(parameter)[_MARK]
                continue
            nodes.append(get_gradient_edge(parameter).node)
            _metadata(parameter)[_MARK] = True
            self._marked[unit.name].append(parameter)

    def found(self) -> list[str]:
        """The names of the units of which something is kept. When nobody holds the pass's own outputs any more."""
        for pause_s in _PAUSES_S:
            if not self._alive():
                return []
            time.sleep(pause_s)
            gc.collect()  # what is held by a circle of references is not kept by anybody
        return self._alive()

    def _alive(self) -> list[str]:
        return [name for name, parameters in self._marked.items() if any(_is_marked(p) for p in parameters)]


def _is_marked(parameter: nn.Parameter) -> bool:
    return _MARK in _metadata(parameter)


def _metadata(parameter: nn.Parameter) -> Any:
    """Of the node at which its gradient arrives: it is made anew unless a graph, or somebody, holds it."""
    return get_gradient_edge(parameter).node.metadata
