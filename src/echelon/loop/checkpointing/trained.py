"""Checkpoints that hold what is trained: frozen parameters are left out, and remembered by their checksums.

A run that resumes builds them again, as the first did; their checksums tell whether it did. Buffers are saved, since those of
frozen layers may move: batch norm's statistics do. A parameter is left out if it was frozen when training began and is still,
and if no checkpoint gave it its value.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from echelon.checkpoint.layout import this_rank
from echelon.checkpoint.location import Location
from echelon.checkpoint.store import table
from echelon.common.errors import CheckpointCorruptError, CheckpointMismatchError
from echelon.loop.auto.averaged import AveragedWeights
from echelon.loop.unit import Unit
from echelon.parallel.names import plain_names
from echelon.parallel.shards import whole
from echelon.parallel.state.state import ModuleState
from echelon.world import agree
from echelon.world.tensor_bytes import flat_bytes

__all__ = ["Frozen", "without_frozen"]

logger = logging.getLogger(__name__)

# A parameter: its type, shape and the checksum of its bytes.
Facts = list[Any]

# Frozen or not, what came from a checkpoint is not what the script builds.
_restored: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class Frozen:
    """A saver's knowledge of what it leaves out. Checksums are computed once in a run, at the first save."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] | None = None
        self._facts: dict[str, dict[str, Facts]] = {}

    def begin(self, unit: Unit) -> None:
        """When training begins."""
        self._names = {name: _frozen(module) for name, module in unit.tracked_modules().items()}
        if not any(self._names.values()):
            logger.warning("only_trained=True has no effect: no parameter is frozen")

    def leave_out(self, states: dict[str, Any], unit: Unit) -> tuple[dict[str, Any], dict[str, dict[str, Facts]]]:
        """The states without what is frozen, and what the manifest says of that. Collective at the first save."""
        if self._names is None:
            self.begin(unit)
        assert self._names is not None
        left: dict[str, dict[str, Facts]] = {}
        for name, module in unit.tracked_modules().items():
            names = self._names.get(name, set()) & _frozen(module)
            known = self._facts.setdefault(name, {})
            if agree.any_rank(bool(names - known.keys())):
                known |= _facts(states[name], names - known.keys())
            left[name] = {n: known[n] for n in sorted(names) if n in known}
            if getattr(states.get(name), "is_cut", False):  # the manifest, which rank 0 writes, names those of all stages
                left[name] = {n: facts for each in agree.gather(left[name]) for n, facts in sorted(each.items())}
        left = {name: found for name, found in left.items() if found}
        return _without(states, {name: set(found) for name, found in left.items()}, unit), left


def without_frozen(states: dict[str, Any], saved: Any, unit: Unit, path: Location, *, strict: bool, note: bool) -> dict[str, Any]:
    """The states to read from a checkpoint that left out what `saved` describes. Collective.

    Args:
        note: remember that the other parameters come from a checkpoint now, and must be in those of this run, frozen or not.
    Raises:
        CheckpointMismatchError: the unit's are not those that the saved run had, with a table; without `strict` it is logged.
    """
    frozen = _parsed(saved, path)
    rows: list[tuple[str, str, str]] = []
    for name, were in frozen.items():
        if not isinstance(states.get(name), ModuleState):
            continue
        now = _facts(states[name], set(were))
        rows += [
            (f"{name}.{n}", _shown(facts, now.get(n)), _shown(now.get(n), facts))
            for n, facts in were.items()
            if now.get(n) != facts
        ]
    if rows:
        text = (
            f"{path} holds what was trained only, and was trained on other frozen parameters than this unit has:\n"
            f"{table(('frozen', 'saved', 'now'), rows)}Build the model with the weights that the saved run began with."
        )
        if strict:
            raise CheckpointMismatchError(text)
        logger.warning("%s", text)
    for name, module in unit.tracked_modules().items():
        if name in states and note:
            _restored[module] = {n for n, _ in plain_names(module, every_name=True)} - set(frozen.get(name, ()))
    return _without(states, {name: set(were) for name, were in frozen.items()}, unit)


def _frozen(module: nn.Module) -> set[str]:
    """Names of what is frozen; a tied parameter has several."""
    names = {n for n, p in plain_names(module, every_name=True) if not p.requires_grad}
    return names - _restored.get(module, set())


def _facts(state: ModuleState, names: set[str]) -> dict[str, Facts]:
    """Type, shape and checksum of whole parameters, however they are split. Collective.

    Each rank computes the checksums of some, beside the others.
    """
    rank, size = this_rank()
    mine: dict[str, Facts] = {}
    values = state.state_dict()
    for number, name in enumerate(n for n in values if n in names and isinstance(values[n], torch.Tensor)):
        value = whole(values[name])
        if state.is_cut or number % size == rank:
            mine[name] = [str(value.dtype), list(value.shape), zlib.crc32(flat_bytes(value.cpu()).numpy().data)]
    return {name: facts for each in agree.gather(mine) for name, facts in each.items()}


def _parsed(saved: Any, path: Location) -> dict[str, dict[str, Facts]]:
    def is_facts(facts: Any) -> bool:
        return isinstance(facts, list) and [type(each) for each in facts] == [str, list, int]

    if not isinstance(saved, dict) or not all(
        isinstance(were, dict) and all(is_facts(facts) for facts in were.values()) for were in saved.values()
    ):
        raise CheckpointCorruptError(f"{path}: what its manifest says of frozen parameters cannot be read.", path=str(path))
    return saved


def _shown(facts: Facts | None, other: Facts | None) -> str:
    if facts is None:
        return "-"
    text = f"{facts[0].removeprefix('torch.')} {tuple(facts[1])}"
    return f"{text} checksum {facts[2]:08x}" if other is not None and facts[:2] == other[:2] else text


def _without(states: dict[str, Any], names: Mapping[str, set[str]], unit: Unit) -> dict[str, Any]:
    every = set().union(*names.values()) if names else set()
    averages = {n for n, value in unit.tracked_misc_statefuls().items() if isinstance(value, AveragedWeights)}
    found = dict(states)
    for name, state in states.items():
        left = {f"parameters.{n}" for n in every} if name in averages else names.get(name, set())
        if left and (name in averages or isinstance(state, ModuleState)):
            found[name] = _Part(state, left)
    return found


class _Part:
    """A state without some of its names."""

    keyed_by_name = True

    def __init__(self, state: Any, left: set[str]) -> None:
        self._state, self._left = state, left

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self._state.state_dict().items() if name not in self._left}

    def room(self, me: str, saved: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self._state.room(me, saved) if isinstance(self._state, ModuleState) else {}
        return {name: value for name, value in found.items() if name not in self._left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        whole = self._state.state_dict()
        self._state.load_state_dict({**{name: whole[name] for name in whole if name in self._left}, **state_dict})
