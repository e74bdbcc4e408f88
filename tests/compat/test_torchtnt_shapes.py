"""Programs that hand TorchTNT's functions things of the right shape: duck types, a State of their own.

What is expected was observed of TorchTNT (release 0.2.4 and the nightly of August 2024) with the same programs.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from echelon.compat.torchtnt.framework import (
    ActivePhase,
    AutoPredictUnit,
    AutoUnit,
    Callback,
    EntryPoint,
    EvalUnit,
    PhaseState,
    PredictUnit,
    State,
    TrainUnit,
    evaluate,
    fit,
    train,
)
from echelon.compat.torchtnt.framework.auto_unit import SWAParams
from echelon.compat.torchtnt.framework.callbacks import (
    TQDMProgressBar,
)
from echelon.compat.torchtnt.utils import Progress
from echelon.errors import LoopError, UnitError, UsageError
from tests.kit.refusals import refused
from tests.kit.units import Hooks

CPU = torch.device("cpu")


class Plain(TrainUnit[Any], EvalUnit[Any], PredictUnit[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def train_step(self, state: State, data: Any) -> Any:
        self.seen.append(data)
        return data

    eval_step = predict_step = train_step


def _unit(steps: int) -> Plain:
    unit = Plain()
    for phase in ("train", "eval", "predict"):
        setattr(unit, f"{phase}_progress", Progress(0, steps, steps))
    return unit


def _state(phase: ActivePhase = ActivePhase.TRAIN) -> State:
    entry = {ActivePhase.TRAIN: EntryPoint.TRAIN, ActivePhase.EVALUATE: EntryPoint.EVALUATE}
    states = {f"{name}_state": PhaseState(dataloader=[1, 2, 3]) for name in ("train", "eval", "predict")}
    state = State(entry_point=entry.get(phase, EntryPoint.PREDICT), **states)
    state.active_phase = phase
    return state


# --- units and callbacks by shape


@pytest.mark.parametrize("spec", [True, False])
@pytest.mark.parametrize(("run", "kind", "phase"), [(train, TrainUnit, "train"), (evaluate, EvalUnit, "eval")])
def test_a_mock_may_be_a_unit(run: Any, kind: type, phase: str, spec: bool) -> None:
    unit = MagicMock(spec=kind) if spec else MagicMock()
    setattr(unit, f"{phase}_progress", Progress())
    unit.tracked_modules.return_value = {"module": nn.Linear(1, 1)}
    getattr(unit, f"get_next_{phase}_batch").side_effect = lambda state, batches: next(batches) * 10
    run(unit, [1, 2], **({"max_epochs": 1} if phase == "train" else {}))
    assert [call.args[1] for call in getattr(unit, f"{phase}_step").call_args_list] == [10, 20]
    assert getattr(unit, f"on_{phase}_epoch_end").call_count == getattr(unit, f"on_{phase}_end").call_count == 1


def test_a_unit_by_shape_needs_no_base_class() -> None:
    class Shape:
        def __init__(self) -> None:
            self.train_progress, self.log = Progress(), []

        def on_train_start(self, state: Any) -> None:
            self.log.append("start")

        def train_step(self, state: Any, data: int) -> None:
            self.log.append(data)

    shape: Any = Shape()
    train(shape, [1, 2], max_epochs=1)
    assert shape.log == ["start", 1, 2]


def test_a_units_own_on_train_step_end_is_not_called_by_the_loop() -> None:
    class Own(TrainUnit[int]):
        told: list[Any] = []  # noqa: RUF012

        def train_step(self, state: State, data: int) -> None:
            self.on_train_step_end(state, data, 5)

        def on_train_step_end(self, state: State, *results: Any) -> None:
            self.told.append(results)

    train(Own(), [1, 2], max_epochs=1)
    assert Own.told == [(1, 5), (2, 5)]


def test_a_mock_with_a_spec_has_what_programs_read() -> None:
    state, phase = MagicMock(spec=State), MagicMock(spec=PhaseState)
    for name in ("entry_point", "active_phase", "timer", "train_state", "eval_state", "predict_state", "should_stop", "stop"):
        assert hasattr(state, name)
    for name in ("dataloader", "max_epochs", "max_steps", "step_output", "iteration_timer", "evaluate_every_n_steps"):
        assert hasattr(phase, name)


def test_what_is_no_unit_of_both_kinds_is_refused_by_fit() -> None:
    class Trains(TrainUnit[int]):
        def train_step(self, state: State, data: int) -> None: ...

    for unit in (Trains(), object()):
        with refused(UnitError):
            fit(unit, [1], [1], max_epochs=1)


# --- State


def test_a_loops_state_is_a_state() -> None:
    seen: list[bool] = []

    def look(state: Any, unit: Any) -> None:
        seen.extend([isinstance(state, State), isinstance(state.train_state, PhaseState), isinstance(unit, PhaseState)])
        assert not hasattr(state, "_active_phase")  # no longer: the name without the underscore may be set

    train(Plain(), [1], max_epochs=1, callbacks=[Hooks(on_train_start=look)])
    assert seen == [True, True, False]


def test_a_phase_by_name() -> None:
    assert [str(phase) for phase in ActivePhase][:3] == ["train", "eval", "predict"]


def test_intervals_of_evaluation_are_read_and_changed_in_the_evaluations_state() -> None:
    read, evaluated = [], []

    class Changes(Callback):
        def on_train_epoch_end(self, state: State, unit: Any) -> None:
            assert state.eval_state is not None
            read.append((state.eval_state.evaluate_every_n_epochs, state.eval_state.evaluate_every_n_steps))
            state.eval_state.evaluate_every_n_epochs = 1
            with refused(LoopError):
                state.eval_state.evaluate_every_n_steps = -1

        def on_eval_end(self, state: State, unit: Any) -> None:
            evaluated.append(unit.train_progress.num_epochs_completed)

    fit(Plain(), [1], [2], max_epochs=3, evaluate_every_n_epochs=5, callbacks=[Changes()])
    assert read == [(5, None), (1, None), (1, None)] and evaluated == [2, 3]


def test_an_evaluation_after_every_0_epochs_is_never() -> None:
    unit = Plain()
    fit(unit, [1], [2], max_epochs=2, evaluate_every_n_epochs=0, evaluate_every_n_steps=0)
    assert unit.seen == [1, 1]


def test_durations_of_iterations_are_read_like_lists() -> None:
    states: list[State] = []
    train(Plain(), [1, 2, 3], max_epochs=1, callbacks=[Hooks(on_train_start=lambda state, unit: states.append(state))])
    timer = states[0].train_state.iteration_timer  # type: ignore[union-attr]
    taken = timer.recorded_durations["train_iteration_time"]
    assert len(taken) == 3 and len(taken[-2:]) == 2 and taken[-1] == taken[-2:][1]
    assert not timer.recorded_durations["nothing"]


# --- callbacks called by hand


def test_a_progress_bar_by_hand() -> None:
    file = io.StringIO()
    bar, state, unit = TQDMProgressBar(file=file, mininterval=0), _state(), _unit(0)
    bar.on_train_epoch_start(state, unit)
    unit.train_progress.increment_step()
    bar.on_train_step_end(state, unit)
    bar.on_train_epoch_end(state, unit)
    assert "Train Epoch 0" in file.getvalue() and "1/3" in file.getvalue()


# --- AutoUnit


class Auto(AutoUnit[Any]):
    configured = 0

    def compute_loss(self, state: State, data: Any) -> Any:
        outputs = self.module(data[0])
        return nn.functional.mse_loss(outputs, data[1]), outputs

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        self.configured += 1
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _module() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def _data(n: int = 3) -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(n)]


def _values(module: Any) -> list[float]:
    return [float(v) for p in module.parameters() for v in p.detach().flatten()]


def test_the_optimizer_is_built_once_after_the_whole_constructor() -> None:
    order: list[str] = []

    class Late(Auto):
        def __init__(self) -> None:
            super().__init__(module=_module(), device=CPU)
            order.append("constructed")

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
            order.append("configured")
            return super().configure_optimizers_and_lr_scheduler(module)

    unit = Late()
    assert order == ["constructed", "configured"]
    train(unit, _data(), max_epochs=1)
    assert order == ["constructed", "configured"]


def test_attributes_are_plain_values() -> None:
    unit = Auto(module=_module(), device=CPU, precision="bf16", loss_backward_retain_graph=True)
    assert unit.precision is torch.bfloat16 and unit.detect_anomaly is None
    assert Auto(module=_module(), device=CPU).precision is None
    assert AutoPredictUnit(module=_module(), device=CPU, precision="fp32").precision is None
    still = Auto(module=_module(), device=CPU, training=False)
    assert still.optimizer is still.lr_scheduler is still.swa_model is still.swa_scheduler is None and not still.configured
    with refused(LoopError):
        Auto(module=_module(), device=CPU, gradient_accumulation_steps=0)
    with refused(UsageError):
        Auto(module=_module(), device=CPU, swa_params=SWAParams(0, 1), step_lr_interval="epoch")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the schedule's own optimizer takes no step
def test_an_assigned_optimizer_leaves_the_schedule() -> None:
    unit = Auto(module=_module(), device=CPU)
    unit.optimizer = torch.optim.SGD(unit.module.parameters(), lr=0.5)
    train(unit, _data(), max_epochs=1)
    assert unit.configured == 1
    assert _values(unit.module) == pytest.approx([-0.27991, -0.4416, 0.17587], abs=1e-5)


def test_steps_of_an_auto_unit_by_hand() -> None:
    """With a mock for a state, as with a State that no loop has made."""
    for state in (_state(), MagicMock(spec=State), MagicMock()):
        told: list[int] = []

        class Told(Auto):
            def on_train_step_end(self, state: State, data: Any, step: int, results: Any, told: list[int] = told) -> None:
                told.append(step)

            def on_eval_step_end(
                self, state: State, data: Any, step: int, loss: Any, outputs: Any, told: list[int] = told
            ) -> None:
                told.append(step)

        unit = Told(module=_module(), device=CPU)
        before = _values(unit.module)
        loss, outputs = unit.train_step(state=state, data=_data(1)[0])  # type: ignore[arg-type]
        assert loss.dim() == 0 and outputs.shape == (4, 1) and _values(unit.module) != before
        unit.eval_step(state, _data(1)[0])  # type: ignore[arg-type]
        assert told == [0, 0]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_may_fetch_its_own_batches() -> None:
    class Own(Auto):
        seen: list[int] = []  # noqa: RUF012

        def train_step(self, state: State, data: Iterator[int]) -> None:  # type: ignore[override]
            self.seen.append(next(data) + next(data))

    unit = Own(module=_module(), device=CPU)
    train(unit, [1, 2, 3, 4], max_epochs=1)
    assert unit.seen == [3, 7] and unit.train_progress.num_steps_completed == 2
