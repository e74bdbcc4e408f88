"""Frozen parameters in checkpoints.

With `SaveOptions(only_trained=True)`, frozen parameters are left out of checkpoints, except for their checksums: a resumed run
builds them again, and the checksums tell whether they are the same. Buffers are saved, because those of frozen layers may change,
such as batch norm's statistics. A parameter is left out if it has been frozen since the script built its model, and if its value
does not come from a checkpoint.

During training, a run may unfreeze or freeze parameters, and add groups to its optimizers. Its script does not do so again when
the run resumes, because the epoch at whose start it did so is over. So checkpoints hold these changes, with a checksum of what
was frozen when the script had built its model. If a script now builds its model with another choice, the script's choice counts.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from echelon.checkpoint.layout import this_rank
from echelon.checkpoint.location import Location
from echelon.checkpoint.renamed import moved
from echelon.checkpoint.store import table
from echelon.checkpoint.strict import fits
from echelon.common.errors import CheckpointCorruptError, CheckpointMismatchError
from echelon.loop.auto.averaged import AveragedWeights
from echelon.loop.auto.optimizer_checks import add_again
from echelon.loop.unit import Unit
from echelon.parallel.names import plain_names
from echelon.parallel.shards import ranks_apart, whole
from echelon.parallel.state.partition import Partition, parameter_groups
from echelon.parallel.state.state import ModuleState
from echelon.world import agree
from echelon.world.tensor_bytes import flat_bytes

__all__ = ["Frozen", "changes_since_built", "look_at_built", "train_as_saved", "without_frozen"]

logger = logging.getLogger(__name__)

# Of a parameter: its dtype, shape and the checksum of its bytes.
Facts = list[Any]

# Form of the result of `changes_since_built`.
_CHANGES = {"built": {str: int}, "groups": {str: int}, "unfrozen": {str: [str]}, "frozen": {str: [str]}, "added": {str: [[str]]}}

# Names of parameters whose values come from a checkpoint, or were trained. The script does not build these values, so they must
# be saved.
_not_built: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class Frozen:
    """The frozen parameters that a saver leaves out. Their checksums are computed once in a run, at the first save."""

    def __init__(self) -> None:
        self._facts: dict[str, dict[str, Facts]] = {}

    def look(self, unit: Unit) -> bool:
        """Whether there are any. What is not frozen at the moment is saved from now on, also when it is frozen again."""
        return any(_to_leave_out(unit).values())

    def begin(self, unit: Unit) -> None:
        if not self.look(unit):
            logger.warning("only_trained=True has no effect: no parameter is frozen")

    def leave_out(self, states: dict[str, Any], unit: Unit) -> tuple[dict[str, Any], dict[str, dict[str, Facts]]]:
        """The states without frozen parameters, and the facts about these for the manifest. Collective at the first save."""
        left: dict[str, dict[str, Facts]] = {}
        for name, names in _to_leave_out(unit).items():
            known = self._facts.setdefault(name, {})
            if agree.any_rank(bool(names - known.keys())):
                known |= _facts(states[name], names - known.keys())
            left[name] = {n: known[n] for n in sorted(names) if n in known}
            if getattr(states.get(name), "is_cut", False):  # rank 0 writes the manifest, which names those of all stages
                left[name] = {n: facts for each in agree.gather(left[name]) for n, facts in sorted(each.items())}
        left = {name: names_left for name, names_left in left.items() if names_left}
        return _without(states, {name: set(names_left) for name, names_left in left.items()}, unit), left


def without_frozen(states: dict[str, Any], saved: Any, unit: Unit, path: Location, *, strict: bool, note: bool) -> dict[str, Any]:
    """The states to read from a checkpoint that left out the frozen parameters described by `saved`. Collective.

    Args:
        note: remember that the other parameters come from a checkpoint, so that this run's checkpoints include them, frozen or
            not.
    Raises:
        CheckpointMismatchError: the unit's frozen parameters are not those of the saved run, with a table; without `strict` this
            is only logged.
    """
    if not fits(saved, {str: {str: (str, list, int)}}):
        raise CheckpointCorruptError(f"{path}: its manifest's facts about frozen parameters cannot be read.", path=str(path))
    rows: list[tuple[str, str, str]] = []
    for name, were in saved.items():
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
            f"{path} holds only trained parameters, trained on other frozen parameters than this unit has:\n"
            f"{table(('frozen', 'saved', 'now'), rows)}Build the model with the weights that the saved run began with."
        )
        if strict:
            raise CheckpointMismatchError(text)
        logger.warning("%s", text)
    for name, module in unit.tracked_modules().items():
        if name in states and note:
            _not_built[module] = {n for n, _ in plain_names(module, every_name=True)} - set(saved.get(name, ()))
    return _without(states, {name: set(were) for name, were in saved.items()}, unit)


def _to_leave_out(unit: Unit) -> dict[str, set[str]]:
    """Names of the parameters to leave out, by module."""
    look_at_built(unit)
    built: _Built = vars(unit)["_built"]
    names: dict[str, set[str]] = {}
    for name, module in unit.tracked_modules().items():
        before, others = built.frozen.get(name, set()), _not_built.setdefault(module, set())
        others |= before - _frozen(module)
        names[name] = before - others
    return names


def _facts(state: ModuleState, names: set[str]) -> dict[str, Facts]:
    """Dtype, shape and checksum of whole parameters, however they are sharded. Collective.

    The ranks share the work: each computes the checksums of some parameters.
    """
    rank, size = this_rank()
    own_facts: dict[str, Facts] = {}
    values = state.state_dict()
    for number, name in enumerate(n for n in values if n in names and isinstance(values[n], torch.Tensor)):
        value = whole(values[name])
        if state.is_cut or number % size == rank:
            own_facts[name] = [str(value.dtype), list(value.shape), zlib.crc32(flat_bytes(value.cpu()).numpy().data)]
    return {name: facts for each in agree.gather(own_facts) for name, facts in each.items()}


def _shown(facts: Facts | None, other: Facts | None) -> str:
    if facts is None:
        return "-"
    text = f"{facts[0].removeprefix('torch.')} {tuple(facts[1])}"
    return f"{text} checksum {facts[2]:08x}" if other is not None and facts[:2] == other[:2] else text


def _without(states: dict[str, Any], names: Mapping[str, set[str]], unit: Unit) -> dict[str, Any]:
    every = set().union(*names.values()) if names else set()
    averages = {n for n, value in unit.tracked_misc_statefuls().items() if isinstance(value, AveragedWeights)}
    kept = dict(states)
    for name, state in states.items():
        left = {f"parameters.{n}" for n in every} if name in averages else names.get(name, set())
        if left and (name in averages or isinstance(state, ModuleState)):
            kept[name] = _Part(state, left)
    return kept


class _Part:
    """A state without some of its names."""

    keyed_by_name = True

    def __init__(self, state: Any, left: set[str]) -> None:
        self._state, self._left = state, left

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self._state.state_dict().items() if name not in self._left}

    def room(self, me: str, saved: Any) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = self._state.room(me, saved) if isinstance(self._state, ModuleState) else {}
        return {name: value for name, value in tensors.items() if name not in self._left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        whole = self._state.state_dict()
        self._state.load_state_dict({**{name: whole[name] for name in whole if name in self._left}, **state_dict})


# --- parameters that a run has frozen, unfrozen or grouped during training


@dataclass
class _Built:
    """The unit as the script has built it: the frozen parameters of each module, and the number of groups of each optimizer."""

    frozen: dict[str, set[str]]
    groups: dict[str, int]


def look_at_built(unit: Unit) -> bool:
    """Note what is frozen, before anything is restored or trained. Only the first call does so, and returns True."""
    if "_built" in vars(unit):
        return False
    vars(unit)["_built"] = _Built(
        {name: _frozen(module) for name, module in unit.tracked_modules().items()},
        {name: len(optimizer.param_groups) for name, optimizer in unit.tracked_optimizers().items()},
    )
    return True


def changes_since_built(unit: Unit) -> dict[str, Any]:
    """Changes since the script built the unit, for the manifest; {} if there are none. Collective in a pipeline."""
    look_at_built(unit)
    built: _Built = vars(unit)["_built"]
    unfrozen, frozen, built_frozen = {}, {}, {}
    for name, module in unit.tracked_modules().items():
        before, now = built.frozen.get(name, set()), _frozen(module)
        unfrozen[name] = sorted(_of_all_stages(module, before - now))
        frozen[name] = sorted(_of_all_stages(module, now - before))
        built_frozen[name] = _checksum(_of_all_stages(module, before))
    added = _added(unit, built)
    if not any((*unfrozen.values(), *frozen.values(), *added.values())):
        return {}
    return {"built": built_frozen, "unfrozen": unfrozen, "frozen": frozen, "added": added, "groups": built.groups}


def _added(unit: Unit, built: _Built) -> dict[str, list[list[str]]]:
    """For each optimizer, the parameters of the groups that were added since."""
    grown = {
        name: optimizer
        for name, optimizer in unit.tracked_optimizers().items()
        if name in built.groups and len(optimizer.param_groups) > built.groups[name]
    }
    if not grown:
        return {}
    names = {p: f"{owner}.{n}" for owner, module in unit.tracked_modules().items() for n, p in plain_names(module)}
    return {
        name: [[names.get(p, "") for p in group] for group in parameter_groups(optimizer)[built.groups[name] :]]
        for name, optimizer in grown.items()
    }


def train_as_saved(saved: Any, unit: Unit, path: Location, rename: Mapping[str, str] | None, *, rolls_back: bool) -> None:
    """Freeze, unfreeze and group parameters as in the saved run, before its state is read. Collective.

    Does nothing in a process that has trained or restored before: what its script froze since then is the script's choice.

    Args:
        rolls_back: the same run goes back to an earlier state, so parameters that it has unfrozen since are frozen again.
    """
    is_new = look_at_built(unit)
    if saved is None or not (is_new or rolls_back):
        return
    built: _Built = vars(unit)["_built"]
    modules, now = unit.tracked_modules(), dict[str, nn.Parameter]()
    for owner, module in modules.items():
        for name, parameter in plain_names(module, every_name=True):
            now[f"{owner}.{name}"] = parameter
            if rolls_back and owner in built.frozen:
                parameter.requires_grad_(name not in built.frozen[owner])
    if saved == {}:
        return
    if (wrong := next((key for key, form in _CHANGES.items() if not fits(saved, {key: form})), None)) is not None:
        raise CheckpointCorruptError(
            f"{path}: its manifest's facts about trained parameters cannot be read: {wrong}.", path=str(path)
        )
    same = {n: _checksum(_of_all_stages(m, built.frozen.get(n, set()))) for n, m in modules.items()} == saved["built"]
    if not (same or rename) or any(built.groups.get(name) != number for name, number in saved["groups"].items()):
        if agree.is_rank0():
            logger.warning(
                "the run that saved %s had frozen, unfrozen or grouped parameters during training. This script builds its model "
                "with others frozen, or its optimizer with other groups, so this script's choice is used",
                path,
            )
        return
    for key, trains in (("unfrozen", True), ("frozen", False)):
        names = [moved(f"{owner}.{name}", rename or {}) for owner, every in saved[key].items() for name in every]
        parameters = [now[name] for name in names if name in now]
        for parameter in parameters:
            parameter.requires_grad_(trains)
        if parameters and agree.is_rank0():
            logger.info("%s parameters are %s, as in %s", len(parameters), key, path)
    _add_groups(saved["added"], unit, now, rename or {})


def _add_groups(
    added: Mapping[str, list[list[str]]], unit: Unit, now: Mapping[str, nn.Parameter], rename: Mapping[str, str]
) -> None:
    for name, optimizer in unit.tracked_optimizers().items():
        for group in added.get(name, ()):
            parameters = [now.get(moved(each, rename)) for each in group]
            held = {id(p) for each in parameter_groups(optimizer) for p in each}
            if any(p is None or id(p) in held for p in parameters):
                break  # reading the optimizer's state then raises, with names
            add_again(optimizer, [p for p in parameters if p is not None], unit)
        partition = Partition.of(optimizer)
        if partition is not None:
            partition.refresh()


def _frozen(module: nn.Module) -> set[str]:
    """Names of frozen parameters; a tied parameter has several."""
    return {name for name, p in plain_names(module, every_name=True) if not p.requires_grad}


def _of_all_stages(module: nn.Module, names: set[str]) -> set[str]:
    group = ranks_apart(module)
    return names if group is None else {name for each in agree.gather(sorted(names), group) for name in each}


def _checksum(names: set[str]) -> int:
    return zlib.crc32("\n".join(sorted(names)).encode())
