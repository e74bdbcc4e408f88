"""A loop of one's own: in which order each loader is read, how many samples its batches have, where it ends, how it clips."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import echelon as ech
from echelon.checkpoint.location import location
from echelon.common.errors import CheckpointCorruptError, OwnLoopError, RanksDisagreeError
from echelon.loop.checkpointing.restoring import read_on_beside
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import own_loop, prepared, step, told
from tests.kit.refusals import refused
from tests.kit.started import Started

pytestmark = pytest.mark.standing_ranks

NUMBERED = TensorDataset(torch.arange(8.0).view(-1, 1), torch.arange(8))


def _small(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() * 1e-6


def _prepared(*loaders: Any) -> Any:
    return prepared(*loaders, module=nn.Linear(1, 1), layout="ddp" if dist.is_initialized() else "none")


def _zipped() -> list[tuple[list[int], list[int]]]:
    """Numbers of the samples of both loaders, by epoch."""
    model, optimizer, first, second = _prepared(*(DataLoader(NUMBERED, 4, shuffle=True) for _ in range(2)))
    seen = []
    for _ in ech.epochs(first, 3):
        both: tuple[list[int], list[int]] = [], []
        for (x, i), (_, j) in zip(first, second, strict=True):
            both[0].extend(i.tolist())
            both[1].extend(j.tolist())
            step(model, optimizer, x, loss=_small)
        seen.append(both)
    return seen


def test_a_second_loader_that_shuffles_has_an_order_of_its_own_in_each_epoch(ranks: Ranks) -> None:
    """As in plain PyTorch: two loaders of one dataset, zipped, pair samples at random and do not pair each with itself."""
    (alone,) = ranks(1, _zipped)
    assert all(sorted(first) == sorted(second) == [*range(8)] for first, second in alone)
    assert all(first != second for first, second in alone)
    assert len({tuple(second) for _, second in alone}) == 3
    for epoch, (first, second) in enumerate(zip(*ranks(2, _zipped), strict=True)):
        assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [sorted(each) for each in alone[epoch]]


def _short_pairs(layout: str) -> dict[str, torch.Tensor]:
    """Trains on pairs of two loaders whose last batches have one sample."""
    x, y = batch(9, 0)
    pairs = [DataLoader(TensorDataset(each), 4) for each in (x, y)]
    model, optimizer, inputs, targets = prepared(*pairs, module=net(), layout=layout)
    for _ in ech.epochs(inputs, 2):
        for (x,), (y,) in zip(inputs, targets, strict=True):
            step(model, optimizer, x, y)
    return whole(model)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_pair_of_last_batches_may_have_fewer_samples_than_ranks(layout: str, ranks: Ranks) -> None:
    alone = _short_pairs("none")
    for trained in ranks(2, _short_pairs, layout):
        assert largest_difference(trained, alone) < 1e-13


class _Killed(Exception):
    pass


def _beside(order: str, folder: str | None, killed_at: int = 0) -> list[list[list[int]]]:
    """The pairs of batches of three epochs, each by a window; a second loader is read beside the first, in this order."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    one = TensorDataset(torch.arange(24).reshape(-1, 1).float())
    other = TensorDataset(torch.arange(100, 140).reshape(-1, 1).float())
    labelled = DataLoader(one, batch_size=4, shuffle=True)
    unlabelled: Any = ech.Loader(other, 8, seed=5) if order == "by hand" else DataLoader(other, batch_size=4, shuffle=True)
    held_out = DataLoader(one, batch_size=4)
    saved = None if folder is None else ech.Checkpoints(folder, every=1 if killed_at else "epoch")
    prepared = ech.prepare(model, optimizer, labelled, unlabelled, held_out, checkpoints=saved)
    model, optimizer, labelled, unlabelled, held_out = prepared
    made: list[list[list[int]]] = []

    def pairs() -> Any:
        if order == "first":
            yield from zip(labelled, unlabelled, strict=False)
        elif order == "second":
            yield from (pair[::-1] for pair in zip(unlabelled, labelled, strict=False))
        else:
            nonlocal others
            if order == "each epoch":
                others = iter(unlabelled)
            for batch in labelled:
                if (more := next(others, None)) is None:
                    others = iter(unlabelled)
                    more = next(others)
                yield batch, more

    others = iter(unlabelled)
    with ech.evaluating(model):
        assert sum(len(x) for (x,) in held_out) == 24 // (dist.get_world_size() if dist.is_initialized() else 1)
    for _ in ech.epochs(labelled, 3):
        for (x,), (u,) in pairs():
            step(model, optimizer, x, u, loss=lambda model, x, u: _small(model, x) + _small(model, u))
            made.append([x.flatten().int().tolist(), u.flatten().int().tolist()])
            if len(made) == killed_at:
                raise _Killed
        with ech.evaluating(model):
            assert sum(1 for _ in held_out) == 6
    return made


def _go_on_beside(order: str, folder: str, places: tuple[int, ...]) -> list[Any]:
    """The pairs of a run without a break, and those that each run that was killed at one of the places goes on with."""
    found: list[Any] = [_beside(order, None)]
    for killed_at in places:
        with contextlib.suppress(_Killed):
            _beside(order, f"{folder}-{killed_at}", killed_at)
        found.append(_beside(order, f"{folder}-{killed_at}"))
    return found


@pytest.mark.parametrize("order", ["first", "second", "by hand", "each epoch"])
def test_a_loader_that_is_read_beside_the_training_loader_goes_on_where_it_stood(order: str, ranks: Ranks, tmp_path: Any) -> None:
    """As batches without labels in FixMatch. It began its epoch anew after a restart, with pairs that no whole run had; and
    after a restart at the end of an epoch, it went on where that epoch had left it, so that `zip` skipped the next one.
    """
    places = (4, 7, 9)
    for number in (1, 2):
        for want, *resumed in ranks(number, _go_on_beside, order, str(tmp_path / str(number)), places):
            # What was saved last is the update before, whose batch the loop had ended.
            assert dict(zip(places, resumed, strict=True)) == {killed_at: want[killed_at - 1 :] for killed_at in places}


@pytest.mark.parametrize("states", [3, ["1"], {"1": 3}, {"1": None}, {"1": {"position": "x"}}, {"1": {"epoch": 1e400}}])
def test_where_such_a_loader_stood_is_read_strictly(states: Any) -> None:
    _, _, _, beside = prepared(*(ech.Loader(NUMBERED, 4) for _ in range(2)), module=nn.Linear(1, 1), layout=None)
    if isinstance(states, dict) and isinstance(states["1"], dict):
        states = {"1": {**beside.state_dict(), **states["1"]}}
    with pytest.raises(CheckpointCorruptError):
        read_on_beside(location("saved"), [beside], states)


def _order_of(kind: str, seed: int, *, by_rank: bool = False) -> list[int] | str:
    seed += ech.RankInfo().rank if by_rank else 0
    generator = torch.Generator().manual_seed(seed)
    loader: Any = DataLoader(NUMBERED, 4, shuffle=True, generator=generator)
    model, optimizer, loader = _prepared(loader if kind == "generator" else ech.Loader(NUMBERED, 4, seed=seed))
    seen: list[int] = []
    try:
        for x, i in loader:
            seen += i.tolist()
            step(model, optimizer, x, loss=_small)
    except RanksDisagreeError as error:
        return str(error.fields["name"])
    return seen


@pytest.mark.parametrize("kind", ["generator", "seed"])
def test_a_generator_or_a_seed_decides_the_order_and_other_ones_on_ranks_are_refused(ranks: Ranks, kind: str) -> None:
    """Some samples would come twice, and others never."""
    one, same, other = (ranks(1, _order_of, kind, seed)[0] for seed in (1, 1, 2))
    assert one == same != other
    assert sorted(sum(ranks(2, _order_of, kind, 1), [])) == [*range(8)]
    assert ranks(2, _order_of, kind, 1, by_rank=True) == ["where training begins and ends"] * 2


def _order_after(seed: int, *, by_rank: bool = False, folder: str | None = None, stops: bool = False) -> list[int]:
    """The samples of two epochs, as `torch.manual_seed` and nothing else says their order."""
    torch.manual_seed(seed + (dist.get_rank() if by_rank else 0))
    layout, loader = "ddp" if dist.is_initialized() else "none", DataLoader(NUMBERED, 4, shuffle=True)
    model, optimizer, loader = prepared(loader, module=nn.Linear(1, 1), layout=layout, checkpoints=folder)
    seen = []
    for epoch in ech.epochs(loader, 2):
        if stops and epoch:
            break
        for x, i in loader:
            seen += i.tolist()
            step(model, optimizer, x, loss=_small)
    return seen


def test_without_a_generator_the_order_follows_from_torchs_seed_as_rank_0_has_it(ranks: Ranks) -> None:
    """As in plain PyTorch: runs with other seeds are trained in other orders."""
    one, same, other = (ranks(1, _order_after, seed)[0] for seed in (1, 1, 2))
    assert one == same != other and sorted(one) == sorted(other) == sorted([*range(8)] * 2)
    apart = ranks(2, _order_after, 1, by_rank=True)
    assert [
        sorted(sum(batch, [])) for batch in zip(*([r[at : at + 2] for at in range(0, 8, 2)] for r in apart), strict=True)
    ] == [sorted(one[at : at + 4]) for at in range(0, 16, 4)]


def test_a_restart_under_another_seed_goes_on_in_the_order_of_its_run(ranks: Ranks, tmp_path: Path) -> None:
    """Of a script that takes its seed from a clock."""
    (whole,) = ranks(1, _order_after, 1)
    (first,) = ranks(1, _order_after, 1, folder=str(tmp_path), stops=True)
    (then,) = ranks(1, _order_after, 2, folder=str(tmp_path))
    assert first + then == whole


def _time_first(samples: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """(T, B), as nn.LSTM takes it."""
    return torch.stack([x.expand(5) for x, _ in samples], 1)


def _evaluated(kind: str) -> float:
    held_out: Any = TensorDataset(torch.arange(10.0).view(-1, 1), torch.arange(10))
    make: Any = DataLoader if kind == "DataLoader" else lambda *given, **more: ech.Loader(*given, shuffle=False, **more)
    model, _, _, loader = _prepared(DataLoader(NUMBERED, 4), make(held_out, 4, collate_fn=_time_first))
    with ech.evaluating(model) as evaluation:
        for x in loader:
            evaluation.log("mean", x.mean())
    return float(evaluation.numbers["mean"])


@pytest.mark.parametrize("kind", ["DataLoader", "Loader"])
def test_a_batch_of_an_evaluation_weighs_what_its_loader_put_into_it(ranks: Ranks, kind: str) -> None:
    """The last batch has two samples, and five steps in its first dimension like the others."""
    assert ranks(1, _evaluated, kind) == [4.5] and ranks(2, _evaluated, kind) == [4.5, 4.5]


def _of_few(logs: bool) -> tuple[int, float | None]:
    """Batches that this rank had, and the mean of what was logged."""
    few = TensorDataset(torch.tensor([[1.0], [2.0], [6.0]]))
    model, _, _, loader = _prepared(DataLoader(NUMBERED, 4), DataLoader(few, 8))
    batches = 0
    with ech.evaluating(model) as evaluation:
        for (x,) in loader:
            batches += 1
            if logs:
                evaluation.log("mean", x.mean())
    return batches, evaluation.numbers.get("mean")


@pytest.mark.full
def test_an_evaluation_may_have_fewer_samples_than_there_are_ranks(ranks: Ranks) -> None:
    assert ranks(4, _of_few, True) == [(1, 3.0), (1, 3.0), (1, 3.0), (0, 3.0)]
    assert ranks(4, _of_few, False) == [(1, None), (1, None), (1, None), (0, None)]


# --- a dataset that grows, and batches that are dropped


class _Growing(Dataset[torch.Tensor]):
    size = 24

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((1,), float(at))


def _grown(shuffle: bool) -> tuple[list[list[int]], list[float]]:
    """Which samples each epoch had on this rank, and the mean of those that were evaluated."""
    data, held_out = _Growing(), _Growing()
    loaders = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=shuffle)), DataLoader(held_out, 8)
    model, optimizer, loader, evaluated = prepared(*loaders, module=nn.Linear(1, 1))
    seen, means = [], []
    for _ in ech.epochs(loader, 3):
        seen.append(list[int]())
        for x in loader:
            step(model, optimizer, x, loss=_small)
            seen[-1] += x[:, 0].int().tolist()
        with ech.evaluating(model) as evaluation:
            for x in evaluated:
                evaluation.log("mean", x.mean())
        means.append(evaluation.numbers["mean"])
        data.size, held_out.size = data.size + 8, held_out.size + 8
    return seen, means


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_epoch_has_the_samples_that_its_dataset_has_by_then(ranks: Ranks, shuffle: bool) -> None:
    found = ranks(2, _grown, shuffle)
    for epoch, size in enumerate((24, 32, 40)):
        assert sorted(sample for seen, _ in found for sample in seen[epoch]) == list(range(size))
    assert all(means == [11.5, 15.5, 19.5] for _, means in found)


def _dropping(accumulate: int) -> tuple[int, set[int]]:
    data = TensorDataset(torch.arange(53.0)[:, None])
    loader: Any = DataLoader(data, 6, sampler=DistributedSampler(data), drop_last=True)
    model, optimizer, loader = prepared(loader, module=nn.Linear(1, 1), accumulate=accumulate)
    updates, seen = 0, set[int]()
    for _ in ech.epochs(loader, 2):
        for (x,) in loader:
            updates += step(model, optimizer, x, loss=_small).is_last
            seen |= set(x[:, 0].int().tolist())
    return updates, seen


@pytest.mark.parametrize("accumulate", [1, 3])
def test_drop_last_drops_a_batch_that_is_not_whole_and_no_others(ranks: Ranks, accumulate: int) -> None:
    """Of 53 samples five, other ones in each epoch; the last update of an epoch has the one batch that is left."""
    found = ranks(2, _dropping, accumulate)
    assert {updates for updates, _ in found} == {2 * (4 if accumulate == 1 else 2)}
    assert len(set.union(*(seen for _, seen in found))) > 48


@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_a_shuffled_dataset_may_be_smaller_than_its_batch(ranks: Ranks, layout: str) -> None:
    """As torch's DataLoader has it: one short batch, of which one of four ranks here has no sample."""
    for found, counted in ranks(4, _trained_on_three, layout):
        torch.testing.assert_close(found, _trained_on_three_by_hand(), rtol=0, atol=1e-6)
        assert counted == 3


def _three() -> tuple[nn.Linear, TensorDataset]:
    torch.manual_seed(0)
    return nn.Linear(3, 1), TensorDataset(torch.randn(3, 3), torch.randn(3, 1))


def _trained_on_three(layout: str) -> tuple[torch.Tensor, int]:
    model, data = _three()
    loaders = [DataLoader(data, batch_size=8, shuffle=True) for _ in range(2)]
    wrapped, optimizer, loader, held_out = prepared(*loaders, module=model, layout=layout)
    for _ in ech.epochs(loader, 3):
        for x, y in loader:
            step(wrapped, optimizer, x, y)
    with ech.evaluating(wrapped):
        counted = torch.tensor(sum(len(x) for x, _ in held_out))
    torch.distributed.all_reduce(counted)
    return model.weight.detach(), int(counted)


def _trained_on_three_by_hand() -> torch.Tensor:
    model, data = _three()
    for _ in range(3):
        loss = nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                parameter -= 0.1 * gradient
    return model.weight.detach()


# --- where the loop ends: after so many updates, or before its end, which nobody saves


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
    model, _, loader = prepared(DataLoader(DATA, 4), layout="none")
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


# --- clipping, where torch's function was left in the loop


def _clipped_by_torch(accumulation: int, right: bool) -> int:
    loader = ech.Loader(list(zip(*batch(16, 0), strict=True)), 4, accumulate=accumulation)

    def clip(window: Any, model: nn.Module) -> None:
        window.clip_grad_norm_(1.0) if right else nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with told() as texts:
        own_loop(net(), loader, epochs=2, clip=clip, layout="ddp")
    return sum("window.clip_grad_norm_" in text for text in texts)


@pytest.mark.full
def test_clipping_that_was_left_in_an_unfinished_update_is_told_once(ranks: Ranks) -> None:
    for accumulation, right, told_of in ((2, False, 1), (2, True, 0), (1, False, 0)):  # the last of whole gradients
        assert ranks(2, _clipped_by_torch, accumulation, right) == [told_of] * 2


def _changed_uncounted(change: str, accumulation: int) -> int:
    """How often it was told, where torch does not count what changes the gradients."""
    module, rows = net(), list(zip(*batch(16, 0), strict=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with told() as texts:
        model, optimizer, loader = ech.prepare(
            module, torch.optim.SGD(module.parameters(), 0.1), ech.Loader(rows, 8, accumulate=accumulation), layout="none"
        )
        for x, y in loader:
            with ech.window(model) as window:
                window.backward(scaler.scale(nn.functional.mse_loss(model(x), y)))
                if change == "scaler":
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                elif change == "data":
                    for parameter in module.parameters():
                        parameter.grad.data.clamp_(-0.01, 0.01)
                    optimizer.step()
                else:
                    optimizer.step()
                optimizer.zero_grad()
    return sum("were changed in the middle" in text for text in texts)


@pytest.mark.parametrize("change", ["scaler", "data", ""])
def test_changes_of_gradients_that_torch_does_not_count_are_told_once(change: str) -> None:
    """They trained on other gradients, in silence: unscaled after each batch, clamped before they were whole."""
    assert _changed_uncounted(change, 2) == bool(change)
    assert _changed_uncounted(change, 1) == 0


def _two_optimizers(change: str, accumulation: int) -> int:
    """How often it was told that gradients were changed where they are not whole yet."""
    first, second = net(), net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    rows = list(zip(*batch(16, 0), strict=True))
    with told() as texts:
        first, second, *optimizers, loader = ech.prepare(
            *(first, second, *optimizers, ech.Loader(rows, 8, accumulate=accumulation)),
            layout="ddp" if dist.is_initialized() else "none",
        )
        for x, y in loader:
            with ech.window(first) as window:
                for model, optimizer in zip((first, second), optimizers, strict=True):
                    window.backward(nn.functional.mse_loss(model(x), y))
                    if change == "torch's":
                        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                    elif change == "window's":
                        window.clip_grad_norm_(0.01, of=optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
    return sum("were changed before its step()" in text for text in texts)


def test_clipping_of_several_optimizers_by_torch_is_told_once(ranks: Ranks) -> None:
    """It clips the gradients of a rank's batch, where one process clips those of the whole batch."""
    assert ranks(2, _two_optimizers, "torch's", 1) == [1, 1]
    assert ranks(1, _two_optimizers, "torch's", 2) == [1]
    assert ranks(1, _two_optimizers, "torch's", 1) == [0]
    assert [ranks(2, _two_optimizers, change, 2)[0] for change in ("window's", "")] == [0, 0]
