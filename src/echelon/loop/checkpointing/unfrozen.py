"""What a run changed while it trained in what is trained: parameters unfrozen or frozen, and groups added to its optimizers.

The script does not do it again when its run resumes: the epoch whose start it was done at is over. So checkpoints hold it, beside
a checksum of what was frozen when the script had built its model. Where a script builds another choice, its own counts.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from echelon.checkpoint.location import Location
from echelon.checkpoint.renamed import moved
from echelon.common.errors import CheckpointCorruptError
from echelon.common.terminal import printable
from echelon.loop.auto.optimizer_checks import add_again
from echelon.loop.unit import Unit
from echelon.parallel.names import plain_names
from echelon.parallel.shards import ranks_apart
from echelon.parallel.state.partition import Partition, parameter_groups
from echelon.world import agree

__all__ = ["facts", "look_at_built", "train_as_saved"]

logger = logging.getLogger(__name__)


@dataclass
class _Built:
    """As the script has built them: what is frozen of each module, and how many groups each optimizer has."""

    frozen: dict[str, set[str]]
    groups: dict[str, int]


def look_at_built(unit: Unit) -> bool:
    """Before anything is restored or trained; what comes later changes nothing of it. True for the first look."""
    if "_built" in vars(unit):
        return False
    vars(unit)["_built"] = _Built(
        {name: _frozen(module) for name, module in unit.tracked_modules().items()},
        {name: len(optimizer.param_groups) for name, optimizer in unit.tracked_optimizers().items()},
    )
    return True


def facts(unit: Unit) -> dict[str, Any]:
    """What has changed since, for the manifest; {} if nothing has. Collective where stages have different parameters."""
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
    """By optimizer, the parameters of the groups that it was given since."""
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
    """Freeze, unfreeze and group as the saved run had done when it was saved; before its state is read. Collective.

    Not in a process that has trained or restored before: what its script froze since then is the script's choice.

    Args:
        rolls_back: the same run goes back to an earlier state, and freezes again what it has unfrozen since.
    """
    is_new = look_at_built(unit)
    if saved is None or not (is_new or rolls_back):  # None: by an echelon that did not know
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
    _check(saved, path)
    same = {n: _checksum(_of_all_stages(m, built.frozen.get(n, set()))) for n, m in modules.items()} == saved["built"]
    if not (same or rename) or any(built.groups.get(name) != number for name, number in saved["groups"].items()):
        if agree.is_rank0():
            logger.warning(
                "the run that saved %s had frozen, unfrozen or grouped parameters while it trained, but this script builds its "
                "model with others frozen, or its optimizer with other groups: what is trained is this script's choice",
                path,
            )
        return
    for key, trains in (("unfrozen", True), ("frozen", False)):
        names = [moved(f"{owner}.{name}", rename or {}) for owner, every in saved[key].items() for name in every]
        found = [now[name] for name in names if name in now]
        for parameter in found:
            parameter.requires_grad_(trains)
        if found and agree.is_rank0():
            logger.info("%s parameters are %s, as they were in %s", len(found), key, path)
    _add_groups(saved["added"], unit, now, rename or {})


def _add_groups(
    added: Mapping[str, list[list[str]]], unit: Unit, now: Mapping[str, nn.Parameter], rename: Mapping[str, str]
) -> None:
    for name, optimizer in unit.tracked_optimizers().items():
        for group in added.get(name, ()):
            parameters = [now.get(moved(each, rename)) for each in group]
            held = {id(p) for each in parameter_groups(optimizer) for p in each}
            if any(p is None or id(p) in held for p in parameters):
                break  # what reads the optimizer's state says which
            add_again(optimizer, [p for p in parameters if p is not None], unit)
        partition = Partition.of(optimizer)
        if partition is not None:
            partition.refresh()


def _frozen(module: nn.Module) -> set[str]:
    return {name for name, p in plain_names(module, every_name=True) if not p.requires_grad}


def _of_all_stages(module: nn.Module, names: set[str]) -> set[str]:
    group = ranks_apart(module)
    return names if group is None else {name for each in agree.gather(sorted(names), group) for name in each}


def _checksum(names: set[str]) -> int:
    return zlib.crc32("\n".join(sorted(names)).encode())


def _check(saved: Any, path: Location) -> None:
    def are_names(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)

    def by_name(key: str) -> list[Any]:
        found = saved.get(key) if isinstance(saved, dict) else None
        if not isinstance(found, dict):
            raise CheckpointCorruptError(
                f"{path}: what its manifest says of trained parameters cannot be read: {printable(key)}.", path=str(path)
            )
        return list(found.values())

    fits = (
        all(isinstance(each, int) for each in (*by_name("built"), *by_name("groups")))
        and all(are_names(each) for each in (*by_name("unfrozen"), *by_name("frozen")))
        and all(isinstance(groups, list) and all(map(are_names, groups)) for groups in by_name("added"))
    )
    if not fits:
        raise CheckpointCorruptError(f"{path}: what its manifest says of trained parameters cannot be read.", path=str(path))
