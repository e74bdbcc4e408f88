"""Bytes that an update sends and memory that it holds, per rank, against formulas: on 8 and 64 ranks that do not exist.

N is the number of parameters, R of ranks. Seen by tests/kit/tracing.py.
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

WIDTH, BATCH = 64, 1  # activations are to weigh nothing beside parameters
STEPS = 2  # before those that are looked at: the first sets up, and makes the optimizer's state


class Stack(nn.Module):
    """Equal blocks whose sizes every number of ranks divides; what is before and behind them is small."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(1, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(blocks)
        )
        self.last = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 1) -> (B, 1)
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Unit(Regression):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.AdamW(module.parameters(), foreach=False), None


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


def traced(size: int, *, blocks: int, micro_batches: int = 1, **options: Any) -> tuple[Trace, int]:
    """One update on rank 0 of `size` ranks, and the number of the model's parameters."""
    with fake_world(size):
        torch.manual_seed(0)
        module = Stack(blocks)
        parameters = sum(p.numel() for p in module.parameters())
        unit = Unit(module=module, device=torch.device("cpu"), accumulate=micro_batches, **options)
        data = [(torch.randn(BATCH, 1), torch.randn(BATCH, 1)) for _ in range((STEPS + 1) * micro_batches)]
        looking = Looking(micro_batches)
        ech.train(unit, data, max_epochs=1, callbacks=[looking])
    return looking.trace, parameters


def near(bytes_: int | float, theory: float, within: float = 0.035) -> bool:
    return abs(bytes_ / theory - 1) <= within


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "gathers", "precision", "size", "blocks", "micro_batches"),
    [("fsdp", 2, None, 8, 16, 2), ("fsdp", 2, "bf16", 64, 32, 1), ("zero2", 1, None, 64, 32, 1), ("zero2", 1, "bf16", 8, 16, 2)],
)
def test_bytes_of_an_update(layout: str, gathers: int, precision: str | None, size: int, blocks: int, micro_batches: int) -> None:
    """Parameters are gathered for the forward and again for the backward pass, in the type that they are computed in; zero2
    keeps them in between. Gradients are reduced in float32, after each micro-batch, so that none is ever kept whole.
    """
    trace, n = traced(size, blocks=blocks, micro_batches=micro_batches, layout=layout, precision=precision)
    computed, width = (torch.float32, 4) if precision is None else (torch.bfloat16, 2)
    assert set(trace.gathered) == {computed} and near(trace.gathered[computed], micro_batches * gathers * width * n)
    assert set(trace.reduced) == {torch.float32} and near(trace.reduced[torch.float32], micro_batches * 4 * n)
    assert sum(trace.all_reduced.values()) <= 100, "losses and weights, and what is agreed on as training ends"
    assert sum(trace.cast.values()) < 0.01 * n, "no copies of the parameters in another type"


def of_a_block(precision: str | None) -> int:
    """Bytes a parameter: as it was gathered and as it is used, its gradient, and what goes into the reduce-scatter."""
    return 4 + 4 + 4 + 4 if precision is None else 2 + 2 + 2 + 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "micro_batches", "recomputes"), [(None, 1, False), (None, 2, True), ("bf16", 1, True), ("bf16", 2, False)]
)
def test_memory_of_an_update(precision: str | None, micro_batches: int, recomputes: bool) -> None:
    """A rank holds its shards of parameters, gradients and two moments, in float32: 16 N / R bytes; beside them what belongs to
    one of the L blocks at the height of the backward pass.
    """
    options: dict[str, Any] = {}
    if recomputes:
        options["activation_checkpoint_params"] = ech.layouts.ActivationCheckpointParams(
            check_fn=lambda m: isinstance(m, nn.Sequential)
        )
    trace, n = traced(8, blocks=32, micro_batches=micro_batches, layout="fsdp", precision=precision, **options)
    theory = 16 * n / 8 + of_a_block(precision) * n / 32
    assert near(trace.peak, theory, within=0.05), f"{trace.peak / n:.2f} bytes a parameter, {theory / n:.2f} in theory"


def _all_reduce(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does by itself, which cannot wait for ranks that do not exist."""
    dist.group.WORLD.allreduce([bucket.buffer()])
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.full
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_bytes_and_memory_of_ddp_and_zero1(micro_batches: int) -> None:
    """An all-reduce of the gradients in a window, however many micro-batches it has. zero1 keeps the moments of its part, and
    gives the others the parameters that it computed. While a window is accumulated, its gradients lie beside DDP's buckets.
    """
    ddp = ech.DDPStrategy(comm_hook=lambda _, bucket: _all_reduce(bucket))
    beside = 4 if micro_batches > 1 else 0
    for layout, sent, state in ((ddp, 0, 8), (ddp.but(shard_optimizer=True), 4, 8 / 8)):
        trace, n = traced(8, blocks=32, micro_batches=micro_batches, layout=layout)
        assert near(trace.all_reduced[torch.float32], 4 * n) and not trace.gathered and not trace.reduced
        assert trace.sent[torch.float32] == sent * n
        assert near(trace.peak, (4 + 4 + state + beside) * n, within=0.05), f"{trace.peak / n:.2f} bytes a parameter"


@pytest.mark.full
def test_bytes_and_memory_of_hsdp() -> None:
    """As fsdp on the ranks of one copy; the shards of the gradients are all-reduced over the copies in the last micro-batch."""
    trace, n = traced(64, blocks=32, micro_batches=2, layout=ech.Layout(dp_replicate=-1, dp_shard=8))
    assert near(trace.gathered[torch.float32], 2 * 2 * 4 * n) and near(trace.reduced[torch.float32], 2 * 4 * n)
    assert near(trace.all_reduced[torch.float32], 4 * n / 8)
    theory = 16 * n / 8 + of_a_block(None) * n / 32
    assert near(trace.peak, theory, within=0.05), f"{trace.peak / n:.2f} bytes a parameter, {theory / n:.2f} in theory"


@pytest.mark.full
def test_bytes_and_memory_of_tensor_parallelism() -> None:
    """Of a pair of layers the results are added up in the forward pass, and the gradients of its input in the backward pass."""
    layout = ech.Layout(tp=-1, plan={"blocks.*.0": "colwise", "blocks.*.2": "rowwise"})
    trace, n = traced(8, blocks=32, layout=layout)
    assert near(trace.all_reduced[torch.float32], 2 * 32 * BATCH * WIDTH * 4)
    assert not trace.gathered and not trace.reduced
    assert near(trace.peak, 16 * n / 8, within=0.05), f"{trace.peak / n:.2f} bytes a parameter"


def test_blocks_that_are_kept_after_the_forward_are_gathered_once() -> None:
    half = ech.FSDPStrategy(reshard_after_forward={f"blocks.{i}": False for i in range(8)} | {"blocks.*": True})
    trace, n = traced(8, blocks=16, layout=half)
    assert near(trace.gathered[torch.float32], 1.5 * 4 * n)
