"""Checkpoints under every direction of parallelism: layouts read one another's bit for bit; a run that goes on goes on alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import echelon as ech
from echelon.checkpoint.tensors import Tensors, local_files
from tests.conftest import Ranks
from tests.kit.language import LENGTH, WORDS, Language, Unit
from tests.kit.models import batch, largest_difference, net, seeded, whole
from tests.kit.standing import StandingRanksBySize
from tests.kit.units import Regression

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


# --- where torch sorts its buckets on the way

ROWS = torch.utils.data.TensorDataset(*batch(96, 0))
SAVED_AT, STEPS = 3, 9


class ByHand(ech.TrainUnit[Any]):
    """Wrapped by its author, and accumulating."""

    def __init__(self) -> None:
        super().__init__()
        self.module = DistributedDataParallel(net(), bucket_cap_mb=1)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)

    def train_step(self, state: ech.State, data: Any) -> None:
        half = len(data[0]) // 2
        with self.module.no_sync():
            torch.nn.functional.mse_loss(self.module(data[0][:half]), data[1][:half]).backward()
        torch.nn.functional.mse_loss(self.module(data[0][half:]), data[1][half:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _ordered(kind: str) -> Any:
    if kind == "by hand":
        return ByHand()
    if kind == "four linears":  # their gradients are ready in another order than they are registered in
        return Regression(module=seeded(_Backwards, 5), layout="ddp", optimizer="AdamW")
    return Regression(module=net(), layout=kind, optimizer="AdamW")


class _Backwards(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()

        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.head = torch.nn.Linear(4, 1)
        self.register_buffer("passes", torch.zeros(()))  # which the replayed pass has no part in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return self.head(x)


def _whole_and_resumed(folder: str, kinds: list[str]) -> list[float]:
    ech.init_from_env()
    differences = []
    for kind in kinds:
        path = Path(folder) / kind
        unit = _ordered(kind)
        saver = ech.DistributedCheckpointSaver(path, save_every_n_updates=SAVED_AT)
        ech.train(unit, ech.Loader(ROWS, 16, seed=2), max_updates=STEPS, callbacks=[saver])
        again, loader = _ordered(kind), ech.Loader(ROWS, 16, seed=2)
        ech.DistributedCheckpointSaver.restore(path / f"step-{SAVED_AT:08}", again, train_dataloader=loader)
        ech.train(again, loader, max_updates=STEPS)
        differences.append(largest_difference(whole(again.module), whole(unit.module)))
    return differences


@pytest.mark.full
@pytest.mark.parametrize("kinds", [["four linears"], ["ddp", "zero1", "by hand"]], ids=", ".join)
def test_after_a_resume_ddp_adds_in_the_order_in_which_it_added_before(ranks: Ranks, tmp_path: Path, kinds: list[str]) -> None:
    for differences in ranks(4, _whole_and_resumed, str(tmp_path), kinds):
        assert dict(zip(kinds, differences, strict=True)) == dict.fromkeys(kinds, 0.0)
