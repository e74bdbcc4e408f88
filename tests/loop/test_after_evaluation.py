"""What an evaluation leaves behind: `fully_shard` may keep whole parameters in the shards' place, until the next backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, whole
from tests.kit.units import SEVERAL, Regression, under_each

pytestmark = pytest.mark.standing_ranks


def _moments(unit: Regression) -> list[torch.Tensor]:
    local = [getattr(s["exp_avg"], "to_local", lambda s=s: s["exp_avg"])() for s in unit.optimizer.state.values()]
    return [t.detach().clone() for t in local]


def _saved_after_an_evaluation(layout: str, folder: str) -> tuple[int, float, float]:
    batches = [batch(4, 10 * dist.get_rank() + i) for i in range(3)]
    unit = Regression(layout=layout, optimizer="AdamW")
    saver = ech.DistributedCheckpointSaver(f"{folder}/{layout}")
    ech.fit(unit, batches, batches[:1], max_epochs=1, evaluate_every_n_updates=1, callbacks=[saver])
    again = Regression(layout=layout, optimizer="AdamW")
    ech.DistributedCheckpointSaver.restore_from_latest(f"{folder}/{layout}", again)
    pairs = list(zip(_moments(unit), _moments(again), strict=True))
    different = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
    return len(pairs), different, largest_difference(whole(unit.module), whole(again.module))


@pytest.mark.full
@pytest.mark.parametrize("layouts", SEVERAL)
def test_a_checkpoint_written_after_an_evaluation_holds_the_optimizer(ranks: Ranks, tmp_path: Path, layouts: list[str]) -> None:
    for rank in ranks(2, under_each, layouts, _saved_after_an_evaluation, str(tmp_path)):
        for layout, (moments, moment, parameter) in rank.items():
            assert moments > 0 and moment == 0.0 and parameter == 0.0, layout


def _both(layout: str) -> float:
    trained = []
    for evaluates in (True, False):
        batches = [batch(4, 10 * dist.get_rank() + i) for i in range(3)]
        unit = Regression(layout=layout)
        if evaluates:
            ech.evaluate(unit, batches[:1])
        ech.train(unit, batches, max_epochs=1)
        trained.append(whole(unit.module))
    return largest_difference(*trained)


@pytest.mark.full
@pytest.mark.parametrize("layouts", SEVERAL)
def test_an_optimizer_built_after_an_evaluation_trains_the_shards(ranks: Ranks, layouts: list[str]) -> None:
    for rank in ranks(2, under_each, layouts, _both):
        assert all(difference == 0.0 for difference in rank.values()), rank
