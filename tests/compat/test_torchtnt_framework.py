"""Arguments that only TorchTNT's units and loops have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.common.errors import NotHereError
from echelon.compat.torchtnt.framework import AutoPredictUnit, AutoUnit, TrainUnit
from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver
from echelon.compat.torchtnt.framework.callbacks.base_checkpointer import BaseCheckpointer
from echelon.compat.torchtnt.framework.callbacks.checkpointer_types import RestoreOptions
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


@pytest.mark.parametrize("name", ["enable_compiled_autograd", "enable_loss_parallel", "global_mesh", "grad_scaler_params"])
def test_arguments_that_nobody_gives_are_refused_with_what_to_take(name: str) -> None:
    for kind in (Classes, AutoPredictUnit):
        with refused(NotHereError):
            kind(module=_module(), device=torch.device("cpu"), **{name: True})
        kind(module=_module(), device=torch.device("cpu"), **{name: None})  # what it is by default


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
