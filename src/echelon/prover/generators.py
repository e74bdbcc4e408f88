"""Where a step may draw random numbers from: torch's, numpy's and Python's global streams, and generators that a script holds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from echelon.prover.objects import Objects

__all__ = ["GLOBAL", "Sources", "drawn_between"]

GLOBAL = ("torch", "numpy", "python")
_GLOBAL_NAMES = {*GLOBAL, "cuda"}


class Sources:
    """The streams that a unit's step, or a dataset, can reach.

    Args:
        root: from where generators are searched each time that states are asked for; or Objects, whose owner looks.
        name: how the names of what it holds begin.
    """

    def __init__(self, root: Any, name: str = "") -> None:
        self._looks = not isinstance(root, Objects)
        self._objects: Objects = Objects(root, name, keeps=False) if self._looks else root

    @property
    def _held(self) -> dict[str, Any]:
        """By name: its path, where no global stream is called so."""
        return {f"unit.{n}" if n in _GLOBAL_NAMES else n: each for n, each in self._objects.generators.items()}

    def states(self) -> dict[str, Any]:
        """The state of every stream by name, in values that can be saved."""
        if self._looks:
            self._objects.look()
        found = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(legacy=True), "python": random.getstate()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state()
        found.update({name: _state(generator) for name, generator in self._held.items()})
        return found

    def restore(self, states: Mapping[str, Any]) -> None:
        """Put back those streams that `states` names."""
        held = {}
        if states.keys() - _GLOBAL_NAMES:
            self._objects.look()
            held = self._held
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
        for generator in self._held.values():
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
