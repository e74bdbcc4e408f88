"""What a step sends, holds and computes on ranks that do not exist, against formulas: equal to the byte."""

from __future__ import annotations

import pytest
from bench._fake_stage import trace_stage
from bench._theory import Mixture, narrow, theory, theory_of_stage
from bench.fake_world import Model, _axes, trace
from bench.gpu.llama import Size

import echelon as ech

# 3 blocks; 6 ranks do not divide its rows, so that shards are padded.
TINY = Size(width=32, depth=3, heads=8, kv_heads=4, hidden=64, vocabulary=56, context=16)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, ech.Layout(dp_shard=-1)),
        (6, ech.Layout(dp_shard=-1)),
        (512, ech.Layout(dp_shard=-1)),
        (8, ech.Layout(dp_replicate=2)),
        (8, ech.Layout(tp=2)),
        (16, ech.Layout(dp_replicate=2, tp=4)),
        (4, ech.Layout(cp=2, check_context=False)),
        (16, ech.Layout(cp=4, tp=2, check_context=False)),
        (16, ech.Layout(ep=4)),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.dims(48).used.items()) if isinstance(value, ech.Layout) else None,
)
def test_a_step_sends_holds_and_computes_what_theory_says(ranks: int, layout: ech.Layout) -> None:
    found, said = trace(TINY, ranks, layout), theory(TINY, layout.dims(ranks))
    assert dict(found.message) == said.messages
    assert (found.held_before, found.flops) == (said.held, said.flops)
    # Nothing of the step is left, but what experts count.
    assert found.held - found.held_before == (TINY.depth * 8 * (narrow(TINY).experts + 2) if layout.ep > 1 else 0)
    assert found.peak > found.held


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_sends_holds_and_computes_what_theory_says(stage: int) -> None:
    layout, micro_batches = ech.Layout(dp_shard=-1, tp=2, pp=3), 4
    found, units = trace_stage(Model, TINY, 24, layout, stage, micro_batches, _axes)
    said = theory_of_stage(TINY, layout.dims(24), units, micro_batches)
    assert units == [["tokens", "blocks.0"], ["blocks.1"], ["blocks.2", "norm", "head"]][stage]
    assert dict(found.message) == said.messages
    assert (found.held_before, found.flops) == (said.held, said.flops)


@pytest.mark.full
def test_experts_of_another_shape_are_as_in_theory() -> None:
    mixture, layout = Mixture(experts=32, chosen=2, hidden=24), ech.Layout(dp_shard=-1, ep=8)
    found, said = trace(TINY, 16, layout, mixture), theory(TINY, layout.dims(16), mixture)
    assert dict(found.message) == said.messages and (found.held_before, found.flops) == (said.held, said.flops)
