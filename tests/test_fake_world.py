"""What a step sends, holds and computes on ranks that do not exist, against formulas: equal to the byte."""

from __future__ import annotations

import pytest
from bench._theory import EXPERTS, theory
from bench.fake_world import trace
from bench.gpu.llama import Size

import echelon as ech

# 3 blocks; 6 ranks do not divide its rows, so that shards are padded.
TINY = Size(width=32, depth=3, heads=8, kv_heads=4, hidden=64, vocabulary=56, context=16)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (4, ech.Parallel(dp_shard=-1)),
        (6, ech.Parallel(dp_shard=-1)),
        (512, ech.Parallel(dp_shard=-1)),
        (8, ech.Parallel(dp_replicate=2)),
        (8, ech.Parallel(tp=2)),
        (16, ech.Parallel(dp_replicate=2, tp=4)),
        (4, ech.Parallel(cp=2, check_context=False)),
        (16, ech.Parallel(cp=4, tp=2, check_context=False)),
        (16, ech.Parallel(ep=4)),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.dims(48).used.items()) if isinstance(value, ech.Parallel) else None,
)
def test_a_step_sends_holds_and_computes_what_theory_says(ranks: int, strategy: ech.Parallel) -> None:
    found, said = trace(TINY, ranks, strategy), theory(TINY, strategy.dims(ranks))
    assert dict(found.message) == said.messages
    assert (found.held_before, found.flops) == (said.held, said.flops)
    # Nothing of the step is left, but what experts count.
    assert found.held - found.held_before == (TINY.depth * 8 * (EXPERTS + 2) if strategy.ep > 1 else 0)
    assert found.peak > found.held
