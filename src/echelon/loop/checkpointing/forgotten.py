"""State in a checkpoint that the program no longer has: unused state, and renamed layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from echelon.checkpoint.renamed import Naming, moved
from echelon.loop.checkpointing.options import RestoreOptions
from echelon.loop.unit import TrainUnit, Unit

__all__ = ["forgotten", "kinds", "naming"]

_KINDS = ("modules", "optimizers", "lr_schedulers", "progress", "misc_statefuls", "metrics")


def kinds(unit: Unit) -> dict[str, str]:
    """What each state of a unit is, for the manifest."""
    return {name: kind for kind in _KINDS for name in getattr(unit, f"tracked_{kind}")()}


def forgotten(
    config: Mapping[str, Any], names: Iterable[str], unit: Unit, options: RestoreOptions
) -> tuple[list[str], list[str]]:
    """What the unit has no more of the states in a checkpoint: what to refuse when strict, and what to list in any case.

    A run that continued without would be another one, and its next checkpoint would lack it. A unit that does not train, and one
    that takes weights only, leaves what belongs to training behind without a word.
    """
    kind_of = {**dict.fromkeys(names, "misc_statefuls"), **config.get("states", {})}
    kind_of.pop("train_dataloader", None)
    trains = isinstance(unit, TrainUnit) and not options.takes_weights_only
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
    tables: dict[str, dict[str, str]] = {}
    modules: dict[str, str] = {}
    for name, state in states.items():
        if hasattr(state, "full_names"):
            pairs = {here: (full, moved(full, back)) for here, full in state.full_names().items()}
            # An optimizer's names have their module's in front only if it has several.
            tables[name] = {was if here == full else was.partition(".")[2]: here for here, (full, was) in pairs.items()}
            modules[name] = next((full.removesuffix(here) for here, (full, _) in pairs.items()), "")

    def now(name: str) -> str:
        state, _, key = moved(name, renames).partition(".")
        kind, _, rest = key.partition(".")
        if kind in ("state", "param_groups") and state in tables:
            words = rest.split(".")
            left = moved(f"{modules[state]}{rest}", renames).removeprefix(modules[state])
            for end in range(len(words), 0, -1):
                here = tables[state].get(".".join(words[:end]))
                # Another parameter may have the name now that this one had.
                if here is not None and (here != ".".join(words[:end]) or left == rest):
                    return ".".join([state, kind, here, *words[end:]])
            return f"{state}.{kind}.{left}"
        return f"{state}.{key}" if key else state

    return now
