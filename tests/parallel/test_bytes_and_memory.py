"""Bytes that an update sends and memory that it holds, per rank, against formulas: on 8 and 64 ranks that do not exist.

tests/kit/tracing.py sees them. Of pipelines, experts and parts of sequences test_fake_world.py has the bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from tests.kit.tracing import Trace, fake_world
from tests.kit.units import Regression

WIDTH, BATCH, BLOCKS = 64, 1, 32  # activations are to weigh nothing beside parameters
STEPS = 2  # before those that are looked at: the first sets up, and makes the optimizer's state


class Stack(nn.Module):
    """Equal blocks whose sizes every number of ranks divides; what is before and behind them is small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, WIDTH, bias=False), nn.Linear(WIDTH, 1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 1) -> (B, 1)
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Looking(ech.Callback):
    """Traces the last update."""

    def __init__(self, micro_batches: int) -> None:
        self.trace, self.before = Trace(), STEPS * micro_batches

    def on_train_step_start(self, state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == self.before:
            states = [v for s in unit.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
            self.trace.keeps(*(getattr(t, "to_local", lambda t=t: t)() for t in (*unit.module.parameters(), *states)))
            self.trace.__enter__()

    def on_train_end(self, state: ech.State, unit: Any) -> None:
        self.trace.__exit__(None, None, None)


def _all_reduce(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does by itself, which cannot wait for ranks that do not exist."""
    dist.group.WORLD.allreduce([bucket.buffer()])
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


DDP = ech.DDPStrategy(comm_hook=lambda _, bucket: _all_reduce(bucket))
LAYOUTS: dict[str, Any] = {
    "fsdp": "fsdp",
    "zero2": "zero2",
    "zero2 by its older name": ech.FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"),
    "half kept": ech.FSDPStrategy(reshard_after_forward={f"blocks.{i}": False for i in range(BLOCKS // 2)} | {"blocks.*": True}),
    "hsdp": ech.Layout(dp_replicate=-1, dp_shard=8),
    "ddp": DDP,
    "zero1": DDP.but(shard_optimizer=True),
    "tp": ech.Layout(tp=-1, plan={"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}),
}

# All in bytes a parameter. Parameters are gathered for the forward and again for the backward pass, in the type that they are
# computed in; zero2 keeps them in between. Gradients are reduced in float32 after each micro-batch, so that none is kept whole;
# over copies, and under ddp, once in a window. zero1 gives the others the parameters that it computed. Of a pair of tp's layers
# results are added up in the forward pass, and gradients of the input in the backward pass.
#
# A rank holds its shards of parameters, gradients and two moments in float32; beside them what belongs to one block at the height
# of the backward pass: as it was gathered and as it is used, its gradient, and what goes into the reduce-scatter. While a window
# is accumulated, its gradients lie beside DDP's buckets.
SHARDS, FULL, IN_HALF = 16 / 8, (4 + 4 + 4 + 4) / BLOCKS, (2 + 2 + 2 + 4) / BLOCKS
# The layout, ranks, micro-batches, precision, whether it recomputes; gathered, reduced, all-reduced, sent, held.
CASES: list[tuple[str, int, int, str | None, bool, float, float, float, float, float | None]] = [
    ("fsdp", 8, 1, None, False, 8, 4, 0, 0, SHARDS + FULL),
    ("fsdp", 8, 2, None, True, 16, 8, 0, 0, SHARDS + FULL),
    ("fsdp", 8, 1, "bf16", True, 4, 4, 0, 0, SHARDS + IN_HALF),
    ("fsdp", 8, 2, "bf16", False, 8, 8, 0, 0, SHARDS + IN_HALF),
    ("fsdp", 64, 1, "bf16", False, 4, 4, 0, 0, None),
    ("zero2", 64, 1, None, False, 4, 4, 0, 0, None),
    ("zero2 by its older name", 8, 2, "bf16", False, 4, 8, 0, 0, None),
    ("half kept", 8, 1, None, False, 6, 4, 0, 0, None),
    ("hsdp", 64, 2, None, False, 16, 8, 4 / 8, 0, SHARDS + FULL),
    ("ddp", 8, 1, None, False, 0, 0, 4, 0, 4 + 4 + 8),
    ("ddp", 8, 2, None, False, 0, 0, 4, 0, 4 + 4 + 8 + 4),
    ("zero1", 8, 1, None, False, 0, 0, 4, 4, 4 + 4 + 8 / 8),
    ("zero1", 8, 2, None, False, 0, 0, 4, 4, 4 + 4 + 8 / 8 + 4),
    ("tp", 8, 1, None, False, 0, 0, 2 * BATCH * 4 / (2 * WIDTH), 0, SHARDS),
]


def near(bytes_: float, theory: float, within: float = 0.035) -> bool:
    return abs(bytes_ - theory) <= within * theory


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case[:5])))
def test_bytes_and_memory_of_an_update(case: tuple[Any, ...]) -> None:
    layout, size, micro_batches, precision, recomputes, gathered, reduced, all_reduced, sent, held = case
    recompute = ech.layouts.ActivationCheckpointParams(check_fn=lambda m: isinstance(m, nn.Sequential)) if recomputes else None
    with fake_world(size):
        torch.manual_seed(0)
        options: dict[str, Any] = {"precision": precision, "recompute": recompute, "accumulate": micro_batches}
        options["optimizer"] = lambda module: torch.optim.AdamW(module.parameters(), foreach=False)
        unit = Regression(module=Stack(), layout=LAYOUTS[layout], **options)
        n = sum(p.numel() for p in Stack().parameters())
        data = [(torch.randn(BATCH, 1), torch.randn(BATCH, 1)) for _ in range((STEPS + 1) * micro_batches)]
        looking = Looking(micro_batches)
        ech.train(unit, data, max_epochs=1, callbacks=[looking])
    trace, computed = looking.trace, torch.float32 if precision is None else torch.bfloat16
    assert set(trace.gathered) <= {computed} and set(trace.reduced) <= {torch.float32}
    assert near(trace.gathered[computed], gathered * n) and near(trace.reduced[torch.float32], reduced * n)
    assert trace.sent[torch.float32] == sent * n
    if all_reduced:
        assert near(trace.all_reduced[torch.float32], all_reduced * n)
    else:
        assert sum(trace.all_reduced.values()) <= 100, "losses and weights, and what is agreed on as training ends"
        assert sum(trace.cast.values()) < 0.01 * n, "no copies of the parameters in another type"
    assert held is None or near(trace.peak, held * n, within=0.05), f"{trace.peak / n:.2f} bytes a parameter"
