"""torchtnt.framework.fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from echelon.common.errors import UnitError
from echelon.compat.torchtnt.framework.runs import told, with_durations
from echelon.loop import run
from echelon.loop.state import PhaseState
from echelon.loop.unit import EvalUnit, TrainUnit

__all__ = ["fit"]


def fit(
    unit: Any,
    train_dataloader: Iterable[Any],
    eval_dataloader: Iterable[Any],
    *,
    max_epochs: float | None = None,
    max_steps: float | None = None,
    max_train_steps_per_epoch: float | None = None,
    max_eval_steps_per_epoch: float | None = None,
    evaluate_every_n_steps: float | None = None,
    evaluate_every_n_epochs: float | None = 1,
    callbacks: list[Any] | None = None,
    timer: Any = None,
) -> None:
    """As `echelon.fit`, in steps.

    Args:
        evaluate_every_n_steps, evaluate_every_n_epochs: 0 is never, too.
    Raises:
        UnitError: what is not a TrainUnit and an EvalUnit.
    """
    for kind in (TrainUnit, EvalUnit):
        if not isinstance(unit, kind):
            has = f"{kind.__name__.removesuffix('Unit').lower()}_step"
            raise UnitError(
                f"Expected unit to implement {kind.__name__} interface. The unit of fit() must inherit from {kind.__name__}, "
                f"which has {has}, got {type(unit).__name__}."
            )
    limits = {
        "max_epochs": max_epochs,
        "max_steps": max_steps,
        "max_train_steps_per_epoch": max_train_steps_per_epoch,
        "max_eval_steps_per_epoch": max_eval_steps_per_epoch,
        "evaluate_every_n_steps": evaluate_every_n_steps,
        "evaluate_every_n_epochs": evaluate_every_n_epochs,
    }
    with told("fit", unit, ("train", "eval"), timer, **limits):
        train_state = PhaseState(
            dataloader=train_dataloader,
            max_epochs=max_epochs,
            max_steps=max_steps,
            max_steps_per_epoch=max_train_steps_per_epoch,
            evaluate_every_n_steps=evaluate_every_n_steps or None,
            evaluate_every_n_epochs=evaluate_every_n_epochs or None,
        )
        eval_state = PhaseState(dataloader=eval_dataloader, max_steps_per_epoch=max_eval_steps_per_epoch)
        run.run_training(unit, train_state, eval_state, with_durations(callbacks), timer)
