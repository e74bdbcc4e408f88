"""torchtnt.framework.fit: echelon's, and a test after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from echelon.contracts.errors import UnitError
from echelon.loop import run
from echelon.loop.unit import TestUnit

__all__ = ["fit"]


def fit(
    unit: Any,
    train_dataloader: Iterable[Any],
    eval_dataloader: Iterable[Any],
    *,
    test_dataloader: Iterable[Any] | None = None,
    max_test_steps: int | None = None,
    callbacks: list[Any] | None = None,
    timer: Any = None,
    **limits: Any,
) -> None:
    """As `echelon.fit`.

    Args:
        test_dataloader: the unit is tested on it after training.
        max_test_steps: at most so many batches of it.
    Raises:
        UnitError: a test of what is no TestUnit; before training.
    """
    if test_dataloader is not None and not isinstance(unit, TestUnit):
        raise UnitError(
            f"the unit of fit(test_dataloader=...) must inherit from TestUnit, which has test_step, got {type(unit).__name__}."
        )
    run.fit(unit, train_dataloader, eval_dataloader, callbacks=callbacks, timer=timer, **limits)
    if test_dataloader is not None:
        run.test(unit, test_dataloader, max_steps_per_epoch=max_test_steps, callbacks=callbacks, timer=timer)
