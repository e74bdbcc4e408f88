"""Where a loop of one's own ends: after so many updates, or before its end, which nobody saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import OwnLoopError
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import step
from tests.kit.refusals import refused
from tests.kit.started import Started

DATA = TensorDataset(*batch(22, 0))  # with batches of 4: six of them, and the last has two samples
Trained = tuple[list[tuple[int, int]], dict[str, torch.Tensor], int]


def _trained(folder: Path, updates: tuple[int, ...], accumulate: int = 1, dies_after: int = -1) -> Trained:
    """The epoch and the number of each batch, the weights, and how often the scheduler has stepped."""
    model, batches = net(dropout=0.0 if dist.is_initialized() else 0.2), list[tuple[int, int]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    layout, every = "fsdp" if dist.is_initialized() else "none", ech.Checkpoints(folder, every=1)
    made = ech.prepare(
        *(model, optimizer, scheduler, DataLoader(DATA, 4, shuffle=True)), layout=layout, accumulate=accumulate, checkpoints=every
    )
    model, optimizer, scheduler, loader = made
    for number in updates:
        for epoch in ech.epochs(loader, max_updates=number):
            for i, (x, y) in enumerate(loader):
                step(model, optimizer, x, y)
                scheduler.step()
                batches.append((epoch, i))
                if len(batches) == dies_after:
                    return batches, {}, 0
    return batches, whole(model), scheduler.last_epoch


def _saved(folder: Path) -> int:
    return max(int(each.name.removeprefix("step-")) for each in folder.glob("step-*"))


@pytest.mark.standing_ranks
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_loop_ends_after_so_many_updates_wherever_that_is_and_goes_on_from_there(
    ranks: Ranks, tmp_path: Path, accumulate: int
) -> None:
    batches, want, steps = _trained(tmp_path / "whole", (9,), accumulate)
    of_epoch = 6 if accumulate == 1 else 8  # whose last update has as many batches
    assert [i for _, i in batches] == [n % of_epoch for n in range(9 * accumulate)] and steps == 9
    assert batches[-1][0] == (9 * accumulate - 1) // of_epoch and _saved(tmp_path / "whole") == 9
    assert _trained(tmp_path / "whole", (9,), accumulate)[0] == []  # nothing is left
    # A process that dies; one that trains to the sixth update, and another to the ninth; both in one.
    _trained(tmp_path / "died", (9,), accumulate, dies_after=7 * accumulate)
    assert largest_difference(_trained(tmp_path / "died", (9,), accumulate)[1], want) == 0
    assert _trained(tmp_path / "twice", (6,), accumulate)[2] == _saved(tmp_path / "twice") == 6
    assert largest_difference(_trained(tmp_path / "twice", (9,), accumulate)[1], want) == 0
    assert largest_difference(_trained(tmp_path / "in one", (4, 9), accumulate)[1], want) == 0
    of_ranks = ranks(2, _trained, tmp_path / "ranks", (4, 9), accumulate)
    assert [(each[0][-1], each[2]) for each in of_ranks] == [((1, 2) if accumulate == 1 else (4, 3), 9)] * 2
    assert _saved(tmp_path / "ranks") == 9


def test_limits_that_cannot_be_kept_are_refused() -> None:
    model = net()
    model, _, loader = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, 4), layout="none")
    for limits in ({}, {"max_updates": -1}, {"max_updates": 1.5}):
        with refused(OwnLoopError):
            list(ech.epochs(loader, **limits))  # type: ignore[arg-type]
    list(ech.epochs(model, max_updates=0))
    with refused(OwnLoopError):  # a restarted process would count them from another epoch
        list(ech.epochs(loader, 2))


LEAVES = """
import sys, torch, echelon as ech
def prepared(folder, **options):
    model = torch.nn.Linear(2, 2)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), 2)
    return ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, layout="none", checkpoints=folder)
def train(model, optimizer, x):
    with ech.window(model) as window:
        window.backward(model(x).mean())
        optimizer.step()
model, optimizer, loader = prepared("whole")
for _ in ech.epochs(loader, max_updates=5):
    for x, in loader:
        train(model, optimizer, x)
broken = prepared("broken")
for n, (x,) in enumerate(broken[2]):
    train(*broken[:2], x)
    if n == 2:
        break
kept = prepared("kept")
batches = iter(kept[2])
for _ in range(2):
    train(*kept[:2], *next(batches))
if "fails" in sys.argv:
    raise ValueError("on its way")
"""


def test_a_process_that_ends_tells_which_updates_are_in_no_checkpoint(started: Started) -> None:
    """A loop over `next(batches)`, or one that a `break` ends: what it trained last was lost, and nothing said so."""
    script = started.script(LEAVES)
    left, failed = (started.python(script, *words, fresh=True).communicate(timeout=120)[1].decode() for words in ((), ("fails",)))
    said = [line.split(",")[0] for line in left.splitlines() if "the process ends" in line]
    assert said == ["the process ends at update 2", "the process ends at update 3"], left
    assert "on its way" in failed and "the process ends" not in failed
