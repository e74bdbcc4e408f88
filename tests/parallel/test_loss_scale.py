"""A loss that is no mean over its micro-batch is told once; a right one never is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import echelon as ech
from tests.conftest import Ranks
from tests.kit.own_loops import own_loop, told
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_SUMS: dict[str, Loss] = {
    "cross_entropy": lambda m, x, y, t: F.cross_entropy(m(x), y, reduction="sum"),
    "by hand": lambda m, x, y, t: (m(x) - t).pow(2).sum(),
    "l1": lambda m, x, y, t: F.l1_loss(m(x), t, reduction="sum"),
    "log likelihood": lambda m, x, y, t: -m(x).log_softmax(-1).gather(1, y[:, None]).sum(),
    "policy": lambda m, x, y, t: -(m(x).log_softmax(-1).gather(1, y[:, None]) * t[:, :1].sign()).sum(),
    "mean over outputs": lambda m, x, y, t: (2 * (m(x) - t).pow(2).mean(1) + 1).sum(),
    "vae": lambda m, x, y, t: (
        F.binary_cross_entropy_with_logits(m(x), t.sigmoid(), reduction="sum") - 0.5 * torch.sum(1 - m(x).pow(2))
    ),
}
_OVER_ALL: dict[str, Loss] = {
    "cross_entropy": lambda m, x, y, t: F.cross_entropy(m(x), y, reduction="sum") / 4,
    "by hand": lambda m, x, y, t: (m(x) - t).pow(2).sum(1).sum() / 4,
    "two sums": lambda m, x, y, t: ((m(x) - t).abs().sum() + F.cross_entropy(m(x), y, reduction="sum")) / 4,
}
_DIVIDED: dict[str, Loss] = {
    "cross_entropy": lambda m, x, y, t: F.cross_entropy(m(x), y) / 4,
    "two terms": lambda m, x, y, t: (F.cross_entropy(m(x), y) + 0.1 * F.mse_loss(m(x), t)) / 4,
}
_MEANS: dict[str, Loss] = {
    "cross_entropy": lambda m, x, y, t: F.cross_entropy(m(x), y),
    "smoothed": lambda m, x, y, t: F.cross_entropy(m(x), y, label_smoothing=0.1),
    "probabilities": lambda m, x, y, t: F.cross_entropy(m(x), t.softmax(-1)),
    "kl": lambda m, x, y, t: F.kl_div(m(x).log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "sum over outputs": lambda m, x, y, t: (m(x) - t).pow(2).sum(1).mean(),
    "sum over samples": lambda m, x, y, t: F.cross_entropy(m(x), y, reduction="sum") / len(x),
    "over elements": lambda m, x, y, t: (m(x)[:, :2] - t[:, :2]).pow(2).sum() / 4,
    "over elements of the loss": lambda m, x, y, t: F.mse_loss(m(x)[:, :2], t[:, :2], reduction="sum") / 4,
    "by shares": lambda m, x, y, t: (F.cross_entropy(m(x), y, reduction="none") * t[:, 0].softmax(0)).sum(),
    "by shares of all ranks": lambda m, x, y, t: (F.cross_entropy(m(x), y, reduction="none") * (t[:, 0].softmax(0) * 1.2)).sum(),
    "times": lambda m, x, y, t: F.cross_entropy(m(x), y, reduction="sum") * (1 / len(x)),
    "masked": lambda m, x, y, t: (F.cross_entropy(m(x), y, reduction="none") * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
    "weight decay": lambda m, x, y, t: F.cross_entropy(m(x), y) + 1e-3 * sum(p.pow(2).sum() for p in m.parameters()),
    "decay first": lambda m, x, y, t: sum(p.abs().sum() for p in m.parameters()) * 1e-3 + F.mse_loss(m(x), t),
    "pulled to a point": lambda m, x, y, t: (
        sum(F.mse_loss(p, torch.zeros_like(p), reduction="sum") for p in m.parameters()) + F.cross_entropy(m(x), y)
    ),
    "four losses": lambda m, x, y, t: torch.stack([F.cross_entropy(m(x), y), *[F.mse_loss(m(x), t)] * 3]).sum() / 4,
    "their mean": lambda m, x, y, t: (F.cross_entropy(m(x), y) + 3 * F.mse_loss(m(x), t) + m(x).pow(2).mean() + m(x).mean()) / 4,
    "a list's sum": lambda m, x, y, t: torch.stack([F.mse_loss(row, of) for row, of in zip(m(x), t, strict=True)]).sum() / len(x),
    "of each sample": lambda m, x, y, t: torch.stack([F.mse_loss(row, of) for row, of in zip(m(x), t, strict=True)]).mean(),
    "of tasks": lambda m, x, y, t: ((m(x)[:, :2] - t[:, :2]).pow(2).mean(0) * torch.tensor([3.0, 2.0]) - 1).sum(),
    "of a stack of tasks": lambda m, x, y, t: (3 * torch.stack([F.mse_loss(m(x), t), F.l1_loss(m(x), t)]) + 1).sum(),
    "policy": lambda m, x, y, t: -(torch.distributions.Categorical(logits=m(x)).log_prob(y) * t[:, 0]).mean(),
    "tempered": lambda m, x, y, t: F.cross_entropy(m(x) / 4, y) * 4,
    "of parameters": lambda m, x, y, t: sum(p.pow(2).sum() for p in m.parameters()) + 0 * m(x).mean(),
}
# Whole parameters are not there to be read where they are split.
_OF_PARAMETERS = ("weight decay", "decay first", "pulled to a point", "of parameters")
_LOSSES = {
    "sum": _SUMS,
    "divided": _DIVIDED,
    "over all": _OVER_ALL,
    "mean": _MEANS,
    "of outputs": {name: loss for name, loss in _MEANS.items() if name not in _OF_PARAMETERS},
}


def _count(texts: list[str]) -> tuple[int, int]:
    return sum("a sum over" in t for t in texts), sum("divided by the" in t for t in texts)


def _rows(n: int) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(n, 5), torch.randint(0, 4, (n,)), torch.randn(n, 4))


def _told(kind: str, layout: str, accumulation: int, sampler: bool = False, each: int = 4) -> dict[str, tuple[int, int]]:
    """Warnings of a run with each loss of this kind: (of a sum, of a division)."""
    found = {}
    for name, loss in _LOSSES[kind].items():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        rows = _rows(16 * accumulation)
        loader = DataLoader(rows, each, sampler=DistributedSampler(rows) if sampler else None)
        with told() as texts:
            own_loop(module, loader, loss, lr=1e-3, layout=layout, gradient_accumulation_steps=accumulation)
        found[name] = _count(texts)
    return found


# What `_told` is given, and how often rank 0, which speaks, tells of a sum and of a division.
RUNS: list[tuple[int, tuple[Any, ...], tuple[int, int]]] = [
    *((2, ("sum", layout, 1), (1, 0)) for layout in ("ddp", "fsdp")),
    (2, ("over all", "ddp", 1), (1, 1)),
    # A sum that trains as before: one batch in one process, each rank's own batch as under DDP, and of one sample.
    *((1, (kind, "none", 1), (0, 0)) for kind in ("sum", "over all")),
    (2, ("sum", "ddp", 1, True), (0, 0)),
    (2, ("sum", "ddp", 1, False, 2), (0, 0)),
    (2, ("divided", "ddp", 4), (0, 1)),
    (1, ("divided", "none", 4), (0, 1)),
    (2, ("divided", "ddp", 2), (0, 0)),  # by another number
    *((2, ("mean", "ddp", accumulation), (0, 0)) for accumulation in (1, 4)),
    (2, ("of outputs", "fsdp", 1), (0, 0)),
]


@pytest.mark.full
@pytest.mark.parametrize(("size", "run", "tells"), RUNS)
def test_a_loss_that_is_no_mean_is_told_once_and_a_right_one_never(
    ranks: Ranks, size: int, run: tuple[Any, ...], tells: tuple[int, int]
) -> None:
    first, *others = ranks(size, _told, *run)
    assert first == dict.fromkeys(_LOSSES[run[0]], tells)
    assert others == [dict.fromkeys(_LOSSES[run[0]], (0, 0))] * (size - 1)


def _unit_told(name: str) -> tuple[int, int]:
    loss = {**_SUMS, **_MEANS}[name]
    unit = Regression(module=nn.Linear(5, 4), lr=1e-3, layout="ddp", loss=lambda module, data: loss(module, *data))
    with told() as texts:
        ech.train(unit, ech.Loader(_rows(16), 8), max_epochs=1)
    return _count(texts)


class _Weighed(Regression):
    def weight(self, data: Any) -> torch.Tensor:
        return torch.full((len(data[0]),), 2.0).sum()


def _told_of_weights() -> tuple[int, int]:
    def loss(module: nn.Module, data: Any) -> torch.Tensor:
        x, _, t = data
        return (2 * (module(x) - t).pow(2).mean(1)).sum() / torch.full((len(x),), 2.0).sum()

    with told() as texts:
        ech.train(_Weighed(module=nn.Linear(5, 4), lr=1e-3, layout="ddp", loss=loss), ech.Loader(_rows(16), 8), max_epochs=1)
    return _count(texts)


def test_a_mean_by_weights_that_add_up_to_the_global_batch_is_not_told(ranks: Ranks) -> None:
    assert ranks(2, _told_of_weights) == [(0, 0), (0, 0)]


def test_a_units_summed_loss_is_told(ranks: Ranks) -> None:
    assert ranks(2, _unit_told, "cross_entropy") == [(0, 0), (0, 0)]
    assert ranks(2, _unit_told, "by hand") == [(1, 0), (0, 0)]


_OF_CLASSES = torch.tensor([1.0, 5.0, 0.2, 3.0])


def _of_two(module: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.stack([module(x)] * 2, 2), labels)


_LABELS: dict[str, tuple[Loss, bool]] = {
    "of classes": (lambda m, x, y, t: F.cross_entropy(m(x), y, weight=_OF_CLASSES), True),
    "smoothed": (lambda m, x, y, t: F.cross_entropy(m(x), y, weight=_OF_CLASSES, label_smoothing=0.1), True),
    "with another": (lambda m, x, y, t: 0.5 * F.nll_loss(m(x).log_softmax(1), y, _OF_CLASSES) + F.mse_loss(m(x), t) / 3, True),
    "ignored": (lambda m, x, y, t: F.cross_entropy(m(x), y, ignore_index=1), True),
    "ignored, of several": (lambda m, x, y, t: _of_two(m, x, torch.stack([y, y.masked_fill(y == 1, -100)], 1)), True),
    "equal weights": (lambda m, x, y, t: F.cross_entropy(m(x), y, weight=torch.full((4,), 3.0)), False),
    "the last of each": (lambda m, x, y, t: _of_two(m, x, torch.stack([y, torch.full_like(y, -100)], 1)), False),
    "time first": (lambda m, x, y, t: F.cross_entropy(torch.cat([m(x)] * 2), torch.cat([y, torch.full_like(y, -100)])), False),
    "none is ignored": (lambda m, x, y, t: F.cross_entropy(m(x), y, ignore_index=9), False),
    "a sum by its weights": (lambda m, x, y, t: F.cross_entropy(m(x), y, weight=_OF_CLASSES, reduction="sum") / len(x), False),
    "elements": (lambda m, x, y, t: F.binary_cross_entropy_with_logits(m(x), t.sigmoid(), pos_weight=_OF_CLASSES), False),
}


def _told_of_labels(weight: bool) -> dict[str, int]:
    found = {}
    for name, (loss, _) in _LABELS.items():
        torch.manual_seed(0)
        module = nn.Linear(5, 4)
        model, optimizer, loader = ech.prepare(module, torch.optim.SGD(module.parameters(), 1e-3), DataLoader(_rows(24), 8))
        with told() as texts:
            for x, y, t in loader:
                with ech.window(model, weight=_OF_CLASSES[y].sum() if weight else None) as window:
                    window.backward(loss(model, x, y, t))
                    optimizer.step()
                    optimizer.zero_grad()
        found[name] = sum("mean over labels" in text for text in texts)
    return found


@pytest.mark.full
def test_a_mean_over_labels_that_weighs_as_its_samples_is_told_once(ranks: Ranks) -> None:
    """A mean by weights of classes, or over labels of which some are ignored, was averaged over ranks as one over samples."""
    first, second = ranks(2, _told_of_labels, False)
    assert first == {name: int(tells) for name, (_, tells) in _LABELS.items()}
    assert not any(second.values())
    assert not any(ranks(2, _told_of_labels, True)[0].values())
    assert not any(ranks(1, _told_of_labels, False)[0].values())  # one batch is one mean


class _EndToEnd(Dataset[Any]):
    """Sequences of 1 to 4 rows, and the number of each."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        rows = torch.full((1 + i % 4, 5), i / 24)
        return rows, rows.mean(1, keepdim=True), torch.tensor(i)


def _laid_out(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, t, i = zip(*samples, strict=True)
    return torch.cat(x), torch.cat(t), torch.stack(i)


def _of_samples(rows: torch.Tensor, samples: int) -> torch.Tensor:
    """As where nodes are added up to graphs."""
    added = torch.zeros(samples, 1).index_add(0, torch.arange(len(rows)) % samples, rows)
    return F.mse_loss(added, torch.zeros(samples, 1))


def _told_of_rows(kind: str) -> int:
    torch.manual_seed(0)
    module = nn.Linear(5, 1)
    loader: Any = DataLoader(_EndToEnd(), 8, collate_fn=_laid_out)
    model, optimizer, loader = ech.prepare(module, torch.optim.SGD(module.parameters(), 1e-3), loader)
    with told() as texts:
        for x, t, i in loader:
            with ech.window(model, weight=len(x) if kind == "weighed" else None) as window:
                loss = _of_samples(model(x), len(i)) if kind == "of samples" else F.smooth_l1_loss(model(x), t)
                window.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return sum("which differ in rows" in text for text in texts)


def test_a_mean_over_the_rows_of_all_samples_that_weighs_as_they_are_is_told_once(ranks: Ranks) -> None:
    """Ranks with long sequences and ranks with short ones weighed the same, and nothing was said."""
    assert ranks(2, _told_of_rows, "plain") == [1, 0]
    assert ranks(2, _told_of_rows, "weighed") == ranks(2, _told_of_rows, "of samples") == [0, 0]
