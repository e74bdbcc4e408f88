"""Arguments that only TorchTNT's units and loops have."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import echelon as ech
from echelon.common.errors import UnitError, UsageError
from echelon.compat.torchtnt.framework import AutoPredictUnit, AutoUnit, EvalUnit, TestUnit, TrainUnit, fit
from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver
from echelon.compat.torchtnt.framework.callbacks.base_checkpointer import BaseCheckpointer
from echelon.compat.torchtnt.framework.callbacks.checkpointer_types import RestoreOptions
from echelon.compat.torchtnt.utils.device_mesh import GlobalMeshCoordinator
from echelon.compat.torchtnt.utils.prepare_module import TPStrategy
from tests.conftest import Ranks
from tests.kit.models import whole
from tests.kit.refusals import refused


class Classes(AutoUnit[Any]):
    """Six classes of rows."""

    def compute_loss(self, state: Any, data: Any) -> Any:
        logits = self.module(data[0])
        return nn.functional.cross_entropy(logits, data[1]), logits

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        return torch.optim.SGD(module.parameters(), lr=0.5), None


def _module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6)).double()


def _data() -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(8, 3, dtype=torch.float64), torch.randint(0, 6, (8,))) for _ in range(4)]


def _loss_parallel() -> dict[str, Any]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    strategy = TPStrategy({"2": ColwiseParallel(use_local_output=False)})
    grid = GlobalMeshCoordinator(tp=2, device_type=kind)
    unit = Classes(module=_module(), strategy=strategy, global_mesh=grid, enable_loss_parallel=True)
    fit(unit, _data(), _data(), max_epochs=1)
    sharded = AutoPredictUnit(module=_module(), strategy="fsdp2", global_mesh=GlobalMeshCoordinator(device_type=kind))
    return {
        "trained": whole(unit.module),
        "split": {n: tuple(p.to_local().shape) for n, p in sharded.module.named_parameters()},  # type: ignore[attr-defined]
        "rank": dist.get_rank(),
    }


def test_losses_over_split_logits_and_strategies_over_a_given_grid(ranks: Ranks) -> None:
    module = _module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for x, y in _data():
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    for each in ranks(2, _loss_parallel):
        for name, value in module.named_parameters():
            assert (each["trained"][name] - value).abs().max() <= 1e-12, name
        assert each["split"] == {"0.weight": (2, 3), "0.bias": (2,), "2.weight": (3, 4), "2.bias": (3,)}


@pytest.mark.parametrize("strategy", [None, "ddp", ech.DDPStrategy()])
def test_a_grid_for_a_strategy_that_has_none_is_an_error(strategy: Any) -> None:
    for kind in (Classes, AutoPredictUnit):
        with refused(UsageError):
            kind(module=_module(), strategy=strategy, global_mesh=SimpleNamespace(dp_mesh=None))


def test_units_without_these_arguments_are_echelons(caplog: pytest.LogCaptureFixture) -> None:
    """A step that a class overrides costs what the loop knows of AutoUnit's own."""
    unit = Classes(module=_module(), device=torch.device("cpu"))
    assert type(unit).train_step is ech.AutoUnit.train_step and "train_step" not in vars(unit)
    assert not caplog.records
    with refused(UsageError):
        Classes(module=_module(), enable_compiled_autograd=True)
    with refused(UsageError):
        Classes(module=_module(), no_such_argument=1)
    caplog.set_level(logging.WARNING)
    Classes(module=_module(), device=torch.device("cpu"), gradient_accumulation_sync=True)
    assert "gradient_accumulation_sync has no effect" in caplog.text


def test_fit_tests_at_the_end() -> None:
    class Steps(TrainUnit[int], EvalUnit[int], TestUnit[int]):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def train_step(self, state: Any, data: int) -> None:
            self.seen.append(f"train {data}")

        def eval_step(self, state: Any, data: int) -> None:
            self.seen.append(f"eval {data}")

        def test_step(self, state: Any, data: int) -> None:
            self.seen.append(f"test {data}")

    unit = Steps()
    fit(unit, [1, 2], [3], max_epochs=1, test_dataloader=range(9), max_test_steps=2)
    assert unit.seen == ["train 1", "train 2", "eval 3", "test 0", "test 1"]
    untested = Classes(module=_module(), device=torch.device("cpu"))
    fit(untested, [], [], max_epochs=1)

    class Trains(TrainUnit[int], EvalUnit[int]):
        train_step = eval_step = lambda self, state, data: pytest.fail("before training")  # type: ignore[assignment]

    with refused(UnitError):
        fit(Trains(), [1], [2], max_epochs=1, test_dataloader=[3])


class Counts(TrainUnit[int]):
    """Has a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.rows = nn.Linear(1, 1), Rows()

    def train_step(self, state: Any, data: int) -> None:
        self.rows.update(data)


class Rows:
    count = 0

    def update(self, rows: int) -> None:
        self.count += rows

    def compute(self) -> int:
        return self.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_metrics_may_be_left_out_of_what_is_restored(tmp_path: Path) -> None:
    saver = DistributedCheckpointSaver(str(tmp_path), save_every_n_train_steps=1)
    assert isinstance(saver, BaseCheckpointer)
    unit = Counts()
    ech.train(unit, [3, 4], max_epochs=1, callbacks=[saver])
    for wanted, count in ((True, 7), (False, 0)):
        new = Counts()
        options = RestoreOptions(restore_metrics=wanted)
        assert type(saver).restore_from_latest(str(tmp_path), new, restore_options=options)
        assert (new.rows.count, new.train_progress.num_steps_completed) == (count, 2)
