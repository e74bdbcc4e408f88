"""Rule of truth 2: the gradient of an update is the mean over the samples of its global batch. For every layout.

The reference is plain PyTorch with SGD and momentum in float64, and gradient norms are compared as well: Adam and clipping
hide a wrong scale.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, plain_training, whole
from tests.kit.units import KINDS, Masked, Regression
from tests.kit.windows import SHAPES, windows_of

pytestmark = pytest.mark.standing_ranks


Trained = tuple[dict[str, torch.Tensor], list[float]]


def _train(layout: str, shape: list[list[list[int]]], kind: type[Regression] = Regression, **options: Any) -> Trained:
    world = ech.launching.World.current()
    mine = [micro[world.rank] for window in windows_of(shape, world.size) for micro in window]
    unit = kind(layout=layout, accumulate=2, **options)
    ech.train(unit, mine, max_epochs=1)
    return whole(unit.module), unit.norms


def _train_shapes(layout: str, names: list[str]) -> dict[str, Trained]:
    return {name: _train(layout, SHAPES[name], clip_grad_norm=float("inf")) for name in names}


def _reference(shape: list[list[list[int]]], ranks: int, **options: Any) -> Trained:
    windows = windows_of(shape, ranks)
    parameters, _, norms = plain_training([[b for micro in window for b in micro] for window in windows], **options)
    return parameters, norms


@pytest.mark.full(but=("none", "ddp on 4"))
@pytest.mark.parametrize(
    ("layout", "size"),
    [pytest.param("none", 1, id="none"), *((layout, 2) for layout in KINDS), pytest.param("ddp", 4, id="ddp on 4")],
)
def test_ranks_equal_one_process_and_plain_pytorch(ranks: Ranks, layout: str, size: int) -> None:
    """On four ranks under ddp; the others are test_equivalence.py's."""
    names = list(SHAPES) if size < 4 else ["all at once"]
    for trained in ranks(size, _train_shapes, layout, names) if size > 1 else [_train_shapes(layout, names)]:
        for name, (ours, norms) in trained.items():
            want, want_norms = _reference(SHAPES[name], size)
            assert norms == pytest.approx(want_norms, rel=1e-12), name
            assert largest_difference(ours, want) < 1e-12, name


CLIPS = [{"clip_grad_norm": 0.3}, {"clip_grad_value": 0.02}, {"clip_grad_norm": 0.5, "clip_grad_value": 0.05}]


def _train_clipped(layout: str) -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    return [_train(layout, SHAPES["all at once"], **options) for options in CLIPS]


@pytest.mark.parametrize("layout", KINDS)
def test_clipping_is_global(ranks: Ranks, layout: str) -> None:
    for trained in ranks(2, _train_clipped, layout):
        for options, (ours, norms) in zip(CLIPS, trained, strict=True):
            clip, clip_value = options.get("clip_grad_norm"), options.get("clip_grad_value")
            want, want_norms = _reference(SHAPES["all at once"], 2, clip=clip, clip_value=clip_value)
            if clip is not None:
                assert norms == pytest.approx(want_norms, rel=1e-12)
            assert largest_difference(ours, want) < 1e-9  # torch divides by norm + 1e-6


def _losses(layout: str, rows: list[int]) -> tuple[float, float]:
    world = ech.launching.World.current()
    unit = Regression(layout=layout)
    # Ranks evaluate other numbers of batches of other sizes; fsdp's ranks take equally many.
    mine = [batch(n, 10 * world.rank + i) for i, n in enumerate(rows if world.rank == 0 or layout == "fsdp" else rows[:1])]
    ech.evaluate(unit, mine)
    total = sum(float(((unit.module(x) - y) ** 2).sum().detach()) for x, y in mine)
    return unit.eval_loss, total


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_the_evaluation_loss_is_the_mean_over_all_samples(ranks: Ranks, layout: str) -> None:
    rows = [5, 3, 1]
    (loss_0, total_0), (loss_1, total_1) = ranks(2, _losses, layout, rows)
    samples = sum(rows) + (sum(rows) if layout == "fsdp" else rows[0])
    assert loss_0 == loss_1 == pytest.approx((total_0 + total_1) / samples, rel=1e-12)


class MaskedByNumbers(Masked):
    def weight(self, data: Any) -> float | torch.Tensor:
        return float(super().weight(data))


def _masked(layout: str | None, kind: type[Masked], chosen: list[list[float]]) -> Any:
    rank = ech.launching.World.current().rank
    unit = kind(layout=layout, gradient_accumulation_steps=2, clip_grad_norm=float("inf"), detect_anomaly=True)
    data = [(*batch(4, 10 * i + rank), torch.tensor(row, dtype=torch.float64).roll(rank)) for i, row in enumerate(chosen)]
    ech.fit(unit, data, data, max_epochs=1)
    return whole(unit.module), unit.norms, float(unit.latest_update[0]), unit.eval_loss


def _masked_under(layouts: list[str]) -> list[Any]:
    chosen = [[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    return [_masked(layout, kind, chosen) for layout in layouts for kind in (Masked, MaskedByNumbers)]  # type: ignore[arg-type]


@pytest.mark.full
def test_a_micro_batch_that_weighs_nothing_poisons_nothing(ranks: Ranks) -> None:
    """Its loss is nan: neither gradients, nor losses, nor the mean of an evaluation."""
    rows = {0: [0, 2], 3: [0, 1, 2]}
    windows = []
    for i, chosen in rows.items():
        pairs = [(batch(4, 10 * i + r), [(c + r) % 4 for c in chosen]) for r in range(2)]
        windows.append([(x[index], y[index]) for (x, y), index in pairs])
    want, losses, norms = plain_training(windows)
    for found in ranks(2, _masked_under, ["ddp", "fsdp", "zero2"]):
        for ours, our_norms, loss, eval_loss in found:
            assert largest_difference(ours, want) < 1e-12
            assert our_norms == pytest.approx(norms, rel=1e-12) and loss == pytest.approx(losses[-1], rel=1e-12)
            assert eval_loss == eval_loss
