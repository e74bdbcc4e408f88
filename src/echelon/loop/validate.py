"""Check the units, loaders and callbacks given to the loops.

Mocks are accepted: checks look at an object's attributes, not only at its type.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from echelon.checkpoint.layout import Stateful
from echelon.common.errors import LoopError, UnitError, UsageError
from echelon.loop.callback import Callback
from echelon.loop.progress import Progress
from echelon.loop.unit import EvalUnit, PredictUnit, TestUnit, TrainUnit, Unit
from echelon.world import agree

__all__ = [
    "KINDS",
    "callbacks_of",
    "check_loader",
    "check_unit",
    "has_hook",
    "has_shape",
    "inner_of",
    "is_real",
    "keeps",
    "no_end",
    "tell_of_unsaved_state",
]

logger = logging.getLogger(__name__)

KINDS: dict[str, type[Unit]] = {"train": TrainUnit, "eval": EvalUnit, "predict": PredictUnit, "test": TestUnit}

_HOOKS = [name for name in dir(Callback) if name.startswith("on_")]


def check_unit(unit: Any, phase: str, entry: str, dataloader: Any) -> None:
    """
    Raises:
        UnitError: not a unit for this phase, or a class in place of an object.
    """
    kind, name = KINDS[phase], type(unit).__name__
    if isinstance(unit, type):
        raise UnitError(f"the unit of {entry}() must be an object, got the class {unit.__name__}. Write {unit.__name__}(...).")
    if not isinstance(unit, kind) and (isinstance(unit, Unit) or not has_shape(unit, phase)):
        raise UnitError(f"the unit of {entry}() must inherit from {kind.__name__}, which has {phase}_step, got {name}.")
    if not isinstance(getattr(unit, f"{phase}_progress", None), Progress):
        remedy = "call super().__init__() in its __init__" if is_real(unit) else f"set its {phase}_progress = Progress()"
        raise UnitError(f"{name} has no {phase}_progress: {remedy}.")
    check_loader(dataloader, entry)


def check_loader(dataloader: Any, entry: str) -> None:
    """
    Raises:
        UsageError: the loader does not give batches.
    """
    gives = hasattr(dataloader, "__iter__") or hasattr(dataloader, "__getitem__")
    if not gives or isinstance(dataloader, (type, str, bytes)):
        raise LoopError(f"the dataloader of {entry}() must be an iterable of batches, got {type(dataloader).__name__}.")
    if isinstance(dataloader, Mapping):  # its keys would be the batches
        names = ", ".join(map(repr, list(dataloader)[:5]))
        raise LoopError(
            f"the dataloader of {entry}() must be an iterable of batches, got a {type(dataloader).__name__} of {names}. Give one "
            "of these, or a loader that gives batches of all; echelon.Mixture mixes datasets."
        )


def no_end(entry: str) -> UsageError:
    return LoopError(
        f"{entry}() needs max_epochs or max_updates: without both it would never end. Give max_epochs=math.inf for a run that "
        "ends when something calls state.stop()."
    )


def has_shape(unit: Any, phase: str) -> bool:
    """Whether an object that is not a Unit has what a unit of this phase needs: the step and its progress."""
    step, progress = getattr(unit, f"{phase}_step", None), getattr(unit, f"{phase}_progress", None)
    return callable(step) and isinstance(progress, Progress)


def is_real(unit: Any) -> bool:
    """Whether the object's class is a Unit; a mock with a spec only seems to be one."""
    return issubclass(type(unit), Unit)


class _ByShape(Unit):
    """Adapter for an object that is not a Unit: gives its modules; for the rest, answers like a plain unit."""

    def __init__(self, unit: Any) -> None:
        self._of = getattr(unit, "tracked_modules", dict)

    def tracked_modules(self) -> dict[str, nn.Module]:
        tracked: Any = self._of()
        return tracked if isinstance(tracked, dict) else {}  # a mock returns another mock


def inner_of(unit: Any) -> Unit:
    """The object that answers the loop's questions about a unit, besides its steps and hooks."""
    return unit if is_real(unit) else _ByShape(unit)


def callbacks_of(given: Iterable[Any] | None) -> list[Any]:
    """
    Raises:
        UsageError: an object without hooks, or a class. Raised before any hook runs.
    """
    if given is None:
        return []
    if isinstance(given, (Callback, type)) or not isinstance(given, Iterable):
        name = given.__name__ if isinstance(given, type) else type(given).__name__
        raise LoopError(f"callbacks must be a list, got {name}. Write callbacks=[...].")
    callbacks = list(given)
    for i, callback in enumerate(callbacks):
        if isinstance(callback, type) or not any(callable(getattr(callback, hook, None)) for hook in _HOOKS):
            raise LoopError(
                f"callbacks[{i}] must be a Callback, or an object with one of its hooks such as on_train_step_end(state, unit), "
                f"got {f'the class {callback.__name__}' if isinstance(callback, type) else type(callback).__name__}."
            )
    return callbacks


def tell_of_unsaved_state(callbacks: Sequence[Any], unit: Any) -> None:
    """Warn of callbacks whose `state_dict` no checkpoint would have: they are not among the unit's attributes."""
    if not any(getattr(each, "saves", False) is True for each in callbacks) or not is_real(unit):
        return
    kept = {id(value) for value in unit.tracked_misc_statefuls().values()}
    for each in callbacks:
        has_state = isinstance(each, Stateful) and not getattr(each, "is_of_unit", False)
        if has_state and id(each) not in kept and agree.is_rank0():
            logger.warning(
                "the state_dict() of the callback %s is in no checkpoint, so it begins anew in a resumed run. %s",
                type(each).__name__,
                "Give the callback to prepare() as an object, too"
                if getattr(unit, "is_own_loop", False)
                else "Make the callback an attribute of the unit, too (unit.callback = callback)",
            )


def has_hook(callback: Any, hook: str) -> bool:
    """Whether a callback overrides a hook, by a method or by an attribute of the instance."""
    own = getattr(callback, hook, None)
    return callable(own) and getattr(own, "__func__", own) is not getattr(Callback, hook)


def keeps(unit: Any, name: str, base: type) -> bool:
    """Whether a unit does not override a method of `base`, or has none."""
    own = getattr(unit, name, None)
    return own is None or getattr(own, "__func__", own) is getattr(base, name)


# --- older limits, which counted micro-batches; today's count updates


def accumulation_of(unit: Any, loader: Any) -> int:
    """Micro-batches per update. Unit and loader agree on the number here if they have not yet."""
    settle = getattr(unit, "settle_accumulation", None)
    if settle is not None:
        return int(settle(loader))
    accumulation = getattr(loader, "accumulation", None) or getattr(unit, "gradient_accumulation_steps", None)
    return accumulation if isinstance(accumulation, int) else 1


def refuse_steps(of: str, older: Mapping[str, Any], words: Mapping[str, str], size: int) -> None:
    """
    Args:
        of: the function that was given the arguments.
        older: arguments that counted micro-batches, by older name; `words` has the new names.
        size: micro-batches per update.
    Raises:
        UsageError: the number would count something else now; says which number of updates to write.
    """
    for name, value in older.items():
        if size > 1 and isinstance(value, (int, float)) and math.isfinite(value):
            raise LoopError(
                f"{of}({name}={value:g}) counted micro-batches, and an update has {size} of them here. It is now {words[name]}, "
                f"which counts updates: write {words[name]}={math.ceil(value / size)}."
            )
