"""Where a step may draw random numbers from: torch's, numpy's and Python's global streams, and generators that a script holds.

A generator that a script holds is found by following attributes, containers, closures and the globals of the script's own
modules from the unit on; libraries are not searched. Its name is the path to it, the same in every process that runs the script.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

__all__ = ["GLOBAL", "Sources", "drawn_between", "is_filled", "is_library", "own_frames", "own_modules"]

GLOBAL = ("torch", "numpy", "python")
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "echelon", "_pytest", "pytest"} - {"__main__"}
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

    def pin(self) -> None:
        """Put all streams but torch's own into one state, which is the same on every rank and before every pass."""
        np.random.seed(0)
        random.seed(0)
        for generator in _held(self._unit, self._name).values():
            _pin(generator)


def drawn_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Of `before`, the streams that have another state in `after`."""
    return {name: state for name, state in before.items() if name in after and not _is_same(state, after[name])}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states are equal. It is asked twice in each micro-batch, and Python's stream alone has 625 numbers."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, tuple) and any(isinstance(each, np.ndarray) for each in one):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


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


def _pin(generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(0)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(0).state
    else:
        generator.seed(0)


_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_VALUES = (torch.Tensor, np.ndarray, str, bytes, int, float, type(None))


def _held(unit: Any, name: str) -> dict[str, Any]:
    """Generators by the path on which they were found, the shortest one first. Each micro-batch is searched twice."""
    found: dict[str, Any] = {}
    waiting: deque[tuple[str, Any, int]] = deque([(name, unit, 0)])
    for module in own_modules(unit):
        waiting.append((module.__name__.replace("__main__", "script"), module, 0))
    for frame in own_frames():
        waiting += [(f"{frame.f_code.co_name}.{n}", each, 0) for n, each in frame.f_locals.items() if _ROLES[type(each)]]
    seen = {id(torch.default_generator)}
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        role = _ROLES[type(value)]
        if role is _generator:
            found[path] = value
        elif role is not None and depth < _DEEPEST:
            for name, inner in role(value):
                if _ROLES[type(inner)] is not None and id(inner) not in seen:
                    waiting.append((f"{path}.{name}" if name else path, inner, depth + 1))
    return found


def own_frames() -> Iterator[types.FrameType]:
    """The calls of the script's own functions that are under way in its thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name != "<module>" and not is_library(frame.f_globals.get("__name__")):
            yield frame
        frame = frame.f_back


def own_modules(unit: Any) -> list[types.ModuleType]:
    """The script's own: that of its class, and the script itself."""
    names = dict.fromkeys(["__main__", *(cls.__module__ for cls in type(unit).__mro__)])
    return [sys.modules[n] for n in names if n in sys.modules and not is_library(n)]


def is_library(name: str | None) -> bool:
    """Whether a module of this name is nothing of the script's."""
    return (name or "builtins").split(".")[0] in _LIBRARIES


_Inside = Iterable[tuple[str, Any]]


def _generator(value: Any) -> _Inside:
    """Nothing is searched for inside of what was found."""
    return ()


def _of_module(value: types.ModuleType) -> _Inside:
    own = not is_library(value.__name__) and "site-packages" not in (getattr(value, "__file__", None) or "site-packages")
    return list(vars(value).items()) if own else ()


def _of_mapping(value: Mapping[Any, Any]) -> _Inside:
    return [(str(k), v) for k, v in list(islice(value.items(), _MOST_ITEMS))] if type(value) is dict else ()


def _of_sequence(value: Sequence[Any]) -> _Inside:
    return [(str(i), v) for i, v in enumerate(value[:_MOST_ITEMS])]


def _of_function(value: types.FunctionType) -> _Inside:
    if not is_library(value.__module__):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        yield from [(name, cell.cell_contents) for name, cell in cells if is_filled(cell)]
        yield from [("", default) for default in value.__defaults__ or ()]
        yield "", sys.modules.get(value.__module__)


def _of_method(value: types.MethodType) -> _Inside:
    return ("", value.__self__), ("", value.__func__)


def _of_partial(value: functools.partial[Any]) -> _Inside:
    return ("", value.func), ("", value.args), ("", value.keywords)


def _of_class(value: type) -> _Inside:
    if not is_library(value.__module__):
        yield from list(vars(value).items())
        yield "", sys.modules.get(value.__module__)


def _of_object(value: Any) -> _Inside:
    for name, inner in list(getattr(value, "__dict__", {}).items()):
        if name not in ("_parameters", "_buffers"):
            yield ("" if name == "_modules" else name), inner
    yield "", type(value)


_OPENED: tuple[tuple[type | tuple[type, ...], Callable[[Any], _Inside]], ...] = (
    (_KINDS, _generator),
    (types.ModuleType, _of_module),
    (Mapping, _of_mapping),
    ((list, tuple), _of_sequence),
    (types.FunctionType, _of_function),
    (types.MethodType, _of_method),
    (functools.partial, _of_partial),
    (type, _of_class),
    ((nn.Module, Dataset), _of_object),
)


class _Roles(dict[type, Callable[[Any], _Inside] | None]):
    """By type: what values hold, as (name, value); None for those that neither are nor hold generators, which most are.

    Nothing is held by values of libraries, containers and modules of torch excepted.
    """

    def __missing__(self, kind: type) -> Callable[[Any], _Inside] | None:
        role = None
        if not issubclass(kind, _VALUES):
            opened = (open_ for kinds, open_ in _OPENED if issubclass(kind, kinds))
            role = next(opened, None if is_library(kind.__module__) else _of_object)
        self[kind] = role
        return role


_ROLES = _Roles()


def is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
