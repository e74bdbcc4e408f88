"""A unit built once more, from what its constructor was given: with another strategy, or in another process.

A module that is wrapped or sharded cannot be sent to another process, and what AutoUnit makes of it depends on the rank.
What the user gave can be sent. So the library's own constructor runs again; a subclass's does not, and its attributes stay.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from echelon.contracts.errors import UsageError

if TYPE_CHECKING:
    from echelon.loop.auto import AutoUnit

__all__ = ["Built", "Parcel", "own_attributes", "pack", "rebuild", "recall", "remembered", "unpack"]

# Made at first use, over the module as it is now.
_MADE_LATER = ("optimizer", "lr_scheduler", "swa_scheduler")
# What the constructor was given and what has become of it are not the same.
_AS_GIVEN = ("device", "strategy")


@dataclass(frozen=True)
class Built:
    """How AutoUnit's constructor ran.

    Args:
        arguments: all but the module.
        made: the attributes that it set.
    """

    arguments: dict[str, Any]
    made: frozenset[str]


@dataclass(frozen=True)
class Parcel:
    """A unit on its way to another process."""

    kind: type
    module: torch.nn.Module
    arguments: dict[str, Any]
    own: dict[str, Any]


def _arguments(unit: AutoUnit[Any]) -> dict[str, Any]:
    """The constructor's, as they are now: `unit.clip_grad_norm = 1.0` counts."""
    now = vars(unit)
    return {k: v if k in _AS_GIVEN else now.get(k, v) for k, v in unit.constructed.arguments.items()}


def rebuild(unit: AutoUnit[Any], **changes: Any) -> None:
    """Run AutoUnit's constructor once more in place, with some arguments changed. Collective, as the constructor is.

    Raises:
        UsageError: its optimizer is built already, over a module in another form; or the module is sharded.
    """
    from echelon.loop.auto import AutoUnit

    if vars(unit).get("optimizer") is not None:
        raise UsageError(
            f"{type(unit).__name__} has its optimizer already, so {', '.join(sorted(changes))} can no longer change. "
            "Give a new unit, or give these to the unit's own constructor."
        )
    module, arguments, progress = _plain(unit), _arguments(unit), unit.tracked_progress()
    AutoUnit.__init__(unit, module=module, **{**arguments, **changes})
    vars(unit).update(progress)


def pack(unit: AutoUnit[Any]) -> Parcel:
    """What another process needs to build this unit. Its module is on the CPU afterwards; the caller moves it back."""
    made = {*unit.constructed.made, *_MADE_LATER}
    own = {name: value for name, value in vars(unit).items() if name not in made}
    arguments = {**_arguments(unit), "device": None}
    return Parcel(type(unit), _plain(unit).cpu(), arguments, {**own, **unit.tracked_progress()})


def unpack(parcel: Parcel, **changes: Any) -> AutoUnit[Any]:
    """The unit, built in this process. Collective."""
    from echelon.loop.auto import AutoUnit

    unit: AutoUnit[Any] = object.__new__(parcel.kind)
    vars(unit).update(parcel.own)
    AutoUnit.__init__(unit, module=parcel.module, **{**parcel.arguments, **changes})
    vars(unit).update(parcel.own)
    return unit


def own_attributes(unit: AutoUnit[Any], *, progress: bool) -> dict[str, Any]:
    """What a subclass's code has set and no checkpoint holds; with `progress` that too."""
    saved = {*unit.tracked_modules(), *unit.tracked_optimizers(), *unit.tracked_lr_schedulers(), *unit.tracked_metrics()}
    saved |= {*unit.tracked_misc_statefuls(), *unit.tracked_progress(), *unit.constructed.made, *_MADE_LATER}
    own = {name: value for name, value in vars(unit).items() if name not in saved}
    return {**own, **unit.tracked_progress()} if progress else own


def remembered(attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """Attributes on their way to another process, one by one; those that cannot be pickled stay behind."""
    said = {}
    for name, value in attributes.items():
        file = io.BytesIO()
        with contextlib.suppress(Exception):  # any type can raise anything when it is pickled
            torch.save(value, file)
            said[name] = file.getvalue()
    return said


def recall(thing: object, said: Mapping[str, bytes]) -> None:
    """Set attributes that `remembered` gave, of a process that this one started; tensors are on the CPU."""
    for name, data in said.items():
        with contextlib.suppress(Exception):
            vars(thing)[name] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _plain(unit: AutoUnit[Any]) -> torch.nn.Module:
    module = unit.prepared.unwrapped
    sharded = [name for name, p in module.named_parameters() if hasattr(p, "full_tensor")]
    if sharded:
        raise UsageError(
            f"the module of {type(unit).__name__} is sharded already ({sharded[0]}), which cannot be undone. Build the unit "
            "without a strategy and give it to the Trainer, or give fit() a function that builds the unit: every rank calls it."
        )
    return module
