"""What a unit keeps from one forward pass to the next beside what it trains: counters, queues, running means, teachers.

One process makes other passes than the ranks did, so that such state would not be theirs. It is found as generators are
(`generators.py`): attributes of the unit, of modules, and of objects in the variables of functions under way or around others;
the globals of the script's own modules. Its name is its path. The variables of a loop's function themselves are seen, but Python
lets nobody set them. What is sharded is not seen.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from echelon.loop.own.unit import LoopUnit
from echelon.loop.unit import Unit
from echelon.prover.generators import is_filled, is_library, own_frames, own_modules
from echelon.prover.micro import digest
from echelon.prover.values import modules_of, parameters_of

__all__ = ["ABSENT", "VARIABLE", "KeptState", "agreeing", "digests_of", "of_loop", "unlike"]

_MOST_BYTES = 64 * 2**20  # that are copied of a unit, and of one tensor that is looked at
_MOST_BYTES_OF_LOOP = 2**20
_MOST_ITEMS = 10_000
_MOST_OBJECTS = 20_000
_DEEPEST = 6
ABSENT = "echelon: not there"
VARIABLE = "the loop's "  # how the names of local variables begin
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_CLOSED = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, DataLoader, Dataset, Sampler, torch.Generator)

State = Mapping[str, Any]
_Place = tuple[Any, Any]  # the namespace of a value, and its name there


class KeptState:
    """The state of one unit, by path; or of another object, such as a data set.

    Args:
        is_unit: it has modules, whose trained parameters are no state.
    """

    def __init__(self, unit: Any, *, is_unit: bool = True) -> None:
        self._unit, self._is_unit = unit, is_unit
        self._seen: set[str] = set()
        self.too_large: set[str] = set()

    def values(self) -> dict[str, Any]:
        """Copies, as far as they are few enough."""
        copies: dict[str, Any] = {}
        left = _MOST_BYTES
        for path, (names, name) in self._places().items():
            if path not in self.too_large and (size := _bytes(names[name])) < left:
                copies[path], left = _copied(names[name]), left - size
            else:
                self.too_large.add(path)
        self._seen = (self._seen | copies.keys()) - self.too_large
        return {**dict.fromkeys(self._seen, ABSENT), **copies}

    def restore(self, state: State) -> None:
        """Put values back under the names that they have in this process, in its floating-point type."""
        if not state:
            return
        places = self._places()
        for path, value in state.items():
            if path.startswith(VARIABLE):
                continue
            names, name = places.get(path, (None, ""))
            if names is None:
                owner, _, name = path.rpartition(".")
                names = self._owner(owner) if value != ABSENT or not isinstance(value, str) else None
            if names is not None and isinstance(value, str) and value == ABSENT:
                del names[name]
            elif names is not None:
                _put(names, name, _copied(value))

    def _owner(self, path: str) -> Any:
        """The namespace of an attribute that is not there yet."""
        owner = self._unit if not path else getattr(self._unit, path, None)
        return getattr(owner, "__dict__", None)

    def _places(self) -> dict[str, _Place]:
        found: dict[str, _Place] = {}
        trained = {id(p) for _, p in parameters_of(self._unit)} if self._is_unit else set()
        roots = [("", self._unit)]
        roots += [(f"{prefix}module", module) for prefix, module in modules_of(self._unit)] if self._is_unit else []
        roots += [(module.__name__.replace("__main__", "script"), module) for module in own_modules(self._unit)]
        roots += [
            (f"{frame.f_code.co_name}.{name}", value)
            for frame in own_frames()
            for name, value in frame.f_locals.items()
            if (isinstance(value, types.FunctionType) or not is_library(type(value).__module__)) and _is_open(value)
        ]
        waiting: deque[tuple[str, Any, int]] = deque((path, root, 0) for path, root in roots)
        seen: set[int] = set()
        while waiting and len(seen) < _MOST_OBJECTS:
            path, value, depth = waiting.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            for kind in type(value).__mro__:
                if not is_library(kind.__module__) and id(kind) not in seen:
                    seen.add(id(kind))
                    of_class = _of_class(kind)
                    found.update({f"{kind.__name__}.{name}": (of_class, name) for name in of_class.names})
            for names, name in _inside(value):
                inner, here = names[name], f"{path}.{name}" if path else str(name)
                if id(inner) in trained:
                    continue
                if _is_state(inner):
                    found.setdefault(here, (names, name))
                elif depth < _DEEPEST and _is_open(inner):
                    waiting.append((here, inner, depth + 1))
        tensors: dict[int, str] = {}  # of several paths to one, such as a variable left by a loop, the longest
        for path, (names, name) in list(found.items()):
            if isinstance(names[name], torch.Tensor) and (other := tensors.setdefault(id(names[name]), path)) != path:
                del found[other]
                tensors[id(names[name])] = path
        return found


def of_loop() -> dict[str, Any]:
    """Of the script's functions that are running: local variables that their loop reads before it sets them."""
    found: dict[str, Any] = {}
    for frame in own_frames():
        names = _read_first(frame.f_code, frame.f_lasti)
        own = {name: value for name, value in frame.f_locals.items() if name in names}
        found.update({VARIABLE + n: _copied(v) for n, v in own.items() if _is_state(v) and _bytes(v) < _MOST_BYTES_OF_LOOP})
    return found


@functools.cache
def _read_first(code: types.CodeType, at: int) -> frozenset[str]:
    """Local names that are read before they are set, from `at` to where the loop around it begins again."""
    first: dict[str, bool] = {}
    for each in dis.get_instructions(code):
        if each.offset > at and each.opname.startswith("JUMP_BACKWARD") and each.argval <= at:
            break
        if each.offset > at and each.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST", "STORE_DEREF")):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)  # two at once since Python 3.13
            for name, how in zip(names, re.findall("LOAD|STORE", each.opname), strict=False):
                first.setdefault(name, how == "LOAD")
    return frozenset(name for name, is_read in first.items() if is_read)


def digests_of(state: State) -> dict[str, int]:
    """A checksum of each value."""
    return {path: digest(value) for path, value in state.items()}


def unlike(one: State, other: State) -> set[str]:
    """The paths that both have, with other values."""
    return {path for path in one.keys() & other.keys() if digest(one[path]) != digest(other[path])}


def _inside(value: Any) -> Iterator[_Place]:
    """The names in a value, each with the mapping that has it."""
    if isinstance(value, dict):
        yield from ((value, name) for name in list(value)[:_MOST_ITEMS])
        return
    if isinstance(value, (list, tuple)):
        yield from ((value, i) for i in range(min(len(value), _MOST_ITEMS)))
        return
    names = vars(value)
    if isinstance(value, types.FunctionType):
        cells = _of_cells(value)
        yield from ((cells, name) for name in cells.names)
        yield from ((names, name) for name in list(names))
        return
    if isinstance(value, nn.Module):
        for kind in ("_parameters", "_modules", *(() if _counts_only(value) else ("_buffers",))):
            yield from ((names[kind], name) for name in list(names[kind]))
    if isinstance(value, types.ModuleType):
        yield from ((names, name) for name in list(names) if not name.startswith("__"))
    elif any(not is_library(each.__module__) for each in type(value).__mro__[:-1]):
        own: Any = type(value)
        others = _set_by_libraries(own) if isinstance(value, (Unit, nn.Module)) else ()
        yield from ((names, name) for name in list(names) if name not in others)


class _Names:
    """What a function keeps in variables of the one around it, or a class in itself, as a dict."""

    def __init__(self, names: Iterable[str], get: Callable[[str], Any], put: Callable[[str, Any], None]) -> None:
        self.names, self.get, self.put = names, get, put

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.put(name, value)

    def __delitem__(self, name: str) -> None:
        """It is there as long as the function, or the class."""


def _of_cells(function: types.FunctionType) -> _Names:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    names = [name for name, cell in cells.items() if is_filled(cell)]
    return _Names(names, lambda n: cells[n].cell_contents, lambda n, value: setattr(cells[n], "cell_contents", value))


def _of_class(kind: type) -> _Names:
    values = [name for name, value in vars(kind).items() if not name.startswith("__") and _is_state(value)]
    return _Names(values, lambda n: vars(kind)[n], functools.partial(setattr, kind))


def _counts_only(module: nn.Module) -> bool:
    """A batch norm's buffers change nothing while it trains."""
    return module.training and isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))


@functools.cache
def _set_by_libraries(kind: type) -> frozenset[str]:
    """The attributes that library classes among its bases set: theirs, and no state of the script's."""
    stored = set().union(*(_set_by(each) for each in kind.__mro__ if is_library(each.__module__)))
    return frozenset({*stored, "training", "_parameters", "_buffers", "_modules"})


@functools.cache
def _set_by(kind: type) -> frozenset[str]:
    codes = [
        code
        for value in vars(kind).values()
        for function in (value, getattr(value, "fget", None), getattr(value, "fset", None))
        if (code := getattr(function, "__code__", None)) is not None
    ]
    return frozenset(i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


def _is_open(value: Any) -> bool:
    if isinstance(value, (type, *_CLOSED)):
        return False
    if isinstance(value, nn.Module) or type(value) in (dict, list, tuple):
        return True
    if isinstance(value, types.FunctionType):
        return not is_library(value.__module__)
    return hasattr(value, "__dict__") and not is_library(type(value).__module__)


def _is_state(value: Any) -> bool:
    """Whether it can be copied and put back: values and tensors, and containers of nothing else."""
    if isinstance(value, torch.Tensor):
        is_plain = type(value) in (torch.Tensor, nn.Parameter, nn.Buffer) and value.layout is torch.strided
        return is_plain and value.grad_fn is None and not value.is_meta  # which has nothing to keep
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    if type(value) in (list, tuple, deque, set):
        return len(value) < _MOST_ITEMS and all(map(_is_state, value))
    if type(value) is dict:
        return len(value) < _MOST_ITEMS and all(isinstance(k, (str, int)) for k in value) and all(map(_is_state, value.values()))
    return isinstance(value, _VALUES)


def _bytes(value: Any) -> int:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    if isinstance(value, (list, tuple, deque, set, dict)):
        return sum(map(_bytes, value.values() if isinstance(value, dict) else value))
    return 8


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, deque):
        return deque(map(_copied, value), value.maxlen)
    if type(value) in (list, tuple, set):
        kind: Any = type(value)
        return kind(map(_copied, value))
    return value


def _put(names: Any, name: Any, value: Any) -> None:
    """In place where others may hold the same object."""
    current = names[name] if isinstance(names, (list, tuple)) else names.get(name)
    if isinstance(value, torch.Tensor):
        if isinstance(current, torch.Tensor) and current.shape == value.shape:
            with torch.no_grad():
                current.copy_(value)
            return
        value = value.to(torch.get_default_dtype()) if value.is_floating_point() else value
    if isinstance(current, list) and isinstance(value, list):
        current[:] = value
    elif isinstance(current, (deque, set, dict)) and type(current) is type(value):
        current.clear()
        extend: Any = current.extend if isinstance(current, deque) else current.update
        extend(value)
    elif not isinstance(names, tuple):
        names[name] = value


def agreeing(states: Iterable[State]) -> dict[str, Any]:
    """Of several, what they have in common."""
    first, *others = states
    apart = set().union(*(unlike(first, other) | (first.keys() - other.keys()) for other in others))
    return {path: value for path, value in first.items() if path not in apart}


for _kind in (*LoopUnit.__mro__, nn.Module):  # once in the server that forks the ranks: it reads thousands of instructions
    _set_by(_kind)
