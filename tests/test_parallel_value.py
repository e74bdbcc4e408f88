"""`Parallel`: one value for every direction of parallelism."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echelon as ech
from echelon.contracts.errors import UsageError
from echelon.parallel.strategy import resolve
from echelon.world.mesh import ParallelDims

SIZES = st.integers(1, 4)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("dp_shard=2,tp=4", {"dp_shard": 2, "tp": 4}),
        (" pp=2 , dp_replicate = -1", {"pp": 2, "dp_replicate": -1}),
        ("cp=2,ep=2", {"cp": 2, "ep": 2}),
        ("dp_shard=2+cp=2", {"dp_shard": 2, "cp": 2}),
    ],
)
def test_text_names_the_axes(text: str, want: dict[str, int]) -> None:
    assert ech.Parallel.parse(text) == ech.Parallel(**want) == resolve(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", ["pp", "dp_replicate", "dp_shard", "cp"])
def test_an_axis_alone_takes_all_ranks(axis: str) -> None:
    assert resolve(axis) == ech.Parallel(**{axis: -1})  # type: ignore[arg-type]
    assert isinstance(resolve("tp"), ech.TPStrategy)


@pytest.mark.parametrize("text", ["dp_shard=2,tp", "dp=2", "tp=x", "tp=2,tp=2", "tp=2,", "=2", "tp=²"])
def test_text_that_names_no_axis_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="strategy must give each axis once"):
        resolve(text)


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"ep": -1}, {"cp": -2}, {"pp": 1.5}, {"dp_shard": "2"}])
def test_sizes_are_whole_numbers(sizes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ech.Parallel(**sizes).dims(4)


@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_every_rank_has_one_place_and_the_data_are_shared_once(pp: int, copies: int, shards: int, cp: int, tp: int) -> None:
    world = pp * copies * shards * cp * tp
    dims = ParallelDims.of(world, pp=pp, dp_replicate=copies, cp=cp, tp=tp)
    assert dims.dp_shard == shards and dims.size == world
    assert len({tuple(dims.place(rank).items()) for rank in range(world)}) == world
    speakers = [rank for rank in range(world) if dims.speaks(rank)]
    # one for each part of each share of the samples
    assert sorted((dims.dp_rank(r), dims.place(r)["cp"]) for r in speakers) == [
        (d, c) for d in range(dims.dp_size) for c in range(cp)
    ]
    neighbours = [dims.place(rank) for rank in range(tp)]  # a tensor-parallel group
    assert all({**place, "tp": 0} == neighbours[0] for place in neighbours)
