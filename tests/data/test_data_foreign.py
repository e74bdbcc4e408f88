"""Loaders and streams of others: exact where their state lets them be, and told where not."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import told
from tests.kit.units import Regression, under_each

Saver = ech.DistributedCheckpointSaver
DATA = torch.utils.data.TensorDataset(*batch(48, 0))


class Augmented(Dataset[Any]):
    """Draws from every stream at every sample."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        x, y = DATA[index]
        return x + torch.rand(4, dtype=torch.float64) * random.random() * float(np.random.rand()), y


class Flow(IterableDataset[Any]):
    """Knows where it stands; draws at its beginning and, if it is told, at every sample."""

    def __init__(self, augments: bool) -> None:
        self.at, self.augments = 0, augments

    def __iter__(self) -> Iterator[Any]:
        torch.rand(())
        return self._samples()

    def _samples(self) -> Iterator[Any]:
        begin, self.at = self.at, 0
        for i in range(begin, 48):
            self.at = i + 1
            x, y = DATA[i]
            yield (x + torch.rand(4, dtype=torch.float64) * float(np.random.rand()) if self.augments else x), y
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def _theirs(dataset: Any, workers: int, **options: Any) -> Any:
    return StatefulDataLoader(dataset, batch_size=8, num_workers=workers, **options)


class Picks(list[list[int]]):
    """Batches in an order of Python's."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample([list(range(i, i + 8)) for i in range(0, 48, 8)], 6))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        drawn = random.Random(3)
        while True:
            yield drawn.randrange(48)


class Unmarked(Flow):
    """Does not know where it stands."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


LOADERS: dict[str, Any] = {
    "torch's, shuffled": lambda: DataLoader(Augmented(), batch_size=8, shuffle=True),
    "torch's, by a generator": lambda: DataLoader(
        Augmented(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "torch's, by a sampler's generator": lambda: DataLoader(
        Augmented(),
        batch_size=8,
        sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(1)),  # type: ignore[arg-type]
    ),
    "torch's, without an end": lambda: DataLoader(DATA, batch_size=8, sampler=Endless()),
    "torch's, in batches of a script": lambda: DataLoader(Augmented(), batch_sampler=Picks([[]] * 6)),
    "torch's, in a worker": lambda: DataLoader(DATA, batch_size=8, shuffle=True, num_workers=1),
    "torch's, over a stream": lambda: DataLoader(Unmarked(augments=False), batch_size=8),
    "a shuffled table": lambda: _theirs(Augmented(), 0, shuffle=True),
    "a stream": lambda: _theirs(Flow(augments=False), 0),
    "a stream in a worker": lambda: _theirs(Flow(augments=False), 1),
    "ours over a stream": lambda: ech.StreamLoader(Flow(augments=True), 8),
}


def _trained(make: Any, steps: int, folder: Path, begin: int | None, layout: str | None = None) -> dict[str, Any]:
    ech.seed(3)
    unit = Regression(module=net(dropout=0.4), optimizer="AdamW", lr=0.05, layout=layout)
    loader = make()
    if begin is not None:
        ech.seed(50)
        Saver.restore(folder / f"step-{begin:08d}", unit, train_dataloader=loader)
    callbacks = [Saver(folder, save_every_n_updates=1)] if begin is None else []
    ech.train(unit, loader, max_updates=steps, callbacks=callbacks)
    return whole(unit.module)


@pytest.mark.full
@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_goes_on_to_the_bit_in_mid_epoch(tmp_path: Path, kind: str) -> None:
    """With dropout, and with augmentation where the loader is not read ahead. An epoch has six batches."""
    want = _trained(LOADERS[kind], 9, tmp_path, None)
    for begin in (1, 5, 7):
        assert largest_difference(_trained(LOADERS[kind], 9, tmp_path, begin), want) == 0, begin


class Holds(Regression):
    """Saves its dataset, which then stands where it stood when its loader is asked for the rest."""

    data: Any

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        self.first = data[0] if not hasattr(self, "first") else self.first
        return super().compute_loss(state, data)


def test_a_dataset_that_the_unit_saves_is_not_advanced_twice(tmp_path: Path) -> None:
    """It was saved one batch ahead, as a loader without a length is read."""
    for begin in (0, 2):
        unit = Holds(module=net())
        unit.data = Flow(augments=False)
        loader = DataLoader(unit.data, batch_size=8)
        if begin:
            Saver.restore(tmp_path / f"step-{begin:08d}", unit, train_dataloader=loader)
        ech.train(unit, loader, max_updates=4, callbacks=[] if begin else [Saver(tmp_path, save_every_n_updates=2)])
        assert torch.equal(unit.first, DATA[8 * begin + (8 if begin else 0) :][0][:8])


@pytest.mark.parametrize("saved", [lambda: ech.Loader(DATA, 8), lambda: DataLoader(DATA, batch_size=12, shuffle=True)])
@pytest.mark.parametrize("steps", [2, 6])
def test_a_dataloader_in_the_place_of_another_loader_begins_an_epoch_anew(
    tmp_path: Path, saved: Any, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    ech.train(Regression(module=net()), saved(), max_updates=steps, callbacks=[Saver(tmp_path)])
    unit, loader = Regression(module=net()), DataLoader(DATA, batch_size=8, sampler=RandomSampler(DATA))  # type: ignore[arg-type]
    Saver.restore_from_latest(tmp_path, unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=steps + 6)
    assert ("it starts over" in caplog.text) == (steps % len(saved()) > 0)
    assert unit.train_progress.num_epochs_completed == (1 if steps == 2 else 2)


def _in_part(folder: Path, begin: int | None) -> tuple[dict[str, Any], list[str]]:
    """Six updates on this rank's share of an epoch; or those after a checkpoint."""
    loader = DataLoader(Augmented(), batch_size=4, sampler=DistributedSampler(DATA))  # type: ignore[arg-type]
    with told("echelon.loop.steps") as texts:
        made = _trained(lambda: loader, 6, folder, begin, layout="ddp")
    return made, list(texts)


def test_a_dataloader_that_the_script_divides_goes_on_on_as_many_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (want, _), _ = ranks(2, _in_part, tmp_path, None)
    (made, said), _ = ranks(2, _in_part, tmp_path, 4)
    assert largest_difference(made, want) == 0 and not said
    ((_, said),) = ranks(1, _in_part, tmp_path, 4)
    assert [text.partition(",")[0] for text in said] == ["training resumes after step 4 of an epoch"]


def test_a_length_that_is_wrong_after_a_restart_loses_no_batch(tmp_path: Path) -> None:
    """Some loaders give the rest of an epoch and its length, some end before their length says."""

    class Rest(list[Any]):
        def __init__(self, length: int) -> None:
            super().__init__(batch(8, i) for i in range(6))
            self.at, self.length = 0, length

        def __len__(self) -> int:
            return self.length if self.at else 6

        def __iter__(self) -> Iterator[Any]:
            for i in range(self.at, 6):
                self.at = i + 1
                yield self[i]

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    for length in (2, 4, 6, 9):
        loader, unit = Rest(length), Regression(module=net())
        folder = tmp_path / str(length)
        ech.train(unit, loader, max_updates=2, callbacks=[Saver(folder)])
        again, unit = Rest(length), Regression(module=net())
        Saver.restore_from_latest(folder, unit, train_dataloader=again)
        ech.train(unit, again, max_epochs=1)
        assert unit.train_progress.num_steps_completed == 6, length


class Bare:
    """Can be iterated over again, and knows nothing of where it stands."""

    def __iter__(self) -> Iterator[Any]:
        return (DATA[i] for i in range(48))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ech.StreamLoader(Bare(), 8), "Bare has no state: a run cannot resume from here"),
        (lambda: [batch(8, i) for i in range(6)], "list has no state: a run that resumes from here starts the epoch over"),
        (lambda: DataLoader(DATA, batch_size=8), None),
        (lambda: ech.Loader(DATA, 8), None),
        (lambda: ech.StreamLoader(Flow(augments=False), 8), None),
        (lambda: StatefulDataLoader(DATA, batch_size=8), None),
    ],
)
def test_a_save_from_which_no_run_can_go_on_exactly_is_told_once(
    tmp_path: Path, make: Any, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    class Watch(ech.Callback):
        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            told.append(sum("middle of an epoch" in r.message for r in caplog.records))

    with caplog.at_level(logging.WARNING):
        saver = Saver(tmp_path, save_every_n_updates=3, save_every_n_epochs=1)
        ech.train(Regression(module=net()), make(), max_epochs=2, callbacks=[saver, Watch()])
    assert told == ([0] * 12 if text is None else [0, 0] + [1] * 10)
    assert text is None or text in caplog.text


class Uneven(Bare):
    """Batches of a bucketing sampler that has not counted the last."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3, 4], [5]])

    def __len__(self) -> int:
        return 2


def test_batches_beyond_a_loaders_length_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unit = Regression()
    saver = Saver(tmp_path, save_every_n_epochs=1)
    ech.train(unit, DataLoader(DATA, batch_sampler=Uneven()), max_epochs=1, callbacks=[saver])
    assert unit.train_progress.num_steps_completed == 2
    assert "more batches than its length, 2, and the others are dropped" in caplog.text
    assert "middle of an epoch" not in caplog.text  # at its end there is nothing to tell


def _told(loader: str) -> str:
    rank = torch.distributed.get_rank()
    mine = torch.utils.data.TensorDataset(*(t[rank::2] for t in DATA.tensors))
    made: Any = {
        "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
        "augmented": lambda: DataLoader(Augmented(), batch_size=4),
        "own parts": lambda: DataLoader(mine, batch_size=4, shuffle=True),
        "sampler": lambda: DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA)),
        "one rank": lambda: DataLoader(DATA, batch_size=2 if rank else 4, sampler=DistributedSampler(DATA) if rank else None),
        "a stream": lambda: ech.StreamLoader(Bare(), 8, shards="itself"),
        "a divided stream": lambda: ech.StreamLoader(Bare(), 8, shards="stride"),
        "a list": lambda: list(DataLoader(DATA, batch_size=4)),
        "own list": lambda: list(DataLoader(DATA, batch_size=4))[rank::2],
    }
    with told("echelon.loop.agreements") as texts:
        ech.train(Regression(layout="ddp"), made[loader](), max_updates=2)
    return "".join(texts)


@pytest.mark.full
def test_ranks_that_all_train_on_all_samples_are_told(ranks: Ranks) -> None:
    loaders = ["shuffled", "augmented", "own parts", "sampler", "one rank", "a stream", "a divided stream", "a list", "own list"]
    said, others = ranks(2, under_each, loaders, _told)
    assert said.pop("shuffled") == (
        "each of 2 ranks trains on all 48 samples of the DataLoader in every epoch, instead of its share: nothing divides them. "
        "Give echelon.Loader(dataset, global_batch=8), or a DataLoader with a DistributedSampler"
    )
    for same in ("a stream", "a list"):
        assert said.pop(same).startswith("ranks 0 and 1 have the same first batch"), same
    assert set(said.values()) == set(others.values()) == {""}
