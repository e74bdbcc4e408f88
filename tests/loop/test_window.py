"""Rule of truth 2: the gradient of an update is the mean over the samples of its global batch. For every layout.

The reference is plain PyTorch with SGD and momentum in float64, and gradient norms are compared as well: Adam and clipping
hide a wrong scale.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.loop.window import Window
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, plain_training, whole
from tests.kit.units import KINDS, Regression
from tests.kit.windows import SHAPES, windows_of

pytestmark = pytest.mark.standing_ranks


def _train(layout: str, shape: list[list[list[int]]], **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    world = ech.launching.World.current()
    windows = windows_of(shape, world.size)
    mine = [micro[world.rank] for window in windows for micro in window]
    unit = Regression(layout=layout, accumulate=2, **options)
    ech.train(unit, mine, max_epochs=1)
    return whole(unit.module), unit.norms


def _reference(shape: list[list[list[int]]], ranks: int, **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    windows = windows_of(shape, ranks)
    parameters, _, norms = plain_training([[b for micro in window for b in micro] for window in windows], **options)
    return parameters, norms


def _train_shapes(layout: str) -> dict[str, tuple[dict[str, torch.Tensor], list[float]]]:
    return {name: _train(layout, shape, clip_grad_norm=float("inf")) for name, shape in SHAPES.items()}


@pytest.mark.full
@pytest.mark.parametrize("layout", KINDS)
def test_two_ranks_equal_one_process(ranks: Ranks, layout: str) -> None:
    for trained in ranks(2, _train_shapes, layout):
        for name, shape in SHAPES.items():
            ours, norms = trained[name]
            want, want_norms = _reference(shape, 2)
            assert norms == pytest.approx(want_norms, rel=1e-12), name
            assert largest_difference(ours, want) < 1e-12, name


def test_four_ranks_equal_one_process(ranks: Ranks) -> None:
    """Under ddp; the others are test_equivalence.py's."""
    shape = SHAPES["all at once"]
    for ours, norms in ranks(4, _train, "ddp", shape, clip_grad_norm=float("inf")):
        want, want_norms = _reference(shape, 4)
        assert norms == pytest.approx(want_norms, rel=1e-12)
        assert largest_difference(ours, want) < 1e-12


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_one_process_equals_plain_pytorch(shape: list[list[list[int]]]) -> None:
    ours, norms = _train("none", shape, clip_grad_norm=float("inf"))
    want, want_norms = _reference(shape, 1)
    assert norms == pytest.approx(want_norms, rel=1e-12)
    assert largest_difference(ours, want) < 1e-12


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


class _Tokens(Regression):
    """Weighs by the number of targets that count, on the device, as a language model with padding does."""

    def weight(self, data: Any) -> torch.Tensor:
        return (data[1] > 0).sum()

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = data
        out = self.module(x)
        counts = y > 0
        return ((out - y).square() * counts).sum() / counts.sum(), out


def _train_tokens(layout: str, shape: list[list[list[int]]]) -> dict[str, torch.Tensor]:
    world = ech.launching.World.current()
    windows = windows_of(shape, world.size)
    unit = _Tokens(layout=layout, accumulate=2)
    ech.train(unit, [micro[world.rank] for window in windows for micro in window], max_epochs=1)
    return whole(unit.module)


@pytest.mark.parametrize("layout", KINDS)
def test_a_unit_can_weigh_by_tokens(ranks: Ranks, layout: str) -> None:
    from tests.kit.models import net

    shape = [[[6, 5], [7, 9]], [[8, 4]]]
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for window in windows_of(shape, 2):
        x, y = (torch.cat(parts) for parts in zip(*[b for micro in window for b in micro], strict=True))
        counts = y > 0
        ((((module(x) - y).square() * counts).sum()) / counts.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = {n: p.detach() for n, p in module.named_parameters()}
    for ours in ranks(2, _train_tokens, layout, shape):
        assert largest_difference(ours, want) < 1e-12


def _weightless(layout: str) -> str:
    unit = Regression(layout=layout)
    unit.weight = lambda data: 0  # type: ignore[method-assign]
    with pytest.raises(ech.EchelonError) as caught:
        ech.train(unit, [batch(2, 0)], max_epochs=1)
    return str(caught.value)


def test_a_global_batch_without_weight_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    assert all("must be above 0, got 0 in update" in text for text in ranks(2, _weightless, "ddp"))


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


class Masked(Regression):
    """A mean over chosen rows, which is 0/0, with an infinite derivative, where there are none."""

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, chosen = data
        errors = (self.module(x) - y).square().mean(1)
        loss = (errors * chosen).sum() / chosen.sum()
        return loss, errors

    def weight(self, data: Any) -> float | torch.Tensor:
        return data[2].sum() if self.as_tensor else float(data[2].sum())

    as_tensor = True


class MaskedByNumbers(Masked):
    as_tensor = False


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


def test_a_devices_loss_is_summed_up_after_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it, the gathers of the backward pass would queue behind it in the communicator that they share."""
    sent: list[str] = []

    class Work:
        def wait(self) -> None:
            sent.append("awaited")

    def all_reduce(tensor: torch.Tensor, **options: Any) -> Work:
        sent.append(tensor.device.type)
        return Work()

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    window = Window(1)
    window.open(False)
    window.add(torch.zeros((), device="meta"), 4.0)
    window.start_reduction(False)
    sent.append("backward pass")
    window.close()
    assert sent == ["cpu", "backward pass", "meta", "awaited", "awaited"]


def _sums(stops: int) -> tuple[Any, ...]:
    """A window's sums, and how many numbers were sent for them."""
    sent, real, rank = list[int](), dist.all_reduce, dist.get_rank()
    window = Window(1)
    window.open(False)
    window.add(torch.tensor(1.5 + rank), 2.0 + 2 * rank)
    with mock.patch("torch.distributed.all_reduce", lambda value, **how: (sent.append(value.numel()), real(value, **how))[1]):
        window.start_reduction(rank == stops)
        return (*window.close(), sent)


@pytest.mark.parametrize(("stops", "sent"), [(-1, [2]), (0, [2, 9]), (1, [2, 9])])
def test_a_wish_to_stop_reaches_all_ranks_with_the_sums(ranks: Ranks, stops: int, sent: list[int]) -> None:
    """It costs a message where there is one, and no room in the others."""
    mean = (1.5 * 2 + 2.5 * 4) / 6
    assert ranks(2, _sums, stops) == [(6.0, pytest.approx(mean), stops >= 0, sent)] * 2
