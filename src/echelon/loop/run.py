"""The entry points: train, evaluate, predict, test, fit. One loop serves all phases.

    train:  on_train_start
            until max_epochs or max_updates:
                on_train_epoch_start
                for each batch:  get_next_batch hooks, on_train_step_start, unit.train_step, on_train_step_end
                on_train_epoch_end                        unless a stop or max_updates cut the epoch short
            on_train_end
            with `eval`, and in fit, an evaluation after every n-th update or epoch
    others: one epoch

For each hook, the unit's runs first, then the callbacks' in their order. The loop makes the ranks agree on the number of steps
and on when to stop.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from echelon.common.errors import LoopError, require
from echelon.common.older_words import translated
from echelon.loop.callback import Callback
from echelon.loop.checkpointing.checkpoints import Checkpoints, saver_of, take_up
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
from echelon.loop.engine import Run
from echelon.loop.records import monitored
from echelon.loop.reporting.reporting import observed
from echelon.loop.state import EntryPoint, PhaseState, State, TimerProtocol
from echelon.loop.unit import EvalUnit, PredictUnit, TestUnit, TrainUnit
from echelon.loop.validate import accumulation_of, callbacks_of, refuse_steps

__all__ = ["evaluate", "fit", "predict", "run_training", "test", "train"]

T = TypeVar("T")


class _OlderOfTrain(TypedDict, total=False):
    max_steps: float | None
    max_steps_per_epoch: float | None


class _OlderOfFit(TypedDict, total=False):
    max_steps: float | None
    max_train_steps_per_epoch: float | None
    evaluate_every_n_steps: float | None


_TRAIN = {"max_steps": "max_updates", "max_steps_per_epoch": "updates_per_epoch"}
_FIT = {
    "max_steps": "max_updates",
    "max_train_steps_per_epoch": "updates_per_epoch",
    "evaluate_every_n_steps": "evaluate_every_n_updates",
}


def train(
    unit: TrainUnit[T],
    loader: Iterable[T],
    *,
    max_updates: float | None = None,
    max_epochs: float | None = None,
    updates_per_epoch: float | None = None,
    eval: Iterable[Any] | None = None,
    eval_every: int | Literal["epoch"] | None = None,
    checkpoints: str | Path | Checkpoints | DistributedCheckpointSaver | None = None,
    callbacks: list[Callback] | None = None,
    timer: TimerProtocol | None = None,
    **older: Unpack[_OlderOfTrain],
) -> dict[str, float]:
    """Train a unit. Every rank calls it.

    An update is one step of the optimizer, on one or more micro-batches; for a TrainUnit of your own, each `train_step` is an
    update. An update that is skipped, because its global batch weighs nothing or fp16 overflows, is still counted, so update k
    has global batch k.

    Args:
        unit: training continues where its progress stands, so a restored unit continues.
        loader: any iterable of batches; iterated again in every epoch.
        max_updates, max_epochs: stop after this many, counted over the unit's whole life. One of them is needed. math.inf means
            no end, for a run that ends when something calls `state.stop()`. Whole numbers may be floats, such as 10.0.
        updates_per_epoch: make only this many updates in each epoch.
        eval: batches to evaluate on; the unit needs an `eval_step`, which an AutoUnit has.
        eval_every: evaluate after this many updates, counted over the unit's whole life, and at the end; by default, and with
            "epoch", after every epoch.
        checkpoints: a folder, or a Checkpoints, which says when to save there and what to keep. A unit that has not trained yet
            continues from the newest checkpoint there. Or a DistributedCheckpointSaver.
        callbacks: called in order.
        timer: measures the waits for data ("train.next(data_iter)"; if the unit moves batches, also reading and moving
            separately), the unit's steps, and all hooks of unit and callbacks; within `fit`, also those of evaluations.
        older: `max_steps` and `max_steps_per_epoch`, which counted micro-batches.
    Returns:
        the latest numbers over all ranks, of this call and of the checkpoint that it continues from, by their names in
        metrics.jsonl: "loss", the numbers given to `state.log`, and those of the latest evaluation, with "eval_" before their
        names. Empty if nothing was restored and nothing was left to train.
    Raises:
        SystemExit: with code 75: a signal asked the run to stop before it was complete (docs/checkpoints.md).
        UnitError: the unit has no training step.
        UsageError: there is no limit, or one that is not a whole number; an object that is not a callback.
        RanksDisagreeError: the ranks' loaders have different lengths.
    """
    limits = {"max_updates": max_updates, "updates_per_epoch": updates_per_epoch}
    refuse_steps("train", older, _TRAIN, accumulation_of(unit, loader))
    limits = translated(
        "train", older, _TRAIN, limits, others=["max_epochs", "eval", "eval_every", "checkpoints", "callbacks", "timer"]
    )
    by_epochs = eval_every in (None, "epoch")
    require(
        by_epochs or not isinstance(eval_every, str), "eval_every", "a number of updates, or 'epoch'", eval_every, kind=LoopError
    )
    train_state = PhaseState(
        dataloader=loader,
        max_epochs=max_epochs,
        **limits,
        evaluate_every_n_updates=None if eval is None or by_epochs else eval_every,  # type: ignore[arg-type]
        evaluate_every_n_epochs=1 if eval is not None and by_epochs else None,
    )
    train_state.evaluations.at_end = eval is not None
    state = run_training(
        unit, train_state, PhaseState(dataloader=eval) if eval is not None else None, callbacks, timer, checkpoints
    )
    return monitored.numbers(state, unit)


def run_training(
    unit: Any,
    train_state: PhaseState,
    eval_state: PhaseState | None,
    callbacks: list[Callback] | None,
    timer: TimerProtocol | None,
    checkpoints: Any = None,
) -> State:
    """Run `train`, or `fit` if there is an `eval_state`, with the limits in the phases' states."""
    if checkpoints is not None:
        saver = saver_of(checkpoints)
        callbacks = [*callbacks_of(callbacks), saver]
        take_up(checkpoints, saver, unit, train_state.dataloader)
    callbacks = observed(unit, train_state.dataloader, callbacks)
    entry_point, phases = EntryPoint.TRAIN, ["train"]
    if eval_state is not None:
        entry_point, phases = EntryPoint.FIT, ["train", "eval"]
        eval_state.evaluations = train_state.evaluations
    state = State(entry_point=entry_point, timer=timer, train_state=train_state, eval_state=eval_state)
    Run(state, unit, callbacks, phases).train()
    return state


def evaluate(
    eval_unit: EvalUnit[T],
    eval_dataloader: Iterable[T],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Callback] | None = None,
    timer: TimerProtocol | None = None,
) -> dict[str, float]:
    """Evaluate a unit on one pass over the loader, without gradients, in eval mode. Every rank calls it.

    Returns:
        the numbers of the evaluation, as `train` returns them: an AutoUnit's "eval_loss", and logged numbers.
    """
    phase = PhaseState(dataloader=eval_dataloader, max_steps_per_epoch=max_steps_per_epoch)
    state = State(entry_point=EntryPoint.EVALUATE, timer=timer, eval_state=phase)
    Run(state, eval_unit, callbacks, ["eval"]).once("eval")
    return monitored.numbers(state, eval_unit)


def predict(
    predict_unit: PredictUnit[T],
    predict_dataloader: Iterable[T],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Callback] | None = None,
    timer: TimerProtocol | None = None,
) -> None:
    """Predict on one pass over the loader, without gradients, in eval mode. Every rank calls it. May be called repeatedly."""
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


test.__test__ = False  # type: ignore[attr-defined]  # else pytest would collect it from test files that import it


def fit(
    unit: Any,
    train_dataloader: Iterable[Any],
    eval_dataloader: Iterable[Any],
    *,
    max_epochs: float | None = None,
    max_updates: float | None = None,
    updates_per_epoch: float | None = None,
    max_eval_steps_per_epoch: float | None = None,
    evaluate_every_n_updates: float | None = None,
    evaluate_every_n_epochs: float | None = 1,
    checkpoints: str | Path | Checkpoints | DistributedCheckpointSaver | None = None,
    callbacks: list[Callback] | None = None,
    timer: TimerProtocol | None = None,
    **older: Unpack[_OlderOfFit],
) -> dict[str, float]:
    """An older form of `train(unit, train_dataloader, eval=eval_dataloader)`: evaluates after every n-th update or epoch.

    If `max_updates` ends the training, it also evaluates after the last update, unless both intervals are None.
    """
    limits = {
        "max_updates": max_updates,
        "updates_per_epoch": updates_per_epoch,
        "evaluate_every_n_updates": evaluate_every_n_updates,
    }
    refuse_steps("fit", older, _FIT, accumulation_of(unit, train_dataloader))
    limits = translated(
        "fit", older, _FIT, limits, others=["max_epochs", "evaluate_every_n_epochs", "checkpoints", "callbacks", "timer"]
    )
    train_state = PhaseState(
        dataloader=train_dataloader, max_epochs=max_epochs, evaluate_every_n_epochs=evaluate_every_n_epochs, **limits
    )
    eval_state = PhaseState(dataloader=eval_dataloader, max_steps_per_epoch=max_eval_steps_per_epoch)
    return monitored.numbers(run_training(unit, train_state, eval_state, callbacks, timer, checkpoints), unit)
