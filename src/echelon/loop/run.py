"""The entry points: train, evaluate, predict, test, fit. One loop serves all phases.

    train:  on_train_start
            until max_epochs or max_steps:
                on_train_epoch_start
                for each batch:  get_next_batch hooks, on_train_step_start, unit.train_step, on_train_step_end
                on_train_epoch_end                        unless a stop or max_steps cut the epoch short
            on_train_end
    fit:    the same, with an evaluation after every n-th step or epoch
    others: one epoch

Of each hook the unit's runs first, then the callbacks' in their order. What the ranks must agree on (how many steps, when
to stop) they agree on here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from echelon.loop.callback import Callback
from echelon.loop.engine import Run
from echelon.loop.observer import observed
from echelon.loop.state import EntryPoint, PhaseState, State, TimerProtocol
from echelon.loop.unit import EvalUnit, PredictUnit, TestUnit, TrainUnit

__all__ = ["evaluate", "fit", "predict", "test", "train"]

T = TypeVar("T")


def train(
    train_unit: TrainUnit[T],
    train_dataloader: Iterable[T],
    *,
    max_epochs: float | None = None,
    max_steps: float | None = None,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Callback] | None = None,
    timer: TimerProtocol | None = None,
) -> None:
    """Train a unit. Every rank calls it.

    Args:
        train_unit: its progress resumes where it stands, so a restored unit continues.
        train_dataloader: any iterable of batches; iterated again in every epoch.
        max_epochs, max_steps: stop after so many, counted over the unit's whole life. A step is a micro-batch, one call of
            `train_step`, so that an update with an accumulation of n is n of them; a Trainer's `max_steps` counts updates
            instead. One of them is needed; math.inf means without an end, for a run that ends when something calls
            `state.stop()`. Whole numbers may be floats, as 10.0.
        max_steps_per_epoch: use only so many batches of each epoch.
        callbacks: called in order.
        timer: times the waits for data ("train.next(data_iter)"; where the unit moves batches, reading and moving by themselves,
            too), the unit's steps, all hooks of unit and callbacks, and within `fit` the same of evaluations; on top of the
            durations that are always kept in `state.train_state.iteration_timer`.
    Raises:
        SystemExit: with code 75: a signal asked the run to stop before it was complete (docs/checkpoints.md).
        UnitError: the unit has no training step.
        UsageError: no limit, or one that is no whole number; what is no callback.
        RanksDisagreeError: the ranks' loaders have different lengths.
    """
    callbacks = observed(train_unit, train_dataloader, callbacks)
    phase = PhaseState(
        dataloader=train_dataloader, max_epochs=max_epochs, max_steps=max_steps, max_steps_per_epoch=max_steps_per_epoch
    )
    Run(State(entry_point=EntryPoint.TRAIN, timer=timer, train_state=phase), train_unit, callbacks, ["train"]).train()


def evaluate(
    eval_unit: EvalUnit[T],
    eval_dataloader: Iterable[T],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Callback] | None = None,
    timer: TimerProtocol | None = None,
) -> None:
    """Evaluate a unit on one pass over the loader, without gradients, in eval mode. Every rank calls it."""
    phase = PhaseState(dataloader=eval_dataloader, max_steps_per_epoch=max_steps_per_epoch)
    Run(State(entry_point=EntryPoint.EVALUATE, timer=timer, eval_state=phase), eval_unit, callbacks, ["eval"]).once("eval")


def predict(
    predict_unit: PredictUnit[T],
    predict_dataloader: Iterable[T],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Callback] | None = None,
    timer: TimerProtocol | None = None,
) -> None:
    """Predict on one pass over the loader, without gradients, in eval mode. Every rank calls it; call it as often as you like."""
    phase = PhaseState(dataloader=predict_dataloader, max_steps_per_epoch=max_steps_per_epoch)
    state = State(entry_point=EntryPoint.PREDICT, timer=timer, predict_state=phase)
    Run(state, predict_unit, callbacks, ["predict"]).once("predict")


def test(
    test_unit: TestUnit[T],
    test_dataloader: Iterable[T],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Callback] | None = None,
    timer: TimerProtocol | None = None,
) -> None:
    """Test a unit on one pass over the loader, without gradients, in eval mode. Every rank calls it."""
    phase = PhaseState(dataloader=test_dataloader, max_steps_per_epoch=max_steps_per_epoch)
    Run(State(entry_point=EntryPoint.TEST, timer=timer, test_state=phase), test_unit, callbacks, ["test"]).once("test")


test.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it where it is imported


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
    callbacks: list[Callback] | None = None,
    timer: TimerProtocol | None = None,
) -> None:
    """Train, and evaluate after every n-th step or epoch. `unit` is a TrainUnit and an EvalUnit; the rest is as in `train`.

    Where `max_steps` ends the training, the last step is evaluated, too, unless both intervals are None.
    """
    callbacks = observed(unit, train_dataloader, callbacks)
    train_state = PhaseState(
        dataloader=train_dataloader,
        max_epochs=max_epochs,
        max_steps=max_steps,
        max_steps_per_epoch=max_train_steps_per_epoch,
        evaluate_every_n_steps=evaluate_every_n_steps,
        evaluate_every_n_epochs=evaluate_every_n_epochs,
    )
    eval_state = PhaseState(dataloader=eval_dataloader, max_steps_per_epoch=max_eval_steps_per_epoch)
    eval_state.evaluations = train_state.evaluations
    state = State(entry_point=EntryPoint.FIT, timer=timer, train_state=train_state, eval_state=eval_state)
    Run(state, unit, callbacks, ["train", "eval"]).train()
