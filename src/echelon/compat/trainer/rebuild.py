"""Build a unit again from its constructor's arguments: with another layout, or in another process.

A wrapped or sharded module cannot be sent to another process, and what AutoUnit builds from it depends on the rank.
What the user gave can be sent, and so can the attributes that a subclass has set. The protocol has three parts:

    unit.auto_options                    the options that the unit was built with, as they are now
    unit.build_from(module, options)     builds it as the constructor does; a subclass's own constructor does not run again
    unit.built_attributes                the names of what that has made
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from echelon.common.errors import TrainerError
from echelon.loop.auto.auto import AutoUnit
from echelon.loop.auto.unit_options import AutoOptions
from echelon.parallel.shards import is_split

__all__ = ["Parcel", "own_attributes", "pack", "rebuild", "unpack"]

# Built at first use, over the current module; and what `build_from` notes at its end.
_MADE_LATER = frozenset({"optimizer", "lr_scheduler", "several", "swa_scheduler", "own_schedule", "_reports_step"})
_MADE_LATER |= {"built_attributes"}
# Of this rank: with its RNG states, other ranks would draw the same numbers for different samples.
_OF_RANK = frozenset({"resumes_with", "resumes_logged"})


@dataclass(frozen=True)
class Parcel:
    """A unit on its way to another process.

    Args:
        husk: the unit with its progress and its subclass's attributes, without what `build_from` makes.
        module: as its author wrote it, on the CPU.
    """

    husk: AutoUnit[Any]
    module: torch.nn.Module
    options: AutoOptions


def rebuild(unit: AutoUnit[Any], **changes: Any) -> None:
    """Build the unit again, in place, with some options changed. Collective, as the constructor is.

    Raises:
        UsageError: the unit has an optimizer already, over a module in another form; or the module is sharded.
    """
    if vars(unit).get("optimizer") is not None:
        raise TrainerError(
            f"{type(unit).__name__} has its optimizer already, so {', '.join(sorted(changes))} can no longer change. "
            "Give a new unit, or give these to the unit's own constructor."
        )
    unit.build_from(_plain(unit), replace(unit.auto_options, **changes))


def pack(unit: AutoUnit[Any]) -> Parcel:
    """What another process needs to build this unit. Its module is on the CPU afterwards; the caller moves it back."""
    husk = copy.copy(unit)
    for name in unit.built_attributes | _MADE_LATER | _OF_RANK:
        vars(husk).pop(name, None)
    return Parcel(husk, _plain(unit).cpu(), replace(unit.auto_options, device=None))


def unpack(parcel: Parcel, **changes: Any) -> AutoUnit[Any]:
    """The unit, built in this process. Collective."""
    parcel.husk.build_from(parcel.module, replace(parcel.options, **changes))
    return parcel.husk


def own_attributes(unit: AutoUnit[Any], *, progress: bool) -> dict[str, Any]:
    """Attributes that a subclass has set and no checkpoint holds; with `progress`, also the unit's progress."""
    saved = {*unit.tracked_modules(), *unit.tracked_optimizers(), *unit.tracked_lr_schedulers(), *unit.tracked_metrics()}
    saved |= {*unit.tracked_misc_statefuls(), *unit.tracked_progress(), *unit.built_attributes, *_MADE_LATER, *_OF_RANK}
    held = {name.partition("[")[0] for name in saved}  # lists and dicts whose members are saved
    own = {name: value for name, value in vars(unit).items() if name not in held}
    return {**own, **unit.tracked_progress()} if progress else own


def _plain(unit: AutoUnit[Any]) -> torch.nn.Module:
    module = unit.prepared.unwrapped
    sharded = [name for name, p in module.named_parameters() if is_split(p)]
    if sharded:
        raise TrainerError(
            f"the module of {type(unit).__name__} is sharded already ({sharded[0]}), which cannot be undone. Build the unit "
            "without a layout and give it to the Trainer, or give fit() a function that builds the unit: every rank calls it."
        )
    return module
