"""What a run unfreezes, freezes or gives to its optimizer while it trains is so again when it resumes."""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import echelon as ech
from echelon.common.errors import CheckpointMismatchError
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import step
from tests.kit.refusals import refused
from tests.kit.units import Hooks, Regression

pytestmark = pytest.mark.standing_ranks

Saver = ech.DistributedCheckpointSaver
ROWS, EPOCHS = 24, 3  # batches of 8: three updates an epoch
DATA = TensorDataset(*batch(ROWS, 0))


class Tuning(Regression):
    """A frozen body; the optimizer holds all parameters, or those alone that are trained at first."""

    all_at_once = True

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        trained = [p for p in module.parameters() if p.requires_grad or self.all_at_once]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9), None


class Grouping(Tuning):
    all_at_once = False


class Changes(ech.Callback):
    """Changes what is trained as the second epoch begins, and only then or from then on; ends a run in its middle."""

    def __init__(self, how: str, stop_after: int | None) -> None:
        self.how, self.stop_after = how, stop_after

    def on_train_epoch_start(self, state: ech.State, unit: Any) -> None:
        done, first = unit.train_progress.num_epochs_completed, unit.prepared.unwrapped.first
        if done == 1 or (done > 1 and self.how == "from then on"):
            first.requires_grad_(self.how != "frozen")
            if self.how == "grouped":
                unit.optimizer.add_param_group({"params": first.parameters(), "lr": 0.02})

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == self.stop_after:
            state.stop()


def _run(folder: str, how: str, layout: str, stop_after: int | None = None) -> dict[str, torch.Tensor]:
    module = net()
    if how == "frozen":
        module.blocks[0].requires_grad_(False)
    else:
        module.first.requires_grad_(False)
    unit = (Grouping if how == "grouped" else Tuning)(module=module, layout=layout)
    loader = ech.Loader(DATA, 8, seed=1)
    Saver.restore_from_latest(folder, unit, train_dataloader=loader)
    callbacks = [Changes(how, stop_after), Saver(folder, save_every_n_updates=1)]
    ech.train(unit, loader, max_epochs=EPOCHS, callbacks=callbacks)
    return whole(unit.module)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "layout"),
    [("from then on", "ddp"), ("once", "fsdp"), ("frozen", "ddp"), *(("grouped", each) for each in ("ddp", "fsdp", "zero1"))],
)
def test_a_resumed_run_trains_what_the_saved_one_did(ranks: Ranks, tmp_path: Path, how: str, layout: str) -> None:
    wanted, folder = ranks(2, _run, str(tmp_path / "whole"), how, layout)[0], str(tmp_path / "parts")
    for stop_after in (4, 7):  # in the middle of the second epoch, and of the third
        ranks(2, _run, folder, how, layout, stop_after)
    if how == "grouped":
        shutil.copytree(folder, f"{folder}-alone")
        assert largest_difference(_run(f"{folder}-alone", how, "none"), wanted) < 1e-12  # on another layout as well
    assert largest_difference(ranks(2, _run, folder, how, layout)[0], wanted) == 0


class Stop(Exception):
    pass


def _loop(folder: str, counts: str, groups: bool, layout: str, stop_after: int | None = None) -> dict[str, torch.Tensor]:
    """The same in a loop of one's own, whose line in front of the batches runs again in an epoch that is resumed."""
    built = net()
    built.first.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in built.parameters() if p.requires_grad or not groups], lr=0.1, momentum=0.9)
    saver = Saver(folder, save_every_n_updates=1)
    model, optimizer, loader = ech.prepare(built, optimizer, ech.Loader(DATA, 8, seed=1), layout=layout, checkpoints=saver)
    steps = 0
    with contextlib.suppress(Stop):
        for epoch in ech.epochs(loader, EPOCHS) if counts == "epochs" else range(EPOCHS):
            if epoch == 1:
                built.first.requires_grad_(True)
                if groups:
                    optimizer.add_param_group({"params": list(built.first.parameters()), "lr": 0.02})
            for x, y in loader:
                if stop_after is not None and steps == stop_after:
                    raise Stop
                step(model, optimizer, x, y)
                steps += 1
    return whole(model)


@pytest.mark.full
@pytest.mark.parametrize(
    ("counts", "groups", "layout"),
    [("epochs", False, "fsdp"), ("epochs", True, "ddp"), ("range", False, "ddp"), ("range", True, "fsdp")],
)
def test_a_loop_of_ones_own_goes_on_so(ranks: Ranks, tmp_path: Path, counts: str, groups: bool, layout: str) -> None:
    wanted, folder = ranks(2, _loop, str(tmp_path / "whole"), counts, groups, layout)[0], str(tmp_path / "parts")
    for stop_after in (4, 3):
        ranks(2, _loop, folder, counts, groups, layout, stop_after)
    assert largest_difference(ranks(2, _loop, folder, counts, groups, layout)[0], wanted) == 0


def _two_stages(folder: str, *, body: bool) -> dict[str, bool]:
    """A script that was changed between runs: it trains its body from the beginning now."""
    module = net()
    module.first.requires_grad_(body)
    unit = Tuning(module=module)
    Saver.restore_from_latest(folder, unit)
    ech.train(unit, ech.Loader(DATA, 8), max_epochs=2 if not body else 3, callbacks=[Changes("once", 4), Saver(folder)])
    return {name: p.requires_grad for name, p in module.named_parameters()}


def test_a_script_that_was_changed_has_its_own_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _two_stages(str(tmp_path), body=False)
    with caplog.at_level(logging.WARNING):
        assert all(_two_stages(str(tmp_path), body=True).values())
    assert "this script's choice" in caplog.text


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_lacks_what_was_trained_is_refused_with_a_remedy(tmp_path: Path, momentum: float) -> None:
    def unit() -> Grouping:
        module = net()
        module.first.requires_grad_(False)
        return Grouping(module=module)

    def replaces(state: ech.State, unit: Any) -> None:
        """Unfreezes as the second epoch begins, and trains all with another optimizer."""
        if unit.train_progress.num_epochs_completed == 1:
            unit.prepared.unwrapped.first.requires_grad_()
            unit.optimizer = torch.optim.SGD(unit.module.parameters(), lr=0.1, momentum=momentum)

    ech.train(unit(), ech.Loader(DATA, 8), max_epochs=2, callbacks=[Hooks(on_train_epoch_start=replaces), Saver(tmp_path)])
    with refused(CheckpointMismatchError):
        Saver.restore_from_latest(tmp_path, unit())


def test_only_weights_leave_alone_what_is_frozen(tmp_path: Path) -> None:
    _run(str(tmp_path), "once", "none")
    module = net()
    module.first.requires_grad_(False)
    newest = max(tmp_path.glob("step-*"))
    weights = ech.callbacks.RestoreOptions(restore_train_progress=False, restore_optimizers=False, restore_lr_schedulers=False)
    Saver.restore(newest, Tuning(module=module), restore_options=weights)
    assert not module.first.weight.requires_grad
