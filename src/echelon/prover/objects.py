"""What a script holds: one walk finds its RNGs, and the state that it keeps.

It follows attributes, containers, closures, classes, the globals of the script's own modules and the variables of its running
functions, but not libraries. Each find is named by the path to it, which is the same in every process of the script.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from echelon.loop.own.loop_unit import LoopUnit
from echelon.loop.samples import slots_of
from echelon.loop.unit import Unit
from echelon.prover.values import modules_of, parameters_of
from echelon.world.rng import GENERATORS

__all__ = ["Objects", "Place", "is_library", "is_state", "own_frames", "own_modules", "set_by"]

_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "echelon", "_pytest", "pytest"} - {"__main__"}
_MOST_OBJECTS = 20_000  # that are looked at in one walk
_MOST_ITEMS = 500  # of one container
_LONGEST = 10_000  # items of a container that counts as one state
_DEEPEST = 10
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_OPENED = (
    *(dict, list, tuple, type, nn.Module, Dataset, functools.partial),
    *(types.ModuleType, types.FunctionType, types.MethodType),
)
_NO_STATE = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, DataLoader, Dataset, Sampler)  # that the unit keeps

Place = tuple[Any, Any]  # the namespace of a value, and its name there


class Objects:
    """The RNGs that an object holds, and the state that it keeps.

    Args:
        root: a unit, whose trained parameters are no state; or a data set, or a function.
        name: the prefix of the paths.
        keeps: also look for state.
    Attributes:
        generators: by path.
        places: of state, by path.
    """

    def __init__(self, root: Any, name: str = "", *, keeps: bool = True) -> None:
        self.root, self._name, self._keeps = root, name, keeps
        self.generators: dict[str, Any] = {}
        self.places: dict[str, Place] = {}

    def look(self) -> None:
        """Search again."""
        self.generators, self.places = {}, {}
        is_unit = isinstance(self.root, Unit)
        trained = {id(p) for _, p in parameters_of(self.root)} if is_unit else set()
        closed = _NO_STATE if is_unit else ()
        # Objects that may keep state go first, even if the path to them is longer.
        waiting, others = deque[tuple[str, Any, int]](), deque[tuple[str, Any, int]]()
        for path, value, keeps in self._roots():
            (waiting if keeps and self._keeps else others).append((path, value, 0))
        seen = {id(torch.default_generator)}
        while (waiting or others) and len(seen) < _MOST_OBJECTS:
            keeps = bool(waiting)
            path, value, depth = (waiting or others).popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, GENERATORS):
                self.generators[path] = value
                continue
            for inner_path, names, name in _inside(value, path):
                inner = names[name]
                if id(inner) in trained:
                    continue
                if keeps and is_state(inner) and not _holds(inner, trained):
                    self.places.setdefault(inner_path, (names, name))
                elif depth < _DEEPEST and _is_opened(inner) and id(inner) not in seen:
                    (waiting if keeps and not isinstance(inner, closed) else others).append((inner_path, inner, depth + 1))
        self._name_tensors_once()

    def _roots(self) -> Iterator[tuple[str, Any, bool]]:
        """Paths, values, and whether to look for state in them; local variables themselves cannot be put back."""
        if isinstance(self.root, LoopUnit):
            yield from self._variables_of_a_loop(self.root)
        yield self._name, self.root, True
        for prefix, module in modules_of(self.root) if isinstance(self.root, Unit) else ():
            yield _joined(self._name, f"{prefix}module"), module, True
        for own in own_modules(self.root):
            yield _module_path(own), own, True
        for frame in own_frames():
            for name, value in frame.f_locals.items():
                if _is_opened(value):
                    is_own = isinstance(value, types.FunctionType) or not is_library(type(value).__module__)
                    yield f"{frame.f_code.co_name}.{name}", value, is_own and not isinstance(value, _NO_STATE)

    @staticmethod
    def _variables_of_a_loop(unit: LoopUnit) -> Iterator[tuple[str, Any, bool]]:
        """What a script gave `prepare` besides the model, named by the script's variables instead of the unit's attributes."""
        held = {id(value) for value in vars(unit).values() if _is_opened(value)} - {id(unit.module)}
        spaces = [(_module_path(own), vars(own)) for own in own_modules(unit)]
        spaces += [(frame.f_code.co_name, frame.f_locals) for frame in own_frames()]
        yield from (
            (f"{path}.{name}", value, True) for path, names in spaces for name, value in list(names.items()) if id(value) in held
        )

    def _name_tensors_once(self) -> None:
        """Keep the last of several paths to one tensor: others may be variables left by a loop."""
        tensors: dict[int, str] = {}
        for path, (names, name) in list(self.places.items()):
            if isinstance(names[name], torch.Tensor) and (other := tensors.setdefault(id(names[name]), path)) != path:
                del self.places[other]
                tensors[id(names[name])] = path


def own_frames() -> Iterator[types.FrameType]:
    """The frames of the script's own functions that are running in the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name != "<module>" and not is_library(frame.f_globals.get("__name__")):
            yield frame
        frame = frame.f_back


def own_modules(unit: Any) -> list[types.ModuleType]:
    """The script's own modules: the script itself, and those of the unit's classes."""
    names = dict.fromkeys(["__main__", *(cls.__module__ for cls in type(unit).__mro__)])
    return [sys.modules[n] for n in names if n in sys.modules and not is_library(n)]


def is_library(name: str | None) -> bool:
    """Whether a module of this name is a library's, not the script's."""
    return (name or "builtins").split(".")[0] in _LIBRARIES


def is_state(value: Any) -> bool:
    """Whether a value can be copied and put back: plain values and tensors, and containers of only these."""
    if isinstance(value, torch.Tensor):
        is_plain = type(value) in (torch.Tensor, nn.Parameter, nn.Buffer) and value.layout is torch.strided
        if not is_plain or value.grad_fn is not None or value.is_meta:  # a meta tensor has no values
            return False
        return not value.numel() or value.untyped_storage().nbytes() > 0  # a gathered parameter's memory is freed after a pass
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    if type(value) in (list, tuple, deque, set):
        return len(value) < _LONGEST and all(map(is_state, value))
    if type(value) is dict:
        return len(value) < _LONGEST and all(isinstance(k, (str, int)) for k in value) and all(map(is_state, value.values()))
    return isinstance(value, _VALUES)


def _holds(value: Any, tensors: set[int]) -> bool:
    """Whether a value is or contains one of these tensors, as a list of all parameters does."""
    if not isinstance(value, (list, tuple, deque, dict)):
        return id(value) in tensors
    return any(_holds(each, tensors) for each in (value.values() if isinstance(value, dict) else value))


def _is_opened(value: Any) -> bool:
    """Whether the walk looks into a value. Of library classes, it opens only containers, torch's modules and the like."""
    kind: type = type(value)
    return _opens(kind)


@functools.cache
def _opens(kind: type) -> bool:
    if issubclass(kind, (torch.Tensor, np.ndarray, *_VALUES)):
        return False
    return issubclass(kind, (*GENERATORS, *_OPENED)) or not is_library(kind.__module__)


def _inside(value: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """What a value holds: each path, with its namespace and its name there."""
    if isinstance(value, dict):
        yield from ((_joined(path, name), value, name) for name in list(islice(value, _MOST_ITEMS)))
    elif isinstance(value, (list, tuple)):
        yield from ((_joined(path, i), value, i) for i in range(min(len(value), _MOST_ITEMS)))
    elif isinstance(value, functools.partial):
        yield from ((path, (value.func, value.args, value.keywords), i) for i in range(3))
    elif isinstance(value, types.MethodType):
        yield from ((path, (value.__self__, value.__func__), i) for i in range(2))
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, path)
    elif isinstance(value, types.ModuleType):
        if not is_library(value.__name__) and "site-packages" not in (getattr(value, "__file__", None) or "site-packages"):
            names = vars(value)
            yield from ((_joined(_module_path(value), n), names, n) for n in list(names) if not n.startswith("__"))
    elif isinstance(value, type):
        if not is_library(value.__module__):
            own = _of_class(value)
            yield from ((_joined(value.__name__, name), own, name) for name in own.names)
            yield from _module_of(value)
    else:
        yield from _of_object(value, path)


def _of_function(value: types.FunctionType, path: str) -> Iterator[tuple[str, Any, Any]]:
    if not is_library(value.__module__):
        cells, names = _of_cells(value), vars(value)
        yield from ((_joined(path, name), cells, name) for name in cells.names)
        yield from ((_joined(path, name), names, name) for name in list(names))
        yield from ((path, value.__defaults__, i) for i, each in enumerate(value.__defaults__ or ()) if _is_opened(each))
        yield from _module_of(value)


def _module_of(value: Any) -> Iterator[tuple[str, Any, Any]]:
    if (name := value.__module__) in sys.modules:
        yield name, sys.modules, name


def _of_object(value: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    names: dict[str, Any] = getattr(value, "__dict__", {})
    kind: type = type(value)
    if isinstance(value, nn.Module):
        for group in ("_parameters", "_modules", *(() if _counts_only(value) else ("_buffers",))):
            yield from ((_joined(path, name), names[group], name) for name in list(names[group]))
    others = _set_by_libraries(kind) if isinstance(value, (Unit, nn.Module)) else ()
    yield from ((_joined(path, name), names, name) for name in list(names) if name not in others)
    kinds = [each for each in kind.__mro__ if not is_library(each.__module__)]
    if slots := [name for each in kinds for name in slots_of(each) if hasattr(value, name)]:
        held = _Names(slots, functools.partial(getattr, value), functools.partial(setattr, value))
        yield from ((_joined(path, name), held, name) for name in slots)
    yield from ((each.__name__, kinds, i) for i, each in enumerate(kinds))


def _joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _module_path(module: types.ModuleType) -> str:
    return module.__name__.replace("__main__", "script")


class _Names:
    """The closure variables of a function, the attributes of a class, or the slots of an object, as a dict."""

    def __init__(self, names: Iterable[str], get: Callable[[str], Any], put: Callable[[str, Any], None]) -> None:
        self.names, self.get, self.put = names, get, put

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.put(name, value)

    def __delitem__(self, name: str) -> None:
        """Nothing: the name exists as long as the function or class."""


def _of_cells(function: types.FunctionType) -> _Names:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    names = [name for name, cell in cells.items() if _is_filled(cell)]
    return _Names(names, lambda n: cells[n].cell_contents, lambda n, value: setattr(cells[n], "cell_contents", value))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _of_class(kind: type) -> _Names:
    names = [name for name in vars(kind) if not name.startswith("__")]
    return _Names(names, lambda n: vars(kind)[n], functools.partial(setattr, kind))


def _counts_only(module: nn.Module) -> bool:
    """Whether it is a batch norm in training mode, whose buffers do not affect its output."""
    return module.training and isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))


@functools.cache
def _set_by_libraries(kind: type) -> frozenset[str]:
    """The attributes that library classes among its bases have or set, which are no state of the script's."""
    of_libraries = [each for each in kind.__mro__ if is_library(each.__module__)]
    return frozenset(
        {"training", "_parameters", "_buffers", "_modules"}.union(*map(set_by, of_libraries), *map(vars, of_libraries))
    )


@functools.cache
def set_by(kind: type) -> frozenset[str]:
    """The attributes that the methods of a class set."""
    codes = [
        code
        for value in vars(kind).values()
        for function in (value, getattr(value, "fget", None), getattr(value, "fset", None))
        if (code := getattr(function, "__code__", None)) is not None
    ]
    return frozenset(i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")
