"""Hugging Face's datasets in our loaders: the real library, from the extra `hf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from tqdm import tqdm

import echelon as ech
from echelon.common.errors import DataError, LoaderError
from echelon.data.parts import Padding
from tests.conftest import Ranks
from tests.kit.own_loops import step, told
from tests.kit.refusals import refused

tqdm.monitor_interval = 0  # no thread that watches progress bars, and stays


@pytest.fixture
def table() -> Any:
    return datasets.Dataset.from_dict({"x": [[float(i), i + 0.5] for i in range(40)], "y": list(range(40))})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_table_goes_through_the_loader_a_batch_at_once(table: Any, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], datasets.Dataset.__getitems__
    monkeypatch.setattr(datasets.Dataset, "__getitems__", lambda self, keys: calls.append(len(keys)) or real(self, keys))
    loader = ech.Loader(table.with_format("torch"), 8, seed=1, num_workers=workers, options=ech.data.LoaderOptions(dp=(0, 1)))
    batches = list(loader)
    assert batches[0]["x"].shape == (8, 2) and (workers or calls == [8] * 5)
    rows = torch.cat([b["y"] for b in batches])
    assert rows.tolist() == loader.order.at(0, torch.arange(40).numpy()).tolist()  # type: ignore[arg-type]
    assert torch.equal(torch.cat([b["x"] for b in batches])[:, 0], rows.float())


def test_another_table_is_noticed_on_resume(table: Any) -> None:
    state = ech.Loader(table, 8).state_dict()
    ech.Loader(table.map(lambda row: row), 8).load_state_dict(state)
    with refused(LoaderError):
        ech.Loader(table.select(range(39, -1, -1)), 8).load_state_dict(state)


def test_a_row_that_fails_is_named(table: Any) -> None:
    def torn(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if 13 in rows["y"]:
            raise ValueError("torn")
        return rows

    with refused(DataError):
        list(ech.Loader(table.with_transform(torn), 8, options=ech.data.LoaderOptions(dp=(0, 1))))


def test_a_streamed_table_goes_on_where_it_was_left(table: Any) -> None:
    def loader() -> ech.StreamLoader:
        return ech.StreamLoader(table.to_iterable_dataset(num_shards=4), 8, options=ech.data.StreamOptions(dp=(0, 1)))

    first = loader()
    batches = iter(first)
    seen = [next(batches)["y"].tolist() for _ in range(2)]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert seen + [b["y"].tolist() for b in second] == [list(range(i, i + 8)) for i in range(0, 40, 8)]


def test_the_samples_that_a_shuffle_buffer_would_lose_are_told_at_the_save_and_at_the_restart(
    table: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Notices if the stages of a streamed dataset are called otherwise."""

    class Sees(ech.TrainUnit[Any]):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def train_step(self, state: ech.State, data: Any) -> None:
            self.seen += data["y"].tolist()

    def run(buffer: int, steps: int, resume: bool) -> list[int]:
        stream = table.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=buffer).map(lambda row: row).take(40)
        unit, loader = Sees(), ech.StreamLoader(stream, 8)
        folder = tmp_path / str(buffer)
        if resume:
            ech.DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=loader)
        saver = ech.DistributedCheckpointSaver(folder) if not resume else None
        ech.train(unit, loader, max_epochs=1, max_updates=steps, callbacks=[saver] if saver is not None else [])
        return unit.seen

    for buffer in (1, 10):
        caplog.clear()
        first = run(buffer, 2, resume=False)
        at_save = caplog.text
        caplog.clear()
        rest = run(buffer, 5, resume=True)
        told = "misses up to 10 samples of each stream"
        lost = sorted(set(range(40)) - {*first, *rest})
        assert (told in at_save) == (told in caplog.text) == bool(lost) == (buffer > 1)


# --- what was divided between the ranks before


def _rows(first: int, shards: list[int]) -> Any:
    for shard in shards:
        for row in range(4):
            yield {"x": float(first + 10 * shard + row)}


def _streamed(first: int) -> Any:
    return datasets.IterableDataset.from_generator(_rows, gen_kwargs={"first": first, "shards": [0, 1]})


def _mixed(workers: int) -> Any:
    """Split by node, and only then interleaved."""
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    parts = [split_dataset_by_node(_streamed(first), **place) for first in (0, 100)]
    mixed = datasets.interleave_datasets(parts, stopping_strategy="all_exhausted_without_replacement")
    loader = ech.StreamLoader(mixed, 4, num_workers=workers, tail="keep", options=ech.data.StreamOptions())
    seen = [float(x) for batch in loader if not isinstance(batch, Padding) for x in batch["x"]]
    with refused(LoaderError):
        ech.StreamLoader(mixed, 4, shards="stride")
    return seen


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_that_were_split_by_node_and_interleaved_give_each_sample_once(ranks: Ranks, workers: int) -> None:
    a, b = ranks(2, _mixed, workers)
    every = sorted(float(first + 10 * shard + row) for first in (0, 100) for shard in (0, 1) for row in range(4))
    assert sorted(a + b) == every


def _tables_of_ranks(kind: str) -> list[str]:
    whole = datasets.Dataset.from_dict({"x": [[float(i)] for i in range(16)]}).with_format("torch")
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    mine: Any = whole
    if kind == "split":
        mine = datasets.interleave_datasets([split_dataset_by_node(whole, **place)] * 2)
    elif kind == "subset":
        mine = torch.utils.data.Subset(whole, range(place["rank"], 16, 2))  # type: ignore[arg-type]
    elif kind == "tensors":
        mine = torch.utils.data.TensorDataset(torch.arange(8.0)[:, None] + place["rank"])
    model = torch.nn.Linear(1, 1)
    with told() as texts:
        model, optimizer, loader = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ech.Loader(mine, 4, seed=1))
        for batch in loader:
            step(model, optimizer, batch["x"] if isinstance(batch, dict) else batch[0], loss=lambda model, x: model(x).mean())
    return [text for text in texts if "divided twice" in text]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["split", "subset", "tensors", "whole"])
def test_tables_that_were_divided_before_are_said_to_be_divided_twice(ranks: Ranks, kind: str) -> None:
    first, second = ranks(2, _tables_of_ranks, kind)
    assert len(first) == (kind != "whole") and not second
