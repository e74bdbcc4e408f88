"""What a batch weighs by default: its samples, whatever form it has."""

from __future__ import annotations

import logging
from collections import UserDict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

import echelon as ech
from echelon.loop.samples import samples_of
from tests.conftest import Ranks
from tests.kit.models import largest_difference, net, whole
from tests.kit.own_loops import step
from tests.kit.units import Regression

Pair = tuple[torch.Tensor, torch.Tensor]
SAMPLES, BATCH, EPOCHS = 11, 8, 2


class Boxes(Dataset[Pair]):
    """Samples of several rows each, of various numbers, with one target: (k, 4), (1,)."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = [3, 1, 4, 2, 6, 5, 1, 2, 7, 3, 5][:samples]
        self.x = [torch.randn(k, 4, generator=generator, dtype=torch.float64) for k in sizes]
        self.y = torch.randn(samples, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> Pair:
        return self.x[at], self.y[at]


Named = namedtuple("Named", ["boxes", "target"])


@dataclass(slots=True)
class Slotted:
    boxes: list[torch.Tensor]
    target: torch.Tensor


@attrs.define
class Attrs:
    boxes: list[torch.Tensor]
    target: torch.Tensor


class Graphs:
    """All rows of all samples together, and to which sample each belongs."""

    def __init__(self, samples: list[Pair]) -> None:
        self.x = torch.cat([x for x, _ in samples])
        self.edges = torch.zeros(2, 13, dtype=torch.long)
        self.owner = torch.cat([torch.full((len(x),), i) for i, (x, _) in enumerate(samples)])
        self.target = torch.stack([y for _, y in samples])


def xs(samples: list[Pair]) -> list[torch.Tensor]:
    return [x for x, _ in samples]


def means(samples: list[Pair]) -> torch.Tensor:
    return torch.stack([x.mean(0) for x in xs(samples)])


def ys(samples: list[Pair]) -> torch.Tensor:
    return torch.stack([y for _, y in samples])


# What collates samples, and what reads (mean of the rows, target) from the batch.
KINDS: dict[str, tuple[Callable[[list[Pair]], Any], Callable[[Any], Pair]]] = {
    "samples as they are": (list, lambda b: (means(b), ys(b))),
    "tensors of each sample": (lambda s: (xs(s), ys(s)), lambda b: (torch.stack([x.mean(0) for x in b[0]]), b[1])),
    "tensors of each sample first in a dict": (
        lambda s: {"boxes": xs(s), "targets": [{"y": y} for _, y in s]},
        lambda b: (torch.stack([x.mean(0) for x in b["boxes"]]), torch.stack([t["y"] for t in b["targets"]])),
    ),
    "images": (  # whose three colours are alike, and of which the last row is the target
        lambda s: [torch.cat([x, y.expand(1, 4)]).expand(3, -1, -1) for x, y in s],
        lambda b: (torch.stack([x[0, :-1].mean(0) for x in b]), torch.stack([x[0, -1, :1] for x in b])),
    ),
    "names first": (
        lambda s: {"name": [f"file{i}.png" for i in range(len(s))], "x": means(s), "y": ys(s)},
        lambda b: (b["x"], b["y"]),
    ),
    "time first": (lambda s: (means(s)[None].repeat(5, 1, 1), ys(s)[None].repeat(5, 1, 1)), lambda b: (b[0][0], b[1][0])),
    "time first, targets not": (lambda s: {"x": means(s)[None].repeat(5, 1, 1), "y": ys(s)}, lambda b: (b["x"][0], b["y"])),
    "packed": (
        lambda s: (pack_sequence(xs(s), enforce_sorted=False), ys(s)),
        lambda b: (_unpacked(b[0]), b[1]),
    ),
    "arrays": (
        lambda s: {"x": means(s).numpy(), "y": ys(s).numpy()},
        lambda b: (torch.from_numpy(b["x"]), torch.from_numpy(b["y"])),
    ),
    "numbers": (
        lambda s: {"y": [float(y) for _, y in s], "x": means(s).tolist()},
        lambda b: (torch.tensor(b["x"], dtype=torch.float64), torch.tensor(b["y"], dtype=torch.float64)[:, None]),
    ),
    "slots": (lambda s: Slotted(xs(s), ys(s)), lambda b: (torch.stack([x.mean(0) for x in b.boxes]), b.target)),
    "attrs": (lambda s: Attrs(xs(s), ys(s)), lambda b: (torch.stack([x.mean(0) for x in b.boxes]), b.target)),
    "a named tuple": (lambda s: Named(xs(s), ys(s)), lambda b: (torch.stack([x.mean(0) for x in b.boxes]), b.target)),
    "weights of classes first": (
        lambda s: {"class_weights": torch.ones(3), "x": means(s), "y": ys(s)},
        lambda b: (b["x"], b["y"]),
    ),
    "another mapping": (lambda s: UserDict(text=["a"] * len(s), x=means(s), y=ys(s)), lambda b: (b["x"], b["y"])),
    "graphs": (Graphs, lambda b: (torch.stack([b.x[b.owner == i].mean(0) for i in range(len(b.target))]), b.target)),
    "nested": (
        lambda s: {"boxes": torch.nested.nested_tensor(xs(s), layout=torch.jagged), "y": ys(s)},
        lambda b: (torch.stack([x.mean(0) for x in b["boxes"].unbind()]), b["y"]),
    ),
    "a deque": (lambda s: deque(s), lambda b: (means(list(b)), ys(list(b)))),
    "two views": (lambda s: ((means(s), means(s)), ys(s)), lambda b: (b[0][0], b[1])),
}


def _unpacked(packed: PackedSequence) -> torch.Tensor:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    return torch.stack([row[:n].mean(0) for row, n in zip(padded, lengths, strict=True)])


class Unit(Regression):
    def __init__(self, read: Callable[[Any], Pair], **options: Any) -> None:
        super().__init__(**options)
        self.read = read

    def move_data_to_device(self, state: ech.State, data: Any, non_blocking: bool = False) -> Any:
        return data

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().compute_loss(state, self.read(data))


def _plain(parts: list[Pair], epochs: int = EPOCHS) -> nn.Module:
    """Plain PyTorch on these batches."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for x, y in parts * epochs:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    return module.requires_grad_(False)


def _of(samples: list[Pair]) -> Pair:
    return means(samples), ys(samples)


def _parts(size: int) -> list[list[Pair]]:
    data = Boxes()
    return [[data[i] for i in range(at, min(at + size, SAMPLES))] for at in range(0, SAMPLES, size)]


def _trained(how: str, layout: str | None, accumulation: int) -> dict[str, tuple[Any, float | None]]:
    found: dict[str, tuple[Any, float | None]] = {}
    for name, (collate, read) in KINDS.items():
        loader: Any = ech.Loader(Boxes(), BATCH, shuffle=False, accumulate=accumulation, collate_fn=collate)
        if how == "own loop":
            module = net()
            optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            model, optimizer, loader = ech.prepare(module, optimizer, loader, layout=layout)
            for _ in ech.epochs(loader, EPOCHS):
                for data in loader:
                    step(model, optimizer, *read(data))
            found[name] = whole(model), None
            continue
        if how == "torch's loader":
            loader = DataLoader(Boxes(), BATCH // accumulation, collate_fn=collate)
        unit = Unit(read, layout=layout, accumulate=accumulation)
        ech.fit(unit, loader, ech.Loader(Boxes(), BATCH, shuffle=False, collate_fn=collate), max_epochs=EPOCHS)
        found[name] = whole(unit.module), unit.eval_loss
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "layout", "accumulation"),
    [("unit", "ddp", 1), ("unit", "fsdp", 2), ("torch's loader", None, 2), ("own loop", "ddp", 1)],
)
def test_the_mean_is_over_samples_in_whatever_form_they_come(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, how: str, layout: str | None, accumulation: int
) -> None:
    """A short last batch, whose parts differ in size, with rows of various numbers."""
    module = _plain([_of(part) for part in _parts(BATCH)])
    x, y = _of(_parts(SAMPLES)[0])
    want, loss = dict(module.named_parameters()), float(nn.functional.mse_loss(module(x), y).detach())
    alone = how == "torch's loader"
    for found in [_trained(how, layout, accumulation)] if alone else ranks(2, _trained, how, layout, accumulation):
        for name, (ours, eval_loss) in found.items():
            assert largest_difference(ours, want) < 1e-12 and eval_loss in (None, pytest.approx(loss, rel=1e-12)), name
    assert "samples" not in caplog.text


# --- filtered batches


def _filtered(samples: list[Pair]) -> Pair | None:
    kept = [(x, y) for x, y in samples if len(x) > 1]
    return _of(kept) if kept else None


def _read_filtered(batch: Pair | None) -> Pair:
    return batch if batch is not None else (torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))


def _train_filtered(size: int) -> dict[str, torch.Tensor]:
    unit = Unit(_read_filtered, layout="ddp")
    ech.train(unit, ech.Loader(Boxes(), size, shuffle=False, collate_fn=_filtered), max_epochs=1)
    return whole(unit.module)


@pytest.mark.full
@pytest.mark.parametrize("size", [8, 2])
def test_samples_that_a_collate_function_leaves_out_count_for_nothing(ranks: Ranks, size: int) -> None:
    """With a global batch of two, whole shares of a rank are left out: `None` weighs nothing."""
    want = dict(_plain([part for each in _parts(size) if (part := _filtered(each)) is not None], epochs=1).named_parameters())
    for ours in ranks(2, _train_filtered, size):
        assert largest_difference(ours, want) < 1e-12


class Asking(Regression):
    """Asks in its pass what the batch weighs and how many steps there were, as a loss with a weight of its own does."""

    def compute_loss(self, state: ech.State, data: Pair) -> tuple[torch.Tensor, Any]:
        progress = self.train_progress
        asked.append((len(data[0]), self.weight(data), progress.num_steps_completed, progress.num_steps_completed_in_epoch))
        return super().compute_loss(state, data)


asked: list[tuple[Any, ...]] = []


def _ask_in_stages() -> list[tuple[Any, ...]]:
    asked.clear()
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)))
    x = torch.randn(13, 4, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, x)
    ech.train(Asking(module=module, layout=ech.Layout(pp=2, stages=["1"])), ech.Loader(data, 8, accumulate=2), max_epochs=2)
    return asked


def test_a_pass_of_a_stage_is_that_of_its_own_step(ranks: Ranks) -> None:
    """It comes when the update's last micro-batch is there, and took that one's samples and step for its own."""
    epoch = [(4, 4, 0), (4, 4, 1), (3, 3, 2), (2, 2, 3)]
    for seen in ranks(2, _ask_in_stages):
        assert set(seen) == {(*each[:2], start + each[2], each[2]) for start in (0, 4) for each in epoch}, seen


# --- what a batch tells where no loader does


def test_what_batches_tell_by_themselves() -> None:
    x, y = torch.zeros(8, 3), torch.zeros(8)
    clear: list[tuple[Any, int | None, int]] = [
        (x, None, 8),
        ([x, y], None, 8),
        ({"text": ["a"] * 8, "x": x}, None, 8),
        ([[x, x, x], y], None, 8),
        ({"images": [torch.zeros(3, 5, 5), torch.zeros(3, 4, 4)], "targets": [{}, {}]}, None, 2),
        ([torch.zeros(3), torch.zeros(5), torch.zeros(4), torch.zeros(6)], None, 4),
        ([{"x": torch.zeros(3)}, {"x": torch.zeros(5)}], None, 2),
        (np.zeros((6, 2)), None, 6),
        ([0.5, 1.5, 2.5], None, 3),
        (pack_sequence([torch.zeros(3), torch.zeros(2)]), None, 2),
        ({}, None, 0),
        ([], 4, 0),
        (None, 4, 0),
        (None, None, 1),
        ("text", None, 1),
        (3, None, 1),
        ({"x": x[:5], "y": y[:5]}, 8, 5),
        ({"tokens": torch.zeros(1, 40), "labels": torch.zeros(1, 40)}, 4, 1),
        ([torch.zeros(3, 5, 5)] * 4, 4, 4),
        (torch.zeros(20, 4, 6), 4, 4),
        ((torch.zeros(16, 3), torch.zeros(16)), 8, 16),
        # Fields that look like samples of each other: the loader's number decides where a dimension has it, else what they share.
        ((torch.zeros(9, 6), torch.zeros(7, 6)), 6, 6),
        ([torch.zeros(9, 6), torch.zeros(7, 6)], 6, 6),
        ((torch.zeros(6, 2), torch.zeros(18, 2)), 6, 6),
        ([torch.zeros(6, 2), torch.zeros(18, 2)], 6, 6),
        ([torch.zeros(1, 7), torch.zeros(1, 5)], 2, 1),
        ([torch.zeros(2, 7), torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)], 3, 2),
        ((torch.zeros(4, 7), torch.zeros(4, 5)), 2, 4),
        # Samples of other lengths, and of the same.
        ([torch.zeros(5, 3), torch.zeros(4, 3)], 2, 2),
        ([torch.zeros(5, 3), torch.zeros(5, 3)], 2, 2),
        ((torch.zeros(3, 5, 5), torch.zeros(3, 4, 4)), 2, 2),
        (([torch.zeros(3, 5, 5), torch.zeros(3, 4, 4)], [{}, {}]), 2, 2),
    ]
    for data, given, want in clear:
        assert samples_of(data, given) == (want, None), (data, given)
    unclear = {"class_weights": torch.zeros(3), "x": x, "y": y}
    found, doubts = samples_of(unclear)
    assert found == 8 and doubts is not None and "3" in doubts
    assert samples_of(unclear, 8) == (8, None)
    found, doubts = samples_of([torch.zeros(4, 7), torch.zeros(4, 5)], 2)  # two samples, or four rows in two fields
    assert found == 2 and doubts is not None and "4" in doubts
    filtered = {"class_weights": torch.zeros(3), "x": x[:5], "y": y[:5]}
    assert samples_of(filtered, 8)[0] == 5
    # Links of graphs: the two ends of an edge are no two samples.
    graphs = {"x": torch.zeros(50, 5), "edges": torch.zeros(2, 90), "pairs": torch.zeros(2, 77), "y": torch.zeros(77)}
    found, doubts = samples_of(graphs, 8)
    assert found == 8 and doubts is not None


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(3):
            yield {"class_weights": torch.ones(3), "x": torch.ones(2, 4).double(), "y": torch.ones(2, 1).double()}


def test_a_batch_that_is_not_clear_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    unit = Unit(lambda b: (b["x"], b["y"]))
    with caplog.at_level(logging.WARNING):
        ech.train(unit, DataLoader(Stream(), batch_size=None), max_epochs=2)
    told = [record.getMessage() for record in caplog.records if "weight(data)" in record.getMessage()]
    assert len(told) == 1 and "3, 2, 2" in told[0]
