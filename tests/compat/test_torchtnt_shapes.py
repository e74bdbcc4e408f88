"""Programs that hand TorchTNT's functions things of the right shape: mocks, duck types, a State of their own.

What is expected was observed of TorchTNT (release 0.2.4 and the nightly of August 2024) with the same programs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, Mock, patch

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
    predict,
    train,
)
from echelon.compat.torchtnt.framework.auto_unit import SWALRParams, SWAParams
from echelon.compat.torchtnt.framework.callbacks import GarbageCollector, ModuleSummary
from echelon.compat.torchtnt.utils.prepare_module import ActivationCheckpointParams, on_meta_device
from echelon.compat.torchtnt.utils.progress import Progress
from echelon.compat.torchtnt.utils.swa import AveragedModel
from echelon.compat.torchtnt.utils.timer import Timer
from echelon.errors import LoopError, UsageError
from tests.conftest import Ranks
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


def _state(timer: Any = None, entry: EntryPoint = EntryPoint.TRAIN) -> State:
    states = {f"{name}_state": PhaseState(dataloader=[1, 2, 3]) for name in ("train", "eval", "predict")}
    state = State(entry_point=entry, timer=timer, **states)
    state._active_phase = ActivePhase.TRAIN
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


# --- State


def test_what_programs_set_under_private_names_is_set() -> None:
    """There is no other name to set it by."""
    state, unit = _state(), Plain()
    auto = Auto()
    assert state.train_state is not None
    state.train_state._step_output, state._should_stop = 3, True  # type: ignore[attr-defined]
    assert state.train_state.step_output == 3 and state.should_stop and state._train_state is state.train_state
    for progress in (unit.train_progress, auto.train_progress, auto.predict_progress):
        progress._num_steps_completed = 5  # type: ignore[attr-defined]
        assert progress.num_steps_completed == progress.state_dict()["num_steps_completed"] == 5
        assert not any(name.startswith("_") for name in progress.state_dict())


def test_a_loops_state_is_a_state() -> None:
    seen: list[bool] = []

    def look(state: Any, unit: Any) -> None:
        seen.extend([isinstance(state, State), isinstance(state.train_state, PhaseState), isinstance(unit, PhaseState)])

    train(Plain(), [1], max_epochs=1, callbacks=[Hooks(on_train_start=look)])
    assert seen == [True, True, False]


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


# --- AutoUnit


class Auto(AutoUnit[Any]):
    configured = 0

    def __init__(self, module: Any = None, **options: Any) -> None:
        super().__init__(module=_module() if module is None else module, **{"device": CPU, **options})

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
            super().__init__()
            order.append("constructed")

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
            order.append("configured")
            return super().configure_optimizers_and_lr_scheduler(module)

    unit = Late()
    assert order == ["constructed", "configured"]
    train(unit, _data(), max_epochs=1)
    assert order == ["constructed", "configured"]


def test_attributes_are_plain_values() -> None:
    unit = Auto(precision="bf16", loss_backward_retain_graph=True)
    assert unit.precision is torch.bfloat16 and unit.detect_anomaly is None
    assert unit.loss_backward_retain_graph is True
    with unit.maybe_autocast_precision:
        assert torch.is_autocast_enabled("cpu")
    assert Auto().precision is None
    assert AutoPredictUnit(module=_module(), device=CPU, precision="fp32").precision is None
    still = Auto(training=False)
    assert still.optimizer is still.lr_scheduler is still.swa_model is still.swa_scheduler is None and not still.configured
    with refused(UsageError):
        Auto(gradient_accumulation_steps=0)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the schedule's own optimizer takes no step
def test_an_assigned_optimizer_leaves_the_schedule() -> None:
    unit = Auto()
    unit.optimizer = torch.optim.SGD(unit.module.parameters(), lr=0.5)
    train(unit, _data(), max_epochs=1)
    assert unit.configured == 1
    assert _values(unit.module) == pytest.approx([-0.27991, -0.4416, 0.17587], abs=1e-5)


@pytest.mark.parametrize(
    ("interval", "method", "epochs", "lit", "weights", "averages", "count"),
    [
        ("step", "swa", 1, False, [-0.17703, -0.08896, -0.41211], [-0.10888, 0.1384, -0.4779], 3),
        ("epoch", "swa", 4, False, [-0.22639, -0.74669, -0.19086], [-0.23602, -0.53742, -0.26559], 4),
        ("step", "ema", 2, True, [-0.22075, -0.30672, -0.34529], [-0.2043, -0.23892, -0.36275], 6),
    ],
)
def test_averages_are_a_module_with_torchtnts_values(
    interval: Any, method: Any, epochs: int, lit: bool, weights: list[float], averages: list[float], count: int
) -> None:
    params = SWAParams(0, 1, averaging_method=method, ema_decay=0.5, use_lit=lit, swalr_params=SWALRParams(3))
    unit = Auto(swa_params=params, step_lr_interval=interval)
    assert set(unit.tracked_modules()) == {"module", "swa_model"}
    assert set(unit.tracked_lr_schedulers()) == {"lr_scheduler", "swa_scheduler"}
    assert {"swa_model", "swa_scheduler", "module", "optimizer", "lr_scheduler", "train_progress"} <= set(unit.app_state())
    train(unit, _data(), max_epochs=epochs)
    average: Any = unit.swa_model
    assert isinstance(average, AveragedModel) and isinstance(average.module, nn.Linear) and int(average.n_averaged) == count
    assert _values(unit.module) == pytest.approx(weights, abs=1e-5)
    assert _values(average) == pytest.approx(averages, abs=1e-5)
    assert average(torch.ones(1, 2)).shape == (1, 1) and set(average.state_dict()) == {
        "n_averaged",
        "module.weight",
        "module.bias",
    }


def _averaged(strategy: str) -> list[float]:
    params = SWAParams(1, 2, averaging_method="swa")
    unit = Auto(device=None, strategy=strategy, swa_params=params, step_lr_interval="step")
    train(unit, _data(), max_epochs=2)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in unit.swa_model.parameters()]  # type: ignore[union-attr]
    return [float(v) for p in whole for v in p.detach().flatten()]


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_averages_of_a_module_on_several_ranks(ranks: Ranks, strategy: str) -> None:
    alone = _averaged("noop")
    for each in ranks(2, _averaged, strategy):
        assert each == pytest.approx(alone, abs=1e-6)


def test_anomalies_are_looked_for_as_asked() -> None:
    for asked in (True, False, None):
        unit = Auto(detect_anomaly=asked)
        predicts = AutoPredictUnit(module=_module(), device=CPU, detect_anomaly=asked)
        with patch("torch.autograd.set_detect_anomaly") as mode:
            train(unit, _data(1), max_epochs=1)
            predict(predicts, [torch.ones(1, 2)])
        assert [call.args for call in mode.call_args_list] == ([] if asked is None else [(asked,), (asked,)])


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

        unit = Told()
        before = _values(unit.module)
        loss, outputs = unit.train_step(state=state, data=_data(1)[0])  # type: ignore[arg-type]
        assert loss.dim() == 0 and outputs.shape == (4, 1) and _values(unit.module) != before
        unit.eval_step(state, _data(1)[0])  # type: ignore[arg-type]
        assert told == [0, 0]


def test_a_timer_has_the_stages_of_an_auto_units_step() -> None:
    """The names and numbers that TorchTNT 0.2.4 records for this run; steps and hooks come beside them."""
    timer = Timer()
    swa = SWAParams(warmup_steps_or_epochs=1, step_or_epoch_update_freq=1)
    unit = Auto(clip_grad_norm=1.0, clip_grad_value=1.0, swa_params=swa, step_lr_interval="step")
    fit(unit, _data(2), _data(1), max_epochs=1, timer=timer)
    predict(unit, [torch.ones(1, 2)], timer=timer)
    counts = {name.removeprefix("Auto."): len(each) for name, each in timer.recorded_durations.items()}
    assert counts["compute_loss"] == 3 and counts["forward"] == 1
    twice = ("backward", "clip_grad_norm", "clip_grad_value", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")
    assert [counts[name] for name in twice] == [2] * 6 and counts["stochastic_weight_avg_update"] == 1
    for stage in ("next(data_iter)", "move_data_to_device"):
        assert [counts[f"{entry}.{stage}"] for entry in ("train", "evaluate", "predict")] == [2, 1, 1], stage
    assert len(timer.recorded_durations["train.next(data_iter)"]) == 2


@pytest.mark.parametrize("mock", [Mock, MagicMock])
@pytest.mark.parametrize("spec", [None, nn.Module])
def test_a_mock_may_be_a_module(mock: Any, spec: Any) -> None:
    class Mocked(Auto):
        def compute_loss(self, state: State, data: Any) -> Any:
            return torch.ones((), requires_grad=True) * 1, self.module(data)

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
            return MagicMock(), MagicMock()

    module = mock(spec=spec)
    unit = Mocked(module)
    train(unit, [1, 2], max_epochs=1)
    predict(AutoPredictUnit(module=module, device=CPU), [3])
    assert [call.args for call in module.to.return_value.call_args_list] == [(1,), (2,), (3,)]
    assert unit.optimizer.step.call_count == 2 and unit.lr_scheduler.step.call_count == 1  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_may_fetch_its_own_batches() -> None:
    class Own(Auto):
        seen: list[int] = []  # noqa: RUF012

        def train_step(self, state: State, data: Iterator[int]) -> None:  # type: ignore[override]
            self.seen.append(next(data) + next(data))

    unit = Own()
    train(unit, [1, 2, 3, 4], max_epochs=1)
    assert unit.seen == [3, 7] and unit.train_progress.num_steps_completed == 2


# --- what programs call themselves, without a loop


@pytest.mark.parametrize(("interval", "after_step", "after_epoch"), [("step", 0.09, 0.09), ("epoch", 0.1, 0.09)])
def test_the_schedule_advances_when_a_program_takes_steps_and_ends_epochs(
    interval: Any, after_step: float, after_epoch: float
) -> None:
    unit, state = Auto(step_lr_interval=interval), _state()
    unit.train_step(state, _data(1)[0])
    assert unit.optimizer.param_groups[0]["lr"] == pytest.approx(after_step)
    unit.on_train_epoch_end(state)
    assert unit.optimizer.param_groups[0]["lr"] == pytest.approx(after_epoch)
    trained = Auto(step_lr_interval=interval)
    train(trained, _data(2), max_epochs=2)  # in a loop once, although the hook is called there, too
    assert trained.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9 ** (4 if interval == "step" else 2))


def test_a_step_by_hand_with_mocks_a_scaler_and_a_timer() -> None:
    class Mocked(Auto):
        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[Any, Any]:
            return MagicMock(), MagicMock()

    (data,), timer = _data(1), Timer()
    unit = Mocked()
    unit.train_step(_state(), data)
    unit.optimizer.step.assert_called_once_with()  # type: ignore[attr-defined]
    unit.optimizer.zero_grad.assert_called_once_with(set_to_none=True)  # type: ignore[attr-defined]
    half = Auto(precision="fp16", clip_grad_norm=1.0)
    before = _values(half.module)
    half.train_step(_state(timer=timer), data)
    assert _values(half.module) != before
    assert {"Auto.compute_loss", "Auto.backward", "Auto.optimizer_step"} <= timer.recorded_durations.keys()
    with patch("torch.nn.utils.clip_grad_value_") as clip:
        Auto(clip_grad_value=2.0).train_step(_state(), data)
    clip.assert_called_once()
    assert isinstance(Auto().maybe_autocast_precision, torch.autocast)


def test_a_hook_that_is_set_on_the_unit_is_called() -> None:
    unit = Auto()
    unit.on_train_step_end = MagicMock()  # type: ignore[method-assign]
    unit.train_step(_state(), _data(1)[0])
    train(unit, _data(2), max_epochs=1)
    assert unit.on_train_step_end.call_count == 3
    with patch.object(Auto, "on_train_step_end") as hook:
        train(unit := Auto(), _data(2), max_epochs=1)
    assert hook.call_count == 2 and unit.train_progress.num_steps_completed == 2


def test_what_the_constructor_makes_is_replaced_by_what_configures() -> None:
    class Early(Auto):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.Adam(self.module.parameters())

    assert isinstance(Early().optimizer, torch.optim.SGD)


@pytest.mark.parametrize("options", [{"precision": "foo"}, {"strategy": "bar"}])
def test_words_that_mean_nothing_are_named(options: dict[str, str]) -> None:
    for make in (Auto, lambda **o: AutoPredictUnit(module=nn.Linear(1, 1), device=CPU, **o)):
        with pytest.raises(ValueError, match=f"{next(iter(options.values()))} not supported"):
            make(**options)


def test_callbacks_by_hand() -> None:
    unit, names = MagicMock(), list[str]()
    unit.tracked_modules.return_value = {"net": nn.Linear(1, 1)}
    ModuleSummary(process_fn=lambda found: names.extend(each.module_name for each in found)).on_train_start(_state(), unit)
    assert names == ["net"]
    unit.eval_progress = unit.train_progress = Progress(0, 4, 4)
    collector, state = GarbageCollector(2), _state(entry=EntryPoint.FIT)
    collector.on_eval_start(state, unit)
    collector.on_eval_step_end(state, unit)
    assert gc.isenabled()


def test_modules_on_the_meta_device_and_what_recomputes() -> None:
    with torch.device("meta"):
        inner = nn.Linear(2, 2)
    assert on_meta_device(inner) and not on_meta_device(nn.Sequential(inner)) and not on_meta_device(nn.ReLU())
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert ActivationCheckpointParams(object()).chosen(net) == list(net)  # what has no blocks is recomputed child by child
    policy = ActivationCheckpointParams(object(), check_fn=lambda _: True, auto_wrap_policy=lambda *_a, **_k: False)
    assert policy.check_fn is None
