"""Modules whose own hooks give their state other names, as to read and write an older version's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import echelon as ech
from echelon.common.errors import CheckpointError
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.refusals import refused
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

Saver = ech.DistributedCheckpointSaver
DATA = torch.utils.data.TensorDataset(*batch(48, 0))


class Renaming(nn.Module):
    """Its state has the names of an earlier version, and a tensor of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = net(), nn.BatchNorm1d(4, dtype=torch.float64)
        self.register_state_dict_post_hook(self._to_old)
        self.register_load_state_dict_pre_hook(self._to_new)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x))

    @staticmethod
    def _to_old(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in list(state):
            state[f"{prefix}old.{name.removeprefix(prefix)}"] = state.pop(name)
        state[f"{prefix}version"] = torch.tensor(1)

    @staticmethod
    def _to_new(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        assert state.pop(f"{prefix}version") == 1
        for name in list(state):
            state[prefix + name.removeprefix(f"{prefix}old.")] = state.pop(name)


def _run(folder: Path | None, layout: str, until: int) -> dict[str, torch.Tensor]:
    """Restored from the folder if there is something, and saved there."""
    unit, loader = Regression(module=Renaming(), layout=layout), ech.Loader(DATA, 8, seed=1)
    if folder is not None:
        Saver.restore_from_latest(folder, unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=until, callbacks=[] if folder is None else [Saver(folder)])
    return whole(unit.module) | {n: b.double().clone() for n, b in unit.prepared.unwrapped.named_buffers()}


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_resumed_run_goes_on_bit_equal(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    want = ranks(2, _run, None, layout, 9)[0]
    ranks(2, _run, tmp_path, layout, 4)
    assert largest_difference(ranks(2, _run, tmp_path, layout, 9)[0], want) == 0


def test_another_layout_on_one_rank_reads_it(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2, _run, tmp_path, "fsdp", 4)[0]
    assert largest_difference(ranks(1, _run, tmp_path, "none", 4)[0], saved) == 0


def _older_shards(folder: Path) -> None:
    module = FSDP(Renaming(), device_id=torch.device("cpu"), use_orig_params=True)
    unit = Regression(module=module)
    with refused(CheckpointError):
        ech.train(unit, ech.Loader(DATA, 8, seed=1), max_updates=2, callbacks=[Saver(folder)])


def test_the_older_shards_refuse_it_by_name(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _older_shards, tmp_path)
