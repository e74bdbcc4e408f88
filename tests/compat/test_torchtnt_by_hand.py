"""What programs for TorchTNT call themselves, without a loop: hooks, steps, loggers, with a State of their own making."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import nn

from echelon.compat.torchtnt.framework import AutoPredictUnit, AutoUnit, EntryPoint, PhaseState, State, TrainUnit, train
from echelon.compat.torchtnt.framework.callbacks import (
    GarbageCollector,
    ModuleSummary,
)
from echelon.compat.torchtnt.utils import distributed
from echelon.compat.torchtnt.utils.prepare_module import (
    ActivationCheckpointParams,
    on_meta_device,
)
from echelon.compat.torchtnt.utils.progress import Progress
from echelon.compat.torchtnt.utils.timer import Timer

CPU = torch.device("cpu")
BATCH = (torch.ones(4, 2), torch.tensor([0, 1, 1, 0]))


def _state(entry: str = "TRAIN", timer: Any = None) -> State:
    phase = PhaseState(dataloader=[BATCH], max_epochs=1)
    return State(entry_point=EntryPoint[entry], train_state=phase, eval_state=phase, predict_state=phase, timer=timer)


class Classifier(AutoUnit[Any]):
    def __init__(self, **options: Any) -> None:
        super().__init__(module=nn.Linear(2, 2), device=CPU, **options)

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    def compute_loss(self, state: Any, data: Any) -> tuple[torch.Tensor, Any]:
        outputs = self.module(data[0])
        return nn.functional.cross_entropy(outputs, data[1]), outputs


# --- an AutoUnit's own steps


@pytest.mark.parametrize(("interval", "after_step", "after_epoch"), [("step", 0.05, 0.05), ("epoch", 0.1, 0.05)])
def test_the_schedule_advances_when_a_program_takes_steps_and_ends_epochs(
    interval: Any, after_step: float, after_epoch: float
) -> None:
    unit, state = Classifier(step_lr_interval=interval), _state()
    unit.train_step(state, BATCH)
    assert unit.optimizer.param_groups[0]["lr"] == after_step
    unit.on_train_epoch_end(state)
    assert unit.optimizer.param_groups[0]["lr"] == after_epoch
    trained = Classifier(step_lr_interval=interval)
    train(trained, [BATCH] * 2, max_epochs=2)  # in a loop once, although the hook is called there, too
    assert trained.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (4 if interval == "step" else 2))


def test_a_step_by_hand_with_mocks_a_scaler_and_a_timer() -> None:
    class Mocked(Classifier):
        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[Any, Any]:
            return MagicMock(), MagicMock()

    unit = Mocked()
    unit.train_step(_state(), BATCH)
    unit.optimizer.step.assert_called_once_with()  # type: ignore[attr-defined]
    unit.optimizer.zero_grad.assert_called_once_with(set_to_none=True)  # type: ignore[attr-defined]

    half, timer = Classifier(precision="fp16", clip_grad_norm=1.0), Timer()
    before = half.module.weight.detach().clone()  # type: ignore[operator]
    half.train_step(_state(timer=timer), BATCH)
    assert not torch.equal(before, half.module.weight)  # type: ignore[arg-type]
    assert {"Classifier.compute_loss", "Classifier.backward", "Classifier.optimizer_step"} <= timer.recorded_durations.keys()
    with patch("torch.nn.utils.clip_grad_value_") as clip:
        Classifier(clip_grad_value=2.0).train_step(_state(), BATCH)
    clip.assert_called_once()
    assert isinstance(Classifier().maybe_autocast_precision, torch.autocast)


def test_a_hook_that_is_set_on_the_unit_is_called() -> None:
    unit = Classifier()
    unit.on_train_step_end = MagicMock()  # type: ignore[method-assign]
    unit.train_step(_state(), BATCH)
    train(unit, [BATCH] * 2, max_epochs=1)
    assert unit.on_train_step_end.call_count == 3
    with patch.object(Classifier, "on_train_step_end") as hook:
        train(unit := Classifier(), [BATCH] * 2, max_epochs=1)
    assert hook.call_count == 2 and unit.train_progress.num_steps_completed == 2


def test_what_the_constructor_makes_is_replaced_by_what_configures() -> None:
    class Early(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.Adam(self.module.parameters())

    assert isinstance(Early().optimizer, torch.optim.SGD)
    for options, words in (
        ({"precision": "foo"}, "Precision foo not supported"),
        ({"strategy": "bar"}, r"Strategy bar not supported. Please use one of \['ddp'"),
    ):
        for make in (Classifier, lambda **o: AutoPredictUnit(module=nn.Linear(1, 1), device=CPU, **o)):
            with pytest.raises(ValueError, match=words):
                make(**options)


def test_a_step_that_iterates_is_given_the_iterator() -> None:
    class Iterates(TrainUnit[Iterator[int]]):
        def train_step(self, state: State, data: Iterator[int]) -> int:
            return next(data)

    batches = iter([1, 2])
    assert Iterates().get_next_train_batch(_state(), batches) is batches
    assert Classifier().get_next_train_batch(_state(), batches) == 1


# --- callbacks


def test_callbacks_by_hand() -> None:
    unit = MagicMock()
    unit.tracked_modules.return_value = {"net": nn.Linear(1, 1)}
    names: list[str] = []
    ModuleSummary(process_fn=lambda found: names.extend(each.module_name for each in found)).on_train_start(_state(), unit)
    assert names == ["net"]

    unit.eval_progress = Progress(0, 4, 4)
    collector, state = GarbageCollector(2), _state("FIT")
    unit.train_progress = unit.eval_progress
    collector.on_eval_start(state, unit)
    collector.on_eval_step_end(state, unit)
    assert gc.isenabled()


def test_variables_that_are_set_alone_count(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    asks = (distributed.get_global_rank, distributed.get_world_size, distributed.get_local_rank, distributed.get_local_world_size)
    for name in names:
        for each in names:
            monkeypatch.delenv(each, raising=False)
        monkeypatch.setenv(name, "3")
        assert [ask() for ask in asks] == [
            3 if each == name else default for each, default in zip(names, (0, 1, 0, 1), strict=True)
        ]
        monkeypatch.setenv(name, "")
        assert [ask() for ask in asks] == [0, 1, 0, 1]


def test_modules_on_the_meta_device_and_what_recomputes() -> None:
    with torch.device("meta"):
        inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner)
    assert on_meta_device(inner) and not on_meta_device(outer) and not on_meta_device(nn.ReLU())
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert ActivationCheckpointParams(object()).chosen(net) == list(net)  # what has no blocks is recomputed child by child
    policy = ActivationCheckpointParams(object(), check_fn=lambda _: True, auto_wrap_policy=lambda *_a, **_k: False)
    assert policy.check_fn is None
