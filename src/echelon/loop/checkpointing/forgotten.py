"""State in a checkpoint that the program no longer has: unused state, and renamed layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from echelon.checkpoint.renamed import Naming, moved
from echelon.loop.checkpointing.options import RestoreOptions
from echelon.loop.unit import TrainedUnit, Unit

__all__ = ["forgotten", "kinds", "naming"]

_KINDS = ("modules", "optimizers", "lr_schedulers", "progress", "misc_statefuls", "metrics")


def kinds(unit: Unit) -> dict[str, str]:
    """What each state of a unit is, for the manifest."""
    return {name: kind for kind in _KINDS for name in getattr(unit, f"tracked_{kind}")()}


def forgotten(
    config: Mapping[str, Any], names: Collection[str], unit: Unit, options: RestoreOptions
) -> tuple[list[str], list[str]]:
    """What the unit has no more of the states in a checkpoint: what to refuse when strict, and what to list in any case.

    A run that continued without would be another one, and its next checkpoint would lack it. A unit that does not train, and one
    that takes weights only, leaves what belongs to training behind without a word.
    """
    kind_of = {**dict.fromkeys(names, "misc_statefuls"), **config.get("states", {})}
    # Each rank has its share of a metric elsewhere; what else is not there any more has other names now.
    kind_of = {name: kind for name, kind in kind_of.items() if name in names or kind == "metrics"}
    kind_of.pop("train_dataloader", None)
    trains = isinstance(unit, TrainedUnit) and not options.takes_weights_only
    wanted = {"modules": options.restore_modules, "misc_statefuls": not options.takes_weights_only, "progress": False}
    wanted |= {"optimizers": options.restore_optimizers and trains, "lr_schedulers": options.restore_lr_schedulers and trains}
    wanted |= {"metrics": options.restore_metrics and trains}
    gone = sorted(name for name, kind in kind_of.items() if wanted.get(kind, True) and name not in unit.app_state())
    meant = {*options.allow_changes, *unit.may_lack}
    refused = [name for name in gone if trains and name not in meant]
    return refused, [name for name in gone if name not in refused]


def naming(renames: Mapping[str, str], states: Mapping[str, Any]) -> Naming:
    """What names in a checkpoint are called now: of states, of tensors, and so of an optimizer's state of these.

    Args:
        renames: beginnings of names, with the state's, as `{"module.encoder": "module.backbone"}`.
        states: what will be restored, by name.
    """
    back = {new: old for old, new in renames.items()}
    fronts: dict[str, tuple[str, str]] = {}  # by optimizer, what its names lack of a parameter's: in the checkpoint, and here
    for name, state in states.items():
        if hasattr(state, "full_names"):
            full = state.full_names()
            olds = {moved(each, back).partition(".")[0] for each in full.values()}
            # An optimizer's names have their module's in front only if it has several.
            before = f"{olds.pop()}." if len(olds) == 1 else ""
            fronts[name] = before, next((each.removesuffix(here) for here, each in full.items()), "")

    def now(name: str) -> str:
        state, _, key = moved(name, renames).partition(".")
        kind, _, rest = key.partition(".")
        # What begins with ~ is in no module.
        if kind in ("state", "param_groups") and state in fronts and not rest.startswith("~"):
            before, after = fronts[state]
            return f"{state}.{kind}.{moved(before + rest, renames).removeprefix(after)}"
        return f"{state}.{key}" if key else state

    return now
