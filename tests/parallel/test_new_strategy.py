"""What a layout of the future needs is in the seam: it is added as one file and one line."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.parallel import LAYOUTS
from tests.conftest import Ranks
from tests.kit.averaged import Averaged
from tests.kit.models import batch, largest_difference, plain_training, whole
from tests.kit.units import Regression

ROWS = [(4, 3), (2, 4), (3, 5), (5, 3), (4, 1)]  # of each micro-batch, by rank; the last of three updates is short


def _trained() -> tuple[dict[str, torch.Tensor], list[float], float]:
    LAYOUTS["averaged"] = Averaged  # the one line
    unit, rank = Regression(layout="averaged", accumulate=2, clip_grad_norm=0.3), dist.get_rank()
    ech.train(unit, [batch(rows[rank], 10 * i + rank) for i, rows in enumerate(ROWS)], max_epochs=1)
    norms = list(unit.norms)
    ech.evaluate(unit, [batch(4 - rank, 100 + rank)])
    return whole(unit.module), norms, unit.eval_loss


def test_a_layout_of_ones_own_trains_and_evaluates_as_one_process_does(ranks: Ranks) -> None:
    made = [[batch(rows, 10 * i + rank) for rank, rows in enumerate(both)] for i, both in enumerate(ROWS)]
    windows = [[each for micro in made[start : start + 2] for each in micro] for start in (0, 2, 4)]
    want, _, norms = plain_training(windows, clip=0.3)
    alone = Regression()
    alone.module.load_state_dict(want)
    ech.evaluate(alone, [batch(4, 100), batch(3, 101)])
    for got, seen, evaluated in ranks(2, _trained):
        assert largest_difference(got, want) < 1e-12 and seen == pytest.approx(norms, rel=1e-11)
        assert evaluated == pytest.approx(alone.eval_loss, rel=1e-11)
