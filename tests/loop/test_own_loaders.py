"""The loaders of a loop of one's own: in which order each is read, and how many samples its batches have."""

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
from echelon.common.errors import CheckpointCorruptError, RanksDisagreeError
from echelon.loop.checkpointing.restoring import read_on_beside
from tests.conftest import Ranks
from tests.kit.own_loops import step

pytestmark = pytest.mark.standing_ranks

NUMBERED = TensorDataset(torch.arange(8.0).view(-1, 1), torch.arange(8))


def _small(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() * 1e-6


def _prepared(*loaders: Any) -> Any:
    model = nn.Linear(1, 1)
    layout = "ddp" if dist.is_initialized() else "none"
    return ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), *loaders, layout=layout)


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
    saved = None if folder is None else ech.Checkpoints(folder, every=1)
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
            with ech.window(model) as window:
                window.backward(_small(model, x) + _small(model, u))
                optimizer.step()
                optimizer.zero_grad()
            made.append([x.flatten().int().tolist(), u.flatten().int().tolist()])
            if len(made) == killed_at:
                raise _Killed
        with ech.evaluating(model):
            assert sum(1 for _ in held_out) == 6
    return made


def _goes_on_beside(order: str, folder: str, killed_at: int) -> tuple[Any, Any]:
    whole = _beside(order, None)
    with contextlib.suppress(_Killed):
        _beside(order, folder, killed_at)
    # What was saved last is the update before, whose batch the loop had ended.
    return whole[killed_at - 1 :], _beside(order, folder)


@pytest.mark.parametrize("order", ["first", "second", "by hand"])
@pytest.mark.parametrize("killed_at", [4, 9])
def test_a_loader_that_is_read_beside_the_training_loader_goes_on_where_it_stood(
    order: str, killed_at: int, ranks: Ranks, tmp_path: Any
) -> None:
    """As batches without labels in FixMatch. It began its epoch anew after a restart, with pairs that the whole run never had."""
    for number in (1, 2):
        for want, got in ranks(number, _goes_on_beside, order, str(tmp_path / str(number)), killed_at):
            assert got == want


@pytest.mark.parametrize("states", [3, ["1"], {"1": 3}, {"1": None}, {"1": {"position": "x"}}, {"1": {"epoch": 1e400}}])
def test_where_such_a_loader_stood_is_read_strictly(states: Any) -> None:
    model = nn.Linear(1, 1)
    loaders = [ech.Loader(NUMBERED, 4) for _ in range(2)]
    _, _, _, beside = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), *loaders, layout=None)
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
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    layout = "ddp" if dist.is_initialized() else "none"
    loader: Any = DataLoader(NUMBERED, 4, shuffle=True)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, layout=layout, checkpoints=folder)
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
    data, held_out, module = _Growing(), _Growing(), nn.Linear(1, 1)
    loaders = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=shuffle)), DataLoader(held_out, 8)
    model, optimizer, loader, evaluated = ech.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-3), *loaders)
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
    module, data = nn.Linear(1, 1), TensorDataset(torch.arange(53.0)[:, None])
    loader = DataLoader(data, 6, sampler=DistributedSampler(data), drop_last=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, loader = ech.prepare(module, optimizer, loader, accumulate=accumulate)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [DataLoader(data, batch_size=8, shuffle=True) for _ in range(2)]
    wrapped, optimizer, loader, held_out = ech.prepare(model, optimizer, *loaders, layout=layout)
    for _ in ech.epochs(loader, 3):
        for x, y in loader:
            with ech.window(wrapped) as window:
                window.backward(nn.functional.mse_loss(wrapped(x), y))
                optimizer.step()
                optimizer.zero_grad()
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
