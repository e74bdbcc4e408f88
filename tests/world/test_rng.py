"""Random streams of torch, numpy and Python: apart on data-parallel ranks, together where ranks share samples, and restored."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.common.errors import UsageError
from echelon.world import rng
from tests.conftest import Ranks
from tests.kit.models import net, whole
from tests.kit.refusals import refused
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

Saver = ech.DistributedCheckpointSaver


def _draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


class Augmented(torch.utils.data.Dataset[Any]):
    """Draws from all three streams at every sample, in the rank's own process."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([*_draw(), float(index)], dtype=torch.float64), torch.ones(1, dtype=torch.float64)


class Mixed(Regression):
    """Draws in its step, as Mixup does, and writes down what it and its data drew."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.drawn: list[tuple[float, ...]] = []

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        drawn = _draw()
        self.drawn.append((*data[0][0, :3].tolist(), *drawn))
        return super().compute_loss(state, (data[0] * drawn[2], data[1] * drawn[1]))


def _unit(layout: str, **options: Any) -> Mixed:
    torch.manual_seed(1)
    module = net(**({"dtype": torch.float32} if options else {}))
    ech.seed(5)
    return Mixed(module=module, layout=layout, **options)


def _trained(layout: str, *steps: int, seed: int | None = None, saved: Path | None = None) -> list[tuple[float, ...]]:
    """What was drawn in each step; trained in as many calls as there are numbers of steps."""
    unit, loader = _unit(layout), ech.Loader(Augmented(), 8)
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
    callbacks = [Saver(saved, save_every_n_updates=2)] if saved is not None else []
    for each in steps:
        ech.train(unit, loader, max_updates=each, callbacks=callbacks)
    return unit.drawn


def _resumed(layout: str, saved: Path, seed: int) -> list[tuple[float, ...]]:
    unit, loader = _unit(layout), ech.Loader(Augmented(), 8)
    random.seed(seed)
    np.random.seed(seed)
    Saver.restore(saved / "step-00000002", unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=4)
    return unit.drawn


def _histories(folder: Path) -> dict[str, Any]:
    return {
        "once": _trained("ddp", 4, saved=folder),
        "again": _trained("ddp", 4),
        "in two calls": _trained("ddp", 2, 4),
        "seeded 1": _trained("ddp", 2, seed=1),
        "seeded 1 again": _trained("ddp", 2, seed=1),
        "resumed": _resumed("ddp", folder, 9),
    }


@pytest.mark.full
def test_every_stream_is_a_data_ranks_own_reproducible_and_restored(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks(2, _histories, tmp_path / "c")
    alone = _trained("none", 4)
    columns = [[set(np.array(rank["once"])[:, i]) for rank in told] for i in range(6)]
    assert all(not a & b for a, b in columns)  # on each rank other numbers, in the data and in the step
    for rank in told:
        assert rank["once"] == rank["again"] == rank["in two calls"]
        assert rank["resumed"] == rank["once"][2:]
        assert rank["seeded 1"] == rank["seeded 1 again"] != rank["once"][:2]
    assert told[0]["seeded 1"] != told[1]["seeded 1"]
    assert told[0]["once"][0][:3] == alone[0][:3]  # rank 0 keeps the program's own
    elsewhere = ranks(4, _resumed, "ddp", tmp_path / "c", 9)
    again = ranks(4, _resumed, "ddp", tmp_path / "c", 9)
    assert elsewhere == again  # other streams than any before, which follow from the seeds
    seen = {number for rank in told for step in rank["once"] for number in step}
    flat = [number for rank in elsewhere for step in rank for number in step]
    assert len(set(flat)) == len(flat) and not set(flat) & seen


def _in_places(case: str) -> tuple[float, ...]:
    """Four ranks, of which two each compute the same samples together."""
    rank = dist.get_rank()
    if case != "unseeded":
        ech.seed(3)
    if case == "rank 0 drew more" and rank == 0:
        _draw()
    if case == "restored":
        saved = rng.states()
        _draw()
        rng.load_states(saved)
    rng.separate(rank // 2)
    return _draw()


@pytest.mark.full
def test_ranks_of_the_same_samples_draw_alike(ranks: Ranks) -> None:
    drawn = {}
    for case in ("seeded", "unseeded", "rank 0 drew more", "restored"):
        told = drawn[case] = ranks(4, _in_places, case)
        assert told[0] == told[1] and told[2] == told[3]
        if case != "restored":
            assert all(a != b for a, b in zip(told[0], told[2], strict=True)), case
    ech.seed(3)
    assert drawn["seeded"][0] == _draw()
    ech.seed(3)
    assert set(drawn["restored"]) == {_draw()}  # as they were saved, whatever they are


def _bitwise(saved: Path | None, layout: str, stop: int, seed: int = 4) -> dict[str, Any]:
    unit = _unit(layout, deterministic="bitwise")
    np.random.seed(seed)
    loader = ech.Loader([(torch.ones(4) * i / 24, torch.ones(1)) for i in range(24)], 8)
    if saved is not None and stop == 3:
        Saver.restore_from_latest(saved, unit, train_dataloader=loader)
    callbacks = [Saver(saved)] if saved is not None and stop == 1 else []
    ech.train(unit, loader, max_epochs=stop, callbacks=callbacks)
    return whole(unit.module)


@pytest.mark.full
@pytest.mark.fresh_ranks  # the mode is the process's
def test_in_bitwise_mode_numpy_and_python_draw_by_the_part_too(ranks: Ranks, tmp_path: Path) -> None:
    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return all(torch.equal(a[name], b[name]) for name in a)

    (one,), two = ranks(1, _bitwise, None, "none", 3), ranks(2, _bitwise, None, "ddp", 3)
    assert same(one, two[0]) and same(one, two[1])
    assert not same(one, ranks(1, _bitwise, None, "none", 3, seed=6)[0])
    ranks(2, _bitwise, tmp_path / "c", "ddp", 1)
    assert same(one, ranks(1, _bitwise, tmp_path / "c", "none", 3, seed=6)[0])


def test_a_seed_for_another_process_follows_from_all_streams() -> None:
    def begun(*changes: Any) -> tuple[float, ...]:
        ech.seed(2)
        for change in changes:
            change()
        seeds = rng.draw()
        ech.seed(8)
        rng.start(seeds)
        return _draw()

    plain = begun()
    assert plain == begun()
    for place, change in enumerate((lambda: torch.manual_seed(1), lambda: random.seed(1), lambda: np.random.seed(1))):
        differ = [a != b for a, b in zip(plain, begun(change), strict=True)]
        assert differ == [i == place for i in range(3)]


def test_states_come_back_and_ranks_are_apart_but_for_the_first() -> None:
    rng.seed(3)
    saved = rng.states()
    first = (*_draw(), random.gauss(0, 1))
    rng.load_states(saved)
    assert (*_draw(), random.gauss(0, 1)) == first
    drawn = []
    for rank in range(4):
        rng.seed(7)
        rng.separate(rank)
        drawn.append(_draw())
    rng.seed(7)
    assert drawn[0] == _draw() and len(set(drawn)) == 4
    with refused(UsageError, name="seed", got="-1"):
        ech.seed(-1)
