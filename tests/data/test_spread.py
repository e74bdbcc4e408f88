"""Which rank writes which piece of a checkpoint: every piece once, by one that holds it, and all about equally much."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.checkpoint.snapshot import Planned
from echelon.checkpoint.spread import spread
from tests.conftest import Ranks

Listing = list[list[Any]]


def by_definition(listings: list[Listing]) -> dict[tuple[str, tuple[int, ...]], int]:
    """The writer of each piece: large ones first, each by the holder that has least; of a leading tensor by the first holder."""
    holders: dict[Any, list[int]] = {}
    sizes, leading = {}, set()
    for rank, listing in enumerate(listings):
        for name, offsets, extent, _, _, leads in listing:
            holders.setdefault((name, tuple(offsets)), []).append(rank)
            sizes.setdefault((name, tuple(offsets)), 4 * torch.Size(extent).numel())
            leading |= {name} if leads else set()
    load, writers = [0] * len(listings), {}
    for piece in sorted(holders, key=lambda each: (-sizes[each], each)):
        ranks = holders[piece]
        writer = ranks[0] if piece[0] in leading else min(ranks, key=lambda r: (load[r], r))
        load[writer] += sizes[piece]
        writers[piece] = writer
    return writers


def told(listings: list[Listing]) -> tuple[list[Listing], list[int]]:
    different: list[Listing] = []
    of = []
    for listing in listings:
        if listing not in different:
            different.append(listing)
        of.append(different.index(listing))
    return different, of


def writers_of(listings: list[Listing]) -> tuple[dict[tuple[str, tuple[int, ...]], int], dict[str, Any]]:
    writes, index = spread(*told(listings))
    found = {}
    for rank, (listing, bits) in enumerate(zip(listings, writes, strict=True)):
        assert len(bits) == -(-len(listing) // 8)
        for at, (name, offsets, *_) in enumerate(listing):
            if bits[at // 8] >> at % 8 & 1:
                assert (name, tuple(offsets)) not in found, "written twice"
                found[name, tuple(offsets)] = rank
    return found, index


PIECES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=12)


@pytest.mark.full
@given(st.lists(PIECES, min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_each_piece_is_written_once_by_the_holder_that_the_definition_names(kinds: list[Any], of: list[int]) -> None:
    extents: dict[Any, int] = {}
    for kind in kinds:
        for name, begin, extent, _ in kind:
            extents.setdefault((name, begin), extent)
    made = [
        [
            [f"t{name}", [begin * 10], [extents[name, begin]], "torch.float32", [40], leads]
            for (name, begin), leads in {(n, b): leads for n, b, _, leads in kind}.items()
        ]
        for kind in kinds
    ]
    listings = [made[each % len(made)] for each in of]
    found, index = writers_of(listings)
    assert found == by_definition(listings)
    in_index = {
        (name, tuple(offsets)): int(file[len("tensors-") : -len(".safetensors")])
        for name, entry in index.items()
        for offsets, _, file in entry["pieces"]
    }
    assert in_index == found and list(index) == sorted(index)


def test_shards_are_written_by_the_copies_in_turn() -> None:
    """2 copies of 4 shards: rank r holds shard r % 4 of each of 6 tensors."""
    listings = [[[f"t{i}", [r % 4 * 8], [8], "torch.float32", [32], False] for i in range(6)] for r in range(8)]
    found, _ = writers_of(listings)
    assert len(found) == 24 and set(Counter(found.values()).values()) == {3}
    assert all(rank % 4 == begin // 8 for (_, (begin,)), rank in found.items())


def _assigned(listings: list[list[Listing]]) -> list[Any]:
    rank, planned, found = torch.distributed.get_rank(), Planned(), []
    for listing in listings:
        mine, index = planned.assign(listing[rank])
        found.append((sorted(mine), index))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_learn_their_own_part_and_rank_0_the_index(ranks: Ranks, size: int) -> None:
    def piece(name: str, begin: int, extent: int = 2) -> list[Any]:
        return [name, [begin], [extent], "torch.float32", [2 * size], False]

    whole = [piece(f"w{i}", 0, 2 * size) for i in range(9)]
    sharded = [[piece("norm", 0, 2 * size), *(piece(f"w{i}", 2 * rank) for i in range(20))] for rank in range(size)]
    rounds = [[whole] * size, sharded, sharded, [[] for _ in range(size)], [whole, *[[]] * (size - 1)]]
    everyones = ranks(size, _assigned, rounds)
    for at, listings in enumerate(rounds):
        want, index = writers_of(listings)
        assert {piece: rank for rank, told in enumerate(everyones) for piece in told[at][0]} == want
        assert [told[at][1] for told in everyones] == [index] + [{}] * (size - 1)
