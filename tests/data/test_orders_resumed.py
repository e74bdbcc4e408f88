"""The order of samples of torch's and torchdata's loaders after a resume, compared with a run that nothing disturbed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import echelon as ech
from tests.kit.models import batch, net
from tests.kit.own_loops import step
from tests.kit.units import Hooks, Regression

SAMPLES, EPOCHS = 12, 4


def _data() -> TensorDataset:
    return TensorDataset(*batch(SAMPLES, 0), torch.arange(SAMPLES))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Callable[[], Any]] = {
    "stateful": lambda: StatefulDataLoader(_data(), batch_size=3, shuffle=True),
    "stateful with workers": lambda: StatefulDataLoader(_data(), batch_size=3, shuffle=True, num_workers=2),
    "stateful with a generator": lambda: StatefulDataLoader(_data(), batch_size=3, shuffle=True, generator=_generator()),
    "torch": lambda: DataLoader(_data(), batch_size=3, shuffle=True),
    "torch with a generator": lambda: DataLoader(_data(), batch_size=3, shuffle=True, generator=_generator()),
    "a sampler with a generator": lambda: DataLoader(
        _data(), batch_size=3, sampler=RandomSampler(_data(), generator=_generator())
    ),
}


class Seeing(Regression):
    """Writes down which samples it was given; drops out, so that the random numbers count, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(module=net(dropout=0.5), lr=0.001, **options)
        self.seen: list[list[int]] = []

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if state.active_phase is ech.units.ActivePhase.TRAIN:
            self.seen.append(data[2].tolist())
        return super().compute_loss(state, data[:2])


def _dying(at: int) -> Callable[[ech.State, Any], None]:
    def step_starts(state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == at:
            raise KeyError("died")

    return step_starts


def _run(make: Callable[[], Any], folder: str | None, saves: dict[str, int], dies: int | None, evaluates: int | None) -> Any:
    torch.manual_seed(3)
    loader, unit, callbacks = make(), Seeing(), []
    held_out = DataLoader(_data(), batch_size=5, shuffle=True)
    torch.manual_seed(4)
    if folder is not None:
        saver = ech.DistributedCheckpointSaver(folder, **saves)
        saver.restore_from_latest(folder, unit, train_dataloader=loader)
        callbacks.append(saver)
    if dies is not None:
        callbacks.append(Hooks(on_train_step_start=_dying(dies)))
    with contextlib.suppress(KeyError):
        ech.fit(unit, loader, held_out, max_epochs=EPOCHS, callbacks=callbacks, evaluate_every_n_epochs=evaluates)
    return unit.seen, [p.detach().tolist() for p in unit.module.parameters()]


# Where it is saved, and where it dies. In mid-epoch not with a generator for loader and sampler together: torchdata by itself
# goes on with another order in the epoch after.
ENDS = [("save_every_n_epochs", name, (4, 10, None)) for name in LOADERS]
ENDS += [("save_every_n_updates", "stateful", (2, 4, 6, 11, None))]


@pytest.mark.full
@pytest.mark.parametrize(("saves", "name", "ends"), ENDS)
def test_an_epochs_end_and_its_middle_are_gone_on_from(
    saves: str, name: str, ends: tuple[int | None, ...], tmp_path: Path
) -> None:
    """With the order of the next epoch, and not that of the first; twice, so that a resumed run saves it as well."""
    seen, trained = _run(LOADERS[name], None, {}, None, None)
    again: list[list[int]] = []
    for dies in ends:
        own, parameters = _run(LOADERS[name], str(tmp_path), {saves: 1}, dies, None)
        again = again[: len(again) // 4 * 4] + own if saves == "save_every_n_epochs" else again + own
    assert again == seen and parameters == trained
    assert sorted(sum(seen[:4], [])) == list(range(SAMPLES))
    assert seen[:4] != seen[4:8]


@pytest.mark.parametrize("name", ["torch", "torch with a generator", "stateful"])
def test_an_evaluation_more_or_less_changes_no_order(name: str, tmp_path: Path) -> None:
    """Its loader draws random numbers, too."""
    seen, trained = _run(LOADERS[name], None, {}, None, None)
    assert _run(LOADERS[name], None, {}, None, 1) == (seen, trained)
    before, _ = _run(LOADERS[name], str(tmp_path), {"save_every_n_epochs": 1}, 8, 1)
    behind, parameters = _run(LOADERS[name], str(tmp_path), {"save_every_n_epochs": 1}, None, 2)
    assert before + behind == seen and parameters == trained


def _own(folder: str, stops: int | None) -> list[list[int]]:
    torch.manual_seed(3)
    module, seen = net(), []
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.001)
    checkpoints = ech.Checkpoints(folder, every="epoch")
    model, optimizer, loader = ech.prepare(module, optimizer, LOADERS["stateful"](), layout="none", checkpoints=checkpoints)
    for _ in ech.epochs(loader, EPOCHS):
        if stops is not None and len(seen) >= stops:
            break
        for x, y, which in loader:
            seen.append(which.tolist())
            step(model, optimizer, x, y)
    return seen


def test_a_loop_of_ones_own_goes_on_as_well(tmp_path: Path) -> None:
    seen = _own(str(tmp_path / "whole"), None)
    again = _own(str(tmp_path / "two"), 8)
    assert again + _own(str(tmp_path / "two"), None) == seen and len(seen) == 16
