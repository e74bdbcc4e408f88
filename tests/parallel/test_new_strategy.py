"""What a layout of the future needs is in the seam: a pipeline is added as one file and one line."""

from typing import Any

import pytest
import torch

import echelon as ech
from echelon.parallel import LAYOUTS
from tests.conftest import Ranks
from tests.kit.models import Batch, batch, plain_training
from tests.kit.pipeline import TwoStages
from tests.kit.units import Regression

# Rows of each micro-batch, by update; the last update is short.
ROWS = [[4, 4], [3, 5], [4]]
NAMES = ({"first": "first", "block": "blocks.0"}, {"block": "blocks.1", "last": "last"})


class Steps(Regression):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []
        self.reported: list[tuple[int, int, bool]] = []

    def on_train_step_end(self, state: ech.State, data: Batch, step: int, results: ech.units.TrainStepResults) -> None:
        super().on_train_step_end(state, data, step, results)
        self.losses.append(float(results.loss))
        self.reported.append((step, len(data[0]), results.total_grad_norm is not None))


def batches() -> list[list[Batch]]:
    return [[batch(rows, 10 * w + m) for m, rows in enumerate(window)] for w, window in enumerate(ROWS)]


def _train() -> tuple[dict[str, torch.Tensor], Steps, float]:
    LAYOUTS["two_stages"] = TwoStages  # the one line
    unit = Steps(layout="two_stages", accumulate=2, clip_grad_norm=0.3)
    ech.train(unit, [micro for window in batches() for micro in window], max_epochs=1)
    names = NAMES[torch.distributed.get_rank()]
    values = {}
    for name, parameter in unit.prepared.named_parameters():
        first, _, rest = name.partition(".")
        values[f"{names[first]}.{rest}"] = parameter.detach().clone()
    return values, (unit.norms, unit.losses, unit.reported, unit.prepared.order), float(unit.latest_update[0])


def test_a_pipeline_trains_as_one_process_does(ranks: Ranks) -> None:
    want, want_losses, want_norms = plain_training(batches(), clip=0.3)
    (front, seen_front, loss_front), (back, seen_back, loss_back) = ranks(2, _train)
    got: dict[str, torch.Tensor] = {**front, **back}
    assert got.keys() == want.keys()
    assert max(float((got[name] - want[name]).abs().max()) for name in want) < 1e-12
    for norms, _, reported, order in (seen_front, seen_back):
        assert norms == pytest.approx(want_norms, rel=1e-11)
        assert reported == [(0, 4, False), (1, 4, True), (2, 3, False), (3, 5, True), (4, 4, True)]
        two = ["forward", "forward", "backward", "backward", "after the step"]
        assert order == [*two, *two, "forward", "backward", "after the step"]
    # Rank 0 has no losses of its own; what both know is the last stage's, over the whole global batch.
    assert loss_front == loss_back == pytest.approx(want_losses[-1], rel=1e-11)
    first, second = seen_back[1][:2]
    assert (first + second) / 2 == pytest.approx(want_losses[0], rel=1e-11)


def _evaluate() -> tuple[float, float]:
    LAYOUTS["two_stages"] = TwoStages
    unit = Regression(layout="two_stages")
    ech.evaluate(unit, [batch(4, 0), batch(3, 1)])
    ech.units.test(unit, [batch(4, 0), batch(3, 1)])
    return unit.eval_loss, unit.test_loss


def test_a_pipeline_evaluates_by_its_last_stage_alone(ranks: Ranks) -> None:
    alone = Regression()
    ech.evaluate(alone, [batch(4, 0), batch(3, 1)])
    for evaluated, tested in ranks(2, _evaluate):
        assert evaluated == tested == pytest.approx(alone.eval_loss, rel=1e-12)
