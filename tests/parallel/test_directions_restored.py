"""Checkpoints under every direction of parallelism: layouts read one another's bit for bit; a run that goes on goes on alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.checkpoint.tensors import Tensors, local_files
from tests.kit.language import LENGTH, WORDS, Language, Unit
from tests.kit.standing import StandingRanksBySize

pytestmark = pytest.mark.standing_ranks

Saver = ech.DistributedCheckpointSaver
SAVED, ALL = 2, 4  # updates before the save, and in all; each of two micro-batches

# name: ranks, strategy
LAYOUTS: dict[str, tuple[int, Any]] = {
    "one": (1, "none"),
    "ddp": (2, "ddp"),
    "fsdp": (4, "fsdp"),
    "cp": (2, "cp=2"),
    "tp on 4": (4, "tp=4"),
    "tp, sequence parallel": (2, ech.Layout(tp=2, sequence_parallel=True)),
    "tp x fsdp": (4, "dp_shard=2,tp=2"),
    "cp x fsdp": (4, "dp_shard=2,cp=2"),
    "pp": (2, "pp=2"),
    "interleaved": (2, ech.Layout(pp=2, schedule="interleaved")),
    "pp x fsdp": (4, "dp_shard=2,pp=2"),
    "tp x pp": (4, "tp=2,pp=2"),
}
GOES_ON = ["pp x fsdp", *(pytest.param(name, marks=pytest.mark.full) for name in ("tp x fsdp", "cp x fsdp"))]


def _data() -> ech.Loader:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, WORDS, (40, LENGTH + 1), generator=generator)
    return ech.Loader([{"words": row[:-1], "targets": row[1:]} for row in rows], 8, accumulate=2)


def _unit(strategy: Any) -> Unit:
    torch.manual_seed(3)
    module = Language(4)
    module.head.weight = module.words.weight  # in a pipeline of two stages
    return Unit("AdamW", module, layout=strategy, accumulate=2)


def _train(strategy: Any, folder: str, steps: int, restores: bool) -> None:
    """Up to so many steps, with a checkpoint at the end."""
    unit, loader = _unit(strategy), _data()
    if restores:
        assert Saver.restore_from_latest(folder, unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=steps, callbacks=[Saver(folder, save_every_n_updates=SAVED)])


def _copy(strategy: Any, source: str, target: str) -> None:
    """Read a checkpoint, and write it as this layout does."""
    unit, loader = _unit(strategy), _data()
    Saver.restore(f"{source}/step-{SAVED:08d}", unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=SAVED, callbacks=[Saver(target, save_every_n_updates=SAVED)])


def _values(folder: Path, step: int) -> dict[str, torch.Tensor]:
    with local_files(folder / f"step-{step:08d}") as files:
        saved = Tensors(files)
        return {name: saved.whole(name).clone() for name in saved.index}


def _differing(mine: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    both = mine.keys() & right.keys()
    return sorted((mine.keys() ^ right.keys()) | {name for name in both if not torch.equal(mine[name], right[name])})


@pytest.fixture(scope="module")
def saved(standing_ranks: StandingRanksBySize, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with the checkpoint that a layout has written."""

    @functools.cache
    def made(layout: str) -> Path:
        ranks, strategy = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("saved")
        standing_ranks(ranks, _train, strategy, str(folder), SAVED, False, timeout_s=120)
        return folder

    return made


FIRST = [("one", "pp x fsdp"), ("pp x fsdp", "cp"), ("cp x fsdp", "tp x fsdp"), ("tp x fsdp", "ddp")]
# Each layout reads those of three others, and is read by three.
NAMES = list(LAYOUTS)
OTHERS = [(NAMES[n - back], name) for n, name in enumerate(NAMES) for back in (1, 3, 7) if (NAMES[n - back], name) not in FIRST]


@pytest.mark.full(but=("one-pp x fsdp",))
@pytest.mark.parametrize(("source", "target"), [*FIRST, *OTHERS])
def test_a_layout_reads_anothers_checkpoint(
    standing_ranks: StandingRanksBySize, saved: Callable[[str], Path], tmp_path: Path, source: str, target: str
) -> None:
    ranks, strategy = LAYOUTS[target]
    standing_ranks(ranks, _copy, strategy, str(saved(source)), str(tmp_path), timeout_s=120)
    mine, right = _values(tmp_path, SAVED), _values(saved(source), SAVED)
    assert len(right) > 100 and _differing(mine, right) == []


@pytest.mark.full
@pytest.mark.parametrize("layout", GOES_ON)
def test_a_run_goes_on_bit_equal(
    standing_ranks: StandingRanksBySize, saved: Callable[[str], Path], tmp_path: Path, layout: str
) -> None:
    ranks, strategy = LAYOUTS[layout]
    standing_ranks(ranks, _train, strategy, str(tmp_path), ALL, False, timeout_s=120)
    standing_ranks(ranks, _train, strategy, str(saved(layout)), ALL, True, timeout_s=120)
    assert _differing(_values(saved(layout), ALL), _values(tmp_path, ALL)) == []
