"""Where a step may draw random numbers from: torch's, numpy's and Python's global streams, and generators that a script holds.

A generator that a script holds is found by following attributes, containers, closures and the globals of the script's own
modules from the unit on; libraries are not searched. Its name is the path to it, the same in every process that runs the script.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from echelon.prover.micro import digest

__all__ = ["GLOBAL", "Sources", "drawn_between"]

GLOBAL = ("torch", "numpy", "python")
_LIBRARIES = {*sys.stdlib_module_names, "torch", "torchvision", "numpy", "echelon", "_pytest", "pytest"} - {"__main__"}
_MOST_OBJECTS = 20_000  # that are looked at in one search
_MOST_ITEMS = 500  # of one container
_DEEPEST = 10


class Sources:
    """The streams that a unit's step, or a dataset, can reach."""

    def __init__(self, unit: Any, name: str = "unit") -> None:
        self._unit, self._name = unit, name

    def states(self) -> dict[str, Any]:
        """The state of every stream by name, in values that can be saved."""
        found = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(legacy=True), "python": random.getstate()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state()
        found.update({name: _state(generator) for name, generator in _held(self._unit, self._name).items()})
        return found

    def restore(self, states: Mapping[str, Any]) -> None:
        """Put back those streams that `states` names."""
        held = _held(self._unit, self._name) if states.keys() - {*GLOBAL, "cuda"} else {}
        for name, state in states.items():
            if name == "torch":
                torch.set_rng_state(state)
            elif name == "numpy":
                np.random.set_state(state)
            elif name == "python":
                random.setstate(state)
            elif name == "cuda":
                torch.cuda.set_rng_state(state)
            elif name in held:
                _restore(held[name], state)


def drawn_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Of `before`, the streams that have another state in `after`."""
    return {name: state for name, state in before.items() if name in after and digest(state) != digest(after[name])}


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=True) if isinstance(generator, np.random.RandomState) else generator.getstate()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _held(unit: Any, name: str) -> dict[str, Any]:
    """Generators by the path on which they were found, the shortest one first."""
    found: dict[str, Any] = {}
    waiting: deque[tuple[str, Any, int]] = deque([(name, unit, 0)])
    for module in _own_modules(unit):
        waiting.append((module.__name__.replace("__main__", "script"), module, 0))
    seen = {id(torch.default_generator)}
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _KINDS):
            found[path] = value
        elif depth < _DEEPEST:
            waiting.extend((f"{path}.{name}" if name else path, inner, depth + 1) for name, inner in _inside(value))
    return found


def _own_modules(unit: Any) -> list[types.ModuleType]:
    names = dict.fromkeys(["__main__", *(cls.__module__ for cls in type(unit).__mro__)])
    return [sys.modules[n] for n in names if n in sys.modules and not _is_library(n)]


def _is_library(name: str | None) -> bool:
    return (name or "builtins").split(".")[0] in _LIBRARIES


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, as (name, value); nothing for values of libraries, containers and modules of torch excepted."""
    if isinstance(value, (torch.Tensor, np.ndarray, str, bytes, int, float, type(None))):
        return
    if isinstance(value, types.ModuleType):
        if not _is_library(value.__name__) and "site-packages" not in (getattr(value, "__file__", None) or "site-packages"):
            yield from vars(value).items()
    elif isinstance(value, Mapping):
        if type(value) is dict:
            yield from [(str(k), v) for k, v in list(value.items())[:_MOST_ITEMS]]
    elif isinstance(value, (list, tuple)):
        yield from [(str(i), v) for i, v in enumerate(value[:_MOST_ITEMS])]
    elif isinstance(value, types.FunctionType):
        if not _is_library(value.__module__):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
            yield from [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
            yield from [("", default) for default in value.__defaults__ or ()]
            yield "", sys.modules.get(value.__module__)
    elif isinstance(value, types.MethodType):
        yield from [("", value.__self__), ("", value.__func__)]
    elif isinstance(value, functools.partial):
        yield from [("", value.func), ("", value.args), ("", value.keywords)]
    elif isinstance(value, type):
        if not _is_library(value.__module__):
            yield from vars(value).items()
            yield "", sys.modules.get(value.__module__)
    elif isinstance(value, nn.Module) or not _is_library(type(value).__module__):
        attributes = getattr(value, "__dict__", {})
        for name, inner in attributes.items():
            if name not in ("_parameters", "_buffers"):
                yield ("" if name == "_modules" else name), inner
        yield "", type(value)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
