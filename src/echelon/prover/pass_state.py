"""The state before a pass: the states of the RNGs that it can reach, and what the unit keeps from the pass before.

RNGs are torch's, numpy's and Python's global ones, and generators that a script holds. Kept state is anything besides the trained
parameters: counters, queues, running means, teachers. One process makes other passes than the ranks did, so its kept state would
differ from theirs. One walk finds both (`objects.py`). A loop function's own variables are recorded, but Python cannot set them.
Sharded state is not seen.
"""

from __future__ import annotations

import dis
import functools
import random
import re
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from echelon.loop.own.loop_unit import LoopUnit
from echelon.prover.micro import digest
from echelon.prover.objects import Objects, is_state, own_frames, set_by
from echelon.world import rng

__all__ = ["ABSENT", "GLOBAL", "VARIABLE", "KeptState", "Sources", "agreeing", "digests_of", "drawn_between", "of_loop", "unlike"]

GLOBAL = ("torch", "numpy", "python")
_GLOBAL_NAMES = {*GLOBAL, "cuda"}
_OF_GLOBALS: tuple[Any, ...] = (np.random.get_state, random.getstate)  # methods of the global generators
_MOST_BYTES = 64 * 2**20  # of a unit's state that are copied
_MOST_BYTES_OF_LOOP = 2**20
ABSENT = "echelon: not there"
VARIABLE = "the loop's "  # the prefix of names of local variables
State = Mapping[str, Any]


class Sources:
    """The RNGs that a unit's step, or a dataset, can reach; each is a stream with a name.

    Args:
        root: where generators are searched whenever states are asked for; or Objects, which their owner searches.
        name: the prefix of the names of generators in `root`.
    """

    def __init__(self, root: Any, name: str = "") -> None:
        self._looks = not isinstance(root, Objects)
        self._objects: Objects = Objects(root, name, keeps=False) if self._looks else root

    @property
    def _streams(self) -> dict[str, Any]:
        """Generators by name. The path of a held one gets a prefix if a global stream has that name."""
        numpy, python = (method.__self__ for method in _OF_GLOBALS)
        streams: dict[str, Any] = {"torch": torch.default_generator, "numpy": numpy, "python": python}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            streams["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
        held = self._objects.generators.items()
        return streams | {f"unit.{n}" if n in _GLOBAL_NAMES else n: each for n, each in held}

    def states(self) -> dict[str, Any]:
        """The state of every stream by name, in values that can be saved."""
        if self._looks:
            self._objects.look()
        return {name: rng.state_of(generator) for name, generator in self._streams.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the streams that `states` names."""
        if states.keys() - _GLOBAL_NAMES:
            self._objects.look()
        streams = self._streams
        for name in states.keys() & streams.keys():
            rng.set_state(streams[name], states[name])

    def pin(self) -> None:
        """Set all streams but torch's own to one state, which is the same on every rank and before every pass."""
        for name, generator in self._streams.items():
            if name not in ("torch", "cuda"):
                _pin(generator)


def drawn_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The streams of `before` whose state differs in `after`."""
    return {name: state for name, state in before.items() if name in after and not _is_same(state, after[name])}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states are equal. This runs twice in each micro-batch, and Python's state alone has 625 numbers."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, tuple) and any(isinstance(each, (np.ndarray, torch.Tensor)) for each in one):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _pin(generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(0)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(0).state
    else:
        generator.seed(0)


class KeptState:
    """The values of the state that `objects` finds, by path."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._seen: set[str] = set()
        self.too_large: set[str] = set()

    def values(self) -> dict[str, Any]:
        """Copies of the present values, up to a limit of bytes."""
        self._objects.look()
        copies: dict[str, Any] = {}
        left = _MOST_BYTES
        for path, (names, name) in self._objects.places.items():
            if path not in self.too_large and (size := _bytes(names[name])) < left:
                copies[path], left = _copied(names[name]), left - size
            else:
                self.too_large.add(path)
        self._seen = (self._seen | copies.keys()) - self.too_large
        return {**dict.fromkeys(self._seen, ABSENT), **copies}

    def restore(self, state: State) -> None:
        """Put values back at their paths in this process, in its floating-point type."""
        if state:
            self._objects.look()
        places = self._objects.places
        for path, value in state.items():
            if path.startswith(VARIABLE):
                continue
            names, name = places.get(path, (None, ""))
            if names is None:
                owner, _, name = path.rpartition(".")
                names = self._owner(owner) if value != ABSENT or not isinstance(value, str) else None
            if names is not None and isinstance(value, str) and value == ABSENT:
                if not isinstance(names, tuple):  # fields of a tuple, such as a PackedSequence, come and go with it
                    del names[name]
            elif names is not None:
                _put(names, name, _copied(value))

    def _owner(self, path: str) -> Any:
        """The namespace of an attribute that is not there yet."""
        owner = self._objects.root if not path else getattr(self._objects.root, path, None)
        return getattr(owner, "__dict__", None)


def of_loop() -> dict[str, Any]:
    """Local variables of the script's running functions that their loop reads before it sets them."""
    state: dict[str, Any] = {}
    for frame in own_frames():
        names = _read_first(frame.f_code, frame.f_lasti)
        own = {name: value for name, value in frame.f_locals.items() if name in names}
        state.update({VARIABLE + n: _copied(v) for n, v in own.items() if is_state(v) and _bytes(v) < _MOST_BYTES_OF_LOOP})
    return state


@functools.cache
def _read_first(code: types.CodeType, at: int) -> frozenset[str]:
    """Local names that are read before they are set, from instruction `at` to the next iteration of the loop around it."""
    steps = list(dis.get_instructions(code))
    places = {each.offset: i for i, each in enumerate(steps)}
    names_read, known = set[str](), dict[int, frozenset[str]]()  # by instruction: names that are set on every way to it
    ways = [(next((i for i, each in enumerate(steps) if each.offset > at), len(steps)), frozenset[str]())]
    while ways:
        i, names = ways.pop()
        while i < len(steps) and names & known.get(i, names) != known.get(i):
            known[i] = names = names & known.get(i, names)
            each = steps[i]
            if each.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST", "STORE_DEREF")):
                given = each.argval if isinstance(each.argval, tuple) else (each.argval,)  # two at once since Python 3.13
                for name, how in zip(given, re.findall("LOAD|STORE", each.opname), strict=False):
                    names_read |= {name} - names if how == "LOAD" else set()
                    names |= {name} if how == "STORE" else set()
            if "JUMP" in each.opname or each.opname in ("FOR_ITER", "SEND"):
                if each.argval <= at:
                    break  # the loop begins again
                ways.append((places[each.argval], names))
            if each.opname.startswith(("JUMP_", "RETURN", "RAISE", "RERAISE")):
                break
            i += 1
    return frozenset(names_read)


def digests_of(state: State) -> dict[str, int]:
    """A checksum of each value."""
    return {path: digest(value) for path, value in state.items()}


def unlike(one: State, other: State) -> set[str]:
    """The paths that both have, with different values."""
    return {path for path in one.keys() & other.keys() if digest(one[path]) != digest(other[path])}


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
    """Set a value; in place, if others may hold the same object."""
    current = names[name] if isinstance(names, (list, tuple)) else names.get(name)
    if isinstance(value, torch.Tensor):
        if isinstance(current, torch.Tensor) and current.shape == value.shape:
            with torch.no_grad():
                current.copy_(value)
            return
        value = value.to(torch.get_default_dtype()) if value.is_floating_point() else value
    if isinstance(current, list) and isinstance(value, list):
        if len(current) == len(value):
            for i, each in enumerate(value):
                _put(current, i, each)
        else:
            current[:] = value
    elif isinstance(current, (deque, set, dict)) and type(current) is type(value):
        current.clear()
        extend: Any = current.extend if isinstance(current, deque) else current.update
        extend(value)
    elif not isinstance(names, tuple):
        names[name] = value


def agreeing(states: Iterable[State]) -> dict[str, Any]:
    """The paths and values that all states have in common."""
    first, *others = states
    apart = set().union(*(unlike(first, other) | (first.keys() - other.keys()) for other in others))
    return {path: value for path, value in first.items() if path not in apart}


for _kind in (*LoopUnit.__mro__, nn.Module):  # cached in the server that forks the ranks: it reads thousands of instructions
    set_by(_kind)
