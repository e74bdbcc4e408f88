"""Look up a number by its name: given to `state.log`, measured by the run itself, or an attribute of the unit.

A name is looked up in this order: among the numbers logged in the given phase; if it begins with `eval_`, as in metrics.jsonl,
among the numbers that evaluations logged; as an attribute of the unit; among the numbers logged in other phases. Last, "loss" is
the loss of the evaluation or, without one, of the latest update.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from echelon.common.errors import CallbackError, UsageError, require
from echelon.loop.records.logged import Logged
from echelon.world import agree

__all__ = ["Unknown", "is_own_loop", "mode_of", "number", "numbers"]

_EVAL = "eval_"
_SHOWN = 30  # names in an error
# Last words of names that tell whether less or more is better.
_LESS = {"loss", "error", "err", "perplexity", "ppl", "nll", "mae", "mse", "rmse", "wer", "cer", "fid"}
_MORE = {"accuracy", "acc", "precision", "recall", "f1", "auc", "auroc", "map", "iou", "miou", "dice", "bleu", "rouge", "psnr"}
_MORE |= {"ssim", "reward", "r2"}


class Unknown(Exception):
    """There is no such number, or it cannot be read; the same on all ranks."""


def mode_of(name: str, mode: str | None = None, *, kind: type[UsageError] = CallbackError) -> Literal["min", "max"] | None:
    """Whether a smaller or a greater number is better: as `mode` says, else by the name's last word; None if that does not tell.

    Raises:
        UsageError: `mode` is neither "min" nor "max".
    """
    if mode is not None:
        require(mode in ("min", "max"), "mode", "'min' or 'max'", mode, kind=kind)
        return mode  # type: ignore[return-value]
    last = re.split(r"[^a-z0-9]+", name.lower())[-1]
    return "min" if last in _LESS else "max" if last in _MORE else None


def number(name: str, state: Any, unit: Any, phase: str | None = None) -> tuple[float, bool]:
    """Rank 0's number, on all ranks, and whether it was measured at the current step of training. Collective.

    Raises:
        Unknown: on all ranks, with the names that there are.
    """
    own_number = _look(name, state, unit, phase)  # on every rank: computing a metric may be collective
    rank0_number = agree.from_rank0(lambda: own_number)
    if isinstance(rank0_number, str):
        raise Unknown(rank0_number)
    return float(rank0_number[0]), rank0_number[1]


def numbers(state: Any, unit: Any) -> dict[str, float]:
    """The latest numbers of a run over all ranks, also of before its checkpoint, by their names in metrics.jsonl; the same on
    each rank.
    """
    latest = state.logged.latest if isinstance(state.logged, Logged) else {}
    by_name = {
        ("" if phase == "train" else f"{phase}_") + name: value for phase in latest for name, value in latest[phase].items()
    }
    if state.train_state is not None and (loss := getattr(unit, "latest_update", (None, None))[0]) is not None:
        by_name["loss"] = loss
    if state.eval_state is not None and getattr(unit, "has_eval_loss", False):
        by_name["eval_loss"] = unit.eval_loss
    before = state.logged.before if isinstance(state.logged, Logged) else {}
    return before | {name: float(value) for name, value in by_name.items()}


def _look(name: str, state: Any, unit: Any, phase: str | None) -> list[Any] | str:
    latest = state.logged.latest if isinstance(state.logged, Logged) else {}
    bare = name.removeprefix(_EVAL) if name.startswith(_EVAL) else None
    try:
        for of, called in ((phase or "", name), ("eval", bare)):
            if called is not None and called in latest.get(of, {}):
                return [float(latest[of][called]), of != "eval" or _is_fresh(state, unit)]
        problem = None
        if hasattr(unit, name):
            try:
                value = getattr(unit, name)
                value = float(value.compute() if callable(getattr(value, "compute", None)) else value)
                return [value, not name.startswith(_EVAL) or _is_fresh(state, unit)]
            except (TypeError, ValueError, RuntimeError) as error:
                problem = f"{type(unit).__name__}'s is not a single number: {type(getattr(unit, name)).__name__} ({error})"
        for of, numbers in sorted(latest.items()):
            if name in numbers:
                return [float(numbers[name]), of != "eval" or _is_fresh(state, unit)]
        if name == "loss" and (own := _own_loss(state, unit, phase)) is not None:
            return own
    except Exception as error:  # a property raised: the other ranks must learn of it
        return f"reading it failed: {type(error).__name__}: {error}"
    whose = "in this loop" if is_own_loop(unit) else f"for {type(unit).__name__}"
    return f"{problem or f'there is no such number {whose}'}. There are: {_names(latest, unit)}"


def is_own_loop(unit: Any) -> bool:
    """Whether a user's own loop trains the unit. Such a loop evaluates at any time."""
    return getattr(unit, "is_own_loop", False) is True


def _own_loss(state: Any, unit: Any, phase: str | None) -> list[Any] | None:
    if phase != "train" and getattr(unit, "has_eval_loss", False) and getattr(state, "eval_state", None) is not None:
        return [float(unit.eval_loss), _is_fresh(state, unit)]
    loss, _ = getattr(unit, "latest_update", (None, None))
    return None if loss is None else [float(loss), True]


def _is_fresh(state: Any, unit: Any) -> bool:
    """Whether the latest evaluation was of the current weights."""
    at = getattr(state.logged, "evaluated_at", None)
    if at is None:  # no evaluation so far; if the run has no evaluations at all, the user sets the number himself
        return getattr(state, "eval_state", None) is None
    return bool(at == unit.train_progress.num_steps_completed)


def _names(latest: dict[str, dict[str, Any]], unit: Any) -> str:
    """Names of the numbers that could be monitored, for an error message."""
    names = {f"{_EVAL}{name}" if phase == "eval" else name for phase, numbers in latest.items() for name in numbers}
    if getattr(unit, "latest_update", (None, None))[0] is not None:
        names.add("loss")
    for name, value in list(vars(unit).items()):
        is_number = isinstance(value, float) and not math.isnan(value)  # integers are mostly settings
        if not name.startswith("_") and (is_number or callable(getattr(value, "compute", None))):
            names.add(name)
    shown = sorted(names)
    return (", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")) or "none"
