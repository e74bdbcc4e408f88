"""`gather`, `gathered_rows` and `all_mean`: losses over the samples of all ranks; and which ranks get other samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import echelon as ech
from echelon.parallel.over_ranks import all_mean, gather, gathered_rows
from tests.conftest import Ranks
from tests.kit.models import batch, net, plain_training, seeded, whole
from tests.kit.refusals import refusal
from tests.kit.units import Own, Regression

pytestmark = pytest.mark.standing_ranks

ROWS, BATCH = 22, 8  # the last global batch has 6 rows, and on four ranks some have fewer than others


def _tower() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))


def _pairs(rows: int = ROWS) -> torch.utils.data.TensorDataset:
    made = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*(torch.randn(rows, 4, generator=made, dtype=torch.float64) for _ in range(2)))


def _contrast(module: nn.Module, data: Any) -> torch.Tensor:
    """InfoNCE: each row against the other views of all rows."""
    one, other = (F.normalize(module(x), dim=1) for x in data)
    return F.cross_entropy(5 * one @ gather(other).T, gathered_rows(other))


def _spread(module: nn.Module, data: Any) -> torch.Tensor:
    """The same loss of all rows on every rank, and one that needs a second derivative of what was gathered."""
    x = data[0].requires_grad_()
    rows = module(x)
    every = gather(rows)
    (slope,) = torch.autograd.grad((rows @ every.T).square().sum() / 20, x, create_graph=True)
    return every.std(0).mean() + gather(slope).square().mean()


def _train(loss: Any, layout: Any, rows: int = ROWS) -> dict[str, torch.Tensor]:
    unit = Regression(module=_tower(), layout=layout, lr=0.5, loss=loss)
    ech.train(unit, ech.Loader(_pairs(rows), BATCH, seed=3), max_epochs=2)
    return whole(unit.module)


def _check(ranks: Ranks, count: int, loss: Any, layout: Any, rows: int = ROWS) -> None:
    alone = _train(loss, None, rows)
    for trained in ranks(count, _train, loss, layout, rows):
        for name, value in alone.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.full
@pytest.mark.parametrize(
    ("loss", "layout"), [(_contrast, "ddp"), (_contrast, "fsdp"), (_contrast, "zero1"), (_spread, "ddp"), (_spread, "zero1")]
)
def test_a_loss_over_all_ranks_rows_trains_as_one_process(ranks: Ranks, loss: Any, layout: str) -> None:
    _check(ranks, 2, loss, layout)


PLAN = {"0": "colwise", "2": "rowwise"}


@pytest.mark.full
@pytest.mark.parametrize(("axes", "count"), [({"tp": 2}, 2), ({"dp_shard": 2, "tp": 2}, 4)], ids=["tp", "fsdp x tp"])
def test_ranks_that_share_samples_count_once(ranks: Ranks, axes: dict[str, int], count: int) -> None:
    _check(ranks, count, _contrast, ech.Layout(**axes, plan=PLAN))


@pytest.mark.full
def test_a_rank_without_samples_gives_none(ranks: Ranks) -> None:
    """17 rows in global batches of 8: the last has one row, and three of four ranks have padding only."""
    _check(ranks, 4, _contrast, "ddp", 17)


def _uneven() -> list[Any]:
    rank = dist.get_rank()
    mine = torch.arange(2.0 * rank * 3).reshape(2 * rank, 3) + 10 * rank  # 0, 2, 4, 6 rows
    columns = gather(mine.T.contiguous(), dim=1)
    assert torch.equal(columns, gather(mine.T.contiguous(), dim=-1))
    mean, plain = all_mean(torch.tensor([float(rank), 1.0])), all_mean(rank, weight=rank)
    flags = gather(torch.ones(1, dtype=torch.bool)).tolist()
    return [gather(mine).tolist(), columns.T.tolist(), gathered_rows(mine).tolist(), mean.tolist(), plain, flags]


def test_uneven_rows_come_in_the_order_of_ranks(ranks: Ranks) -> None:
    told = ranks(4, _uneven)
    expected = torch.cat([torch.arange(2.0 * r * 3).reshape(2 * r, 3) + 10 * r for r in range(4)]).tolist()
    assert all(each[0] == each[1] == expected for each in told)
    assert [each[2] for each in told] == [[], [0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert all(each[3] == [1.5, 1.0] and each[4] == pytest.approx((1 + 4 + 9) / 6) and each[5] == [True] * 4 for each in told)


def _odd_shapes() -> list[str]:
    odd, whole = dist.get_rank() == 1, torch.zeros(2, 3)
    given = [
        (torch.zeros(2, 3 + odd), 0),
        (torch.zeros(()) if odd else whole, 0),
        (whole[:, 0] if odd else whole, 0),
        (whole, int(odd)),
        (whole.double() if odd else whole, 0),
        (torch.zeros(()), 0),
    ]
    return [refusal(gather, tensor, dim) for tensor, dim in given]


def test_other_shapes_are_refused_on_all_ranks(ranks: Ranks) -> None:
    texts = ranks(2, _odd_shapes)
    assert texts[0] == texts[1] and all("rank 1" in text for text in texts[0])


def test_one_process_keeps_what_it_has() -> None:
    x = torch.randn(3, 2)
    assert gather(x) is x and all_mean(2.5) == 2.5 and gathered_rows(x).tolist() == [0, 1, 2]
    assert (ech.rank(), ech.world_size(), ech.is_main()) == (0, 1, True)


# --- which ranks get other samples: read off what splits a module's parameters, or said by the user; never off an axis's name


CPU = torch.device("cpu")
SAMPLES, GLOBAL_BATCH = 24, 8


# How many ranks have other samples, on four ranks of which two share them.
BEFORE = [(0, 2, False), (0, 2, True), (1, 2, False), (1, 2, True)]


def split() -> nn.Module:
    """Every parameter is one that tensor parallelism splits."""
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False)), 1)


def by_hand(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    prefix = "blocks.*." if hasattr(module, "blocks") else ""
    return parallelize_module(module, mesh, {f"{prefix}0": ColwiseParallel(), f"{prefix}2": RowwiseParallel()})


def grid(*names: str, sizes: tuple[int, ...] = (2, 2)) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def tensor_alone(build: Any, name: str) -> nn.Module:
    return by_hand(build(), grid(name, sizes=(dist.get_world_size(),)))


def tensor_and_shards(build: Any, *names: str) -> nn.Module:
    mesh = grid(*names)
    data = next(n for n in names if n != "model")
    module = by_hand(build(), mesh["model"])
    for block in getattr(module, "blocks", ()):
        fully_shard(block, mesh=mesh[data])
    return fully_shard(module, mesh=mesh[data])


def copies_beside(wrap: Any) -> nn.Module:
    """Data parallelism over one axis of two; the ranks of the other do the same."""
    return wrap(net(), grid("dp", "other")["dp"])


def beside() -> dict[str, Any]:
    """What the unit is given."""
    mesh = grid("dp", "model")
    return {"module": by_hand(net(), mesh["model"]), "layout": ech.FSDPStrategy(device_mesh=mesh["dp"])}


def declared_copies() -> nn.Module:
    mesh = grid("dp", "cp")
    module = fully_shard(net(), mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    ech.layouts.data_axes(module, mesh["dp"])
    return module


# name: (ranks, how the module is made, the same module plain, share of each rank)
HANDS: dict[str, tuple[int, Any, Any, list[tuple[int, int, bool]]]] = {
    "tensor": (2, lambda: tensor_alone(net, "model"), net, [(0, 1, False), (0, 1, True)]),
    "tensor without a name of ours": (2, lambda: tensor_alone(split, "cp"), split, [(0, 1, False), (0, 1, True)]),
    "tensor on four": (4, lambda: tensor_alone(net, "tp"), net, [(0, 1, False), *[(0, 1, True)] * 3]),
    "data before model": (4, lambda: tensor_and_shards(net, "dp", "model"), net, BEFORE),
    "model before data": (
        4,
        lambda: tensor_and_shards(net, "model", "rows"),
        net,
        [(0, 2, False), (1, 2, False), (0, 2, True), (1, 2, True)],
    ),
    "all is split twice": (4, lambda: tensor_and_shards(split, "dp", "model"), split, BEFORE),
    "a layout over the axis beside": (4, beside, net, BEFORE),
    "copies of shards": (4, lambda: fully_shard(net(), mesh=grid("a", "b")), net, [(r, 4, False) for r in range(4)]),
    "shards beside an axis": (4, lambda: copies_beside(lambda m, mesh: fully_shard(m, mesh=mesh)), net, BEFORE),
    "ddp beside an axis": (4, lambda: copies_beside(lambda m, mesh: DistributedDataParallel(m, device_mesh=mesh)), net, BEFORE),
    "older fsdp beside an axis": (
        4,
        lambda: copies_beside(lambda m, mesh: FullyShardedDataParallel(m, device_mesh=mesh, device_id=CPU)),
        net,
        BEFORE,
    ),
    "declared": (4, declared_copies, net, [(0, 2, False), (0, 2, False), (1, 2, False), (1, 2, False)]),
}


def _train_by_hand(names: list[str]) -> dict[str, tuple[dict[str, torch.Tensor], list[float], tuple[int, int, bool]]]:
    found = {}
    for name in names:
        is_older = "older" in name  # its clipping cannot do float64 (torch 2.13)
        made = HANDS[name][1]()
        options = made if isinstance(made, dict) else {"module": made}
        unit = Regression(**options, clip_grad_norm=None if is_older else 0.3)
        ech.train(unit, ech.Loader(torch.utils.data.TensorDataset(*batch(SAMPLES, 0)), GLOBAL_BATCH, shuffle=False), max_epochs=1)
        prepared = unit.prepared
        with prepared.gathered():
            values = {n.removeprefix("_fsdp_wrapped_module."): p for n, p in whole(unit.module).items()}
        found[name] = values, unit.norms, (prepared.data.rank, prepared.data.size, prepared.data.is_replica)
    return found


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_a_module_sharded_by_hand_trains_as_one_process_does(ranks: Ranks, size: int) -> None:
    x, y = batch(SAMPLES, 0)
    windows = [[(x[i : i + GLOBAL_BATCH], y[i : i + GLOBAL_BATCH])] for i in range(0, SAMPLES, GLOBAL_BATCH)]
    names = [name for name, (needed, *_) in HANDS.items() if needed == size]
    everyones = ranks(size, _train_by_hand, names)
    for name in names:
        _, _, plain, shares = HANDS[name]
        want, _, want_norms = plain_training(windows, clip=None if "older" in name else 0.3, module=plain())
        assert [found[name][2] for found in everyones] == shares, name
        for found in everyones:
            got, norms, _ = found[name]
            assert not norms or norms == pytest.approx(want_norms, rel=1e-11), name
            assert got.keys() == want.keys(), name
            assert max(float((got[k] - want[k]).abs().max()) for k in want) < 1e-12, name


def _seen(make: Any, *names: str) -> list[float]:
    unit = Own(make(net, *names))
    ech.train(unit, ech.Loader(torch.utils.data.TensorDataset(*batch(16, 0)), 8), max_epochs=1)
    return unit.seen


@pytest.mark.full
def test_ones_own_unit_gets_the_same_samples_on_the_ranks_of_a_layer(ranks: Ranks) -> None:
    rows = ranks(4, _seen, tensor_alone, "model")
    assert rows == [rows[0]] * 4 and len(rows[0]) == 16
    rows = ranks(4, _seen, tensor_and_shards, "model", "dp")
    assert rows[0] == rows[2] != rows[1] == rows[3] and len(rows[0]) == 8


def _divides_its_own(folder: str) -> list[float]:
    units = []
    mesh = grid("cp", sizes=(2,))
    for module in (fully_shard(net(), mesh=mesh), DistributedDataParallel(net(), device_mesh=mesh)):
        x, y = batch(16, 0)
        mine = [(x[i + dist.get_rank() :: 8], y[i + dist.get_rank() :: 8]) for i in (0, 2, 4, 6)]
        unit = Own(module)
        saver = ech.DistributedCheckpointSaver(f"{folder}/{len(units)}", save_every_n_updates=2)
        ech.train(unit, mine, max_epochs=1, callbacks=[saver])
        assert ech.DistributedCheckpointSaver.restore_from_latest(f"{folder}/{len(units)}", Own(module))
        units.append(unit)
    return [float(unit.module(batch(4, 1)[0]).sum()) for unit in units]


@pytest.mark.full
def test_ones_own_unit_with_data_of_ones_own_needs_no_word_on_axes(ranks: Ranks, tmp_path: Any) -> None:
    """Nothing is divided here, so an axis whose ranks nobody knows is none of our business."""
    one, two = ranks(2, _divides_its_own, str(tmp_path))
    assert one == pytest.approx(two, rel=1e-12) and one[0] == pytest.approx(one[1], rel=1e-12)


def _refused() -> dict[str, str]:
    def declared(module: nn.Module) -> nn.Module:
        ech.layouts.data_axes(module, mesh["dp"])
        return module

    mesh = grid("dp", "cp")
    cases: dict[str, Any] = {
        "by hand": lambda: Regression(module=fully_shard(net(), mesh=mesh)),
        "by a layout": lambda: Regression(layout=ech.FSDPStrategy(device_mesh=mesh)),
        "ddp": lambda: Regression(module=DistributedDataParallel(net(), device_mesh=mesh["cp"])),
        "sharded twice": lambda: Regression(module=by_hand(net(), mesh["cp"]), layout="fsdp"),
        "whole": lambda: Regression(module=by_hand(net(), mesh["cp"]), layout="ddp"),
        "some ranks": lambda: Regression(module=by_hand(net(), mesh["cp"])),
        "nobody averages": lambda: Regression(module=declared(by_hand(net(), mesh["cp"]))),
    }
    loader = ech.Loader(torch.utils.data.TensorDataset(*batch(16, 0)), 8)
    return {name: refusal(lambda make=make: ech.train(make(), loader, max_epochs=1)) for name, make in cases.items()}


@pytest.mark.full
def test_what_cannot_be_known_is_refused_and_the_axis_named(ranks: Ranks) -> None:
    for said in ranks(4, _refused):
        for name in ("by hand", "by a layout", "ddp"):
            assert "'cp'" in said[name] and "echelon.layouts.data_axes(module, mesh[" in said[name], said[name]
        for name in ("sharded twice", "whole"):
            assert "'cp'" in said[name] and 'FSDPStrategy(device_mesh=mesh["dp"])' in said[name], said[name]
        assert "'cp'" in said["some ranks"] and "4 ranks" in said["some ranks"] and "fully_shard" in said["some ranks"]
        assert "'dp'" in said["nobody averages"] and "fully_shard" in said["nobody averages"]
