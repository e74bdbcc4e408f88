"""Workers that meet every so many updates: the averages of plain PyTorch, checkpoints at any step, what is shown, errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import CheckpointCorruptError
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, seeded, whole
from tests.kit.refusals import refusal, refused
from tests.kit.units import Hooks, Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")
UPDATES = 20
DATA = torch.utils.data.TensorDataset(*batch(24, 0))


def _rows(update: int, micro: int, rank: int) -> int:
    """Of each micro-batch: other numbers for each rank and update."""
    return 2 + (update + 2 * micro + rank) % 3


def _batches(rank: int, even: bool) -> list[list[Any]]:
    """[update][micro-batch]; the last update has one alone."""
    made = [[batch(3 if even else _rows(u, m, rank), 1000 * rank + 2 * u + m) for m in range(2)] for u in range(UPDATES)]
    made[-1].pop()
    return made


def _optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "SGD":
        return torch.optim.SGD(parameters, 0.1)
    return torch.optim.SGD(parameters, 0.05, momentum=0.9) if kind == "momentum" else torch.optim.AdamW(parameters, 0.01)


def _plain(
    ranks: int, every: int, kind: str, clip: float, outer: Callable[[Any], torch.optim.Optimizer] | None
) -> dict[str, torch.Tensor]:
    """One process of plain PyTorch computes all workers in turn."""
    workers = [net() for _ in range(ranks)]
    optimizers = [_optimizer(kind, worker.parameters()) for worker in workers]
    anchor = [nn.Parameter(p.detach().clone()) for p in workers[0].parameters()]
    outside = outer(anchor) if outer is not None else None
    seen = [0] * ranks
    for u in range(UPDATES):
        for r, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            x, y = (torch.cat(parts) for parts in zip(*_batches(r, False)[u], strict=True))
            nn.functional.mse_loss(worker(x), y).backward()
            nn.utils.clip_grad_norm_(worker.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            seen[r] += len(x)
        if (u + 1) % every == 0 or u + 1 == UPDATES:
            with torch.no_grad():
                for i, start in enumerate(anchor):
                    mine = [list(worker.parameters())[i] for worker in workers]
                    mean = sum(p * n for p, n in zip(mine, seen, strict=True)) / sum(seen)
                    start.grad = start - mean
                    if outside is None:
                        start.copy_(mean)
                if outside is not None:
                    outside.step()
                for worker in workers:
                    for p, start in zip(worker.parameters(), anchor, strict=True):
                        p.copy_(start)
            seen = [0] * ranks
    return whole(workers[0])


class Unit(Regression):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return _optimizer(self.kind, module.parameters()), None


class Uneven(Unit):
    """Weighs its batches unlike the other worker, and each unlike the one before."""

    def weight(self, data: Any) -> float:
        return float(data[0].abs().sum())


def _ours(layout: Any, kind: str, even: bool, clip: float) -> dict[str, torch.Tensor]:
    unit = Unit(module=net(), layout=layout, optimizer=kind, accumulate=2, clip_grad_norm=clip)
    ech.train(unit, [b for window in _batches(unit.prepared.data.rank, even) for b in window], max_epochs=1)
    return whole(unit.module)


OUTER: dict[str, Any] = {
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
WITH_ADAMW = ech.layouts.DiLoCoStrategy(every=4, outer_optimizer=OUTER["adamw"])
# The layout, every how many updates it meets, its outer optimizer, that of the workers, and the norm to clip to.
CASES: dict[str, tuple[Any, int, Any, str, float]] = {
    "average every third": (ech.layouts.LocalSGDStrategy(every=3), 3, None, "AdamW", 0.3),
    "average every seventh, momentum": (ech.layouts.LocalSGDStrategy(every=7), 7, None, "momentum", float("inf")),
    "diloco": (ech.layouts.DiLoCoStrategy(every=4), 4, OUTER["nesterov"], "AdamW", 0.3),
    "diloco with adamw outside": (WITH_ADAMW, 4, OUTER["adamw"], "AdamW", float("inf")),
}


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_twenty_updates_are_those_of_plain_workers(ranks: Ranks, size: int) -> None:
    """With accumulation, micro-batches of other sizes on each rank, clipping, a short last window."""
    for case, (layout, every, outer, kind, clip) in CASES.items():
        want = _plain(size, every, kind, clip, outer)
        for got in ranks(size, _ours, layout, kind, False, clip):
            assert largest_difference(got, want) < 1e-11, case


# --- what travels


def _messages(layout: Any, updates: int) -> int:
    """Collectives of a run, by whomever."""
    unit = Unit(module=net(), layout=layout, optimizer="SGD")
    unit.may_stop = False  # its hook asks for no stop, so no step waits for an answer
    names = ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_into_tensor")
    with contextlib.ExitStack() as patches:
        counted = [patches.enter_context(mock.patch(f"torch.distributed.{n}", side_effect=getattr(dist, n))) for n in names]
        ech.train(unit, [batch(4, i) for i in range(updates)], max_epochs=1)
    return sum(each.call_count for each in counted)


@pytest.mark.full
def test_nothing_travels_between_meetings(ranks: Ranks) -> None:
    """Twenty updates more send as little as ten: what a run sends when it begins and ends."""
    few, many = (ranks(2, _messages, ech.layouts.LocalSGDStrategy(every=100), n) for n in (10, 30))
    assert few[0] > 0
    assert few == many
    assert ranks(2, _messages, ech.layouts.LocalSGDStrategy(every=1), 10)[0] >= few[0] + 9


# --- checkpoints


def _train(folder: Path | None, layout: Any, steps: int) -> dict[str, torch.Tensor]:
    unit = Uneven(module=net(), layout=layout, optimizer="AdamW")
    saver = [ech.DistributedCheckpointSaver(folder, save_every_n_updates=1)] if folder is not None else []
    ech.train(unit, ech.Loader(DATA, 8, seed=1), max_updates=steps, callbacks=saver)
    return whole(unit.module)


def _resume(folder: Path, step: int, layout: Any, steps: int = 0) -> dict[str, torch.Tensor]:
    unit, loader = Uneven(module=net(7), layout=layout, optimizer="AdamW"), ech.Loader(DATA, 8, seed=1)
    ech.DistributedCheckpointSaver.restore(str(folder / f"step-{step:08d}"), unit, train_dataloader=loader)
    if steps:
        ech.train(unit, loader, max_updates=steps)
    return whole(unit.module)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [ech.layouts.LocalSGDStrategy(every=3), ech.layouts.DiLoCoStrategy(every=3)], ids=["average", "diloco"]
)
def test_a_resumed_run_is_bit_equal_at_any_step(ranks: Ranks, tmp_path: Path, layout: Any) -> None:
    """Between two meetings, at one, and with the meeting at the end; saving changes nothing."""
    want = ranks(2, _train, None, layout, 8)
    assert all(torch.equal(want[0][n], want[1][n]) for n in want[0])
    saved = ranks(2, _train, tmp_path, layout, 8)
    assert all(torch.equal(want[0][n], saved[0][n]) for n in want[0])
    for step in (2, 3, 4, 7):
        for got in ranks(2, _resume, tmp_path, step, layout, 8):
            assert all(torch.equal(got[n], want[0][n]) for n in got), step


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [ech.layouts.LocalSGDStrategy(every=5), ech.layouts.DiLoCoStrategy(every=5)], ids=["average", "diloco"]
)
def test_a_checkpoint_holds_what_a_meeting_would_have_given(ranks: Ranks, tmp_path: Path, layout: Any) -> None:
    """The end of training is a meeting: that of a run which ends there. Other layouts and numbers of ranks read it."""
    ranks(2, _train, tmp_path, layout, 8)
    for step in (3, 7):
        want = ranks(2, _train, None, layout, step)[0]
        for size, reader in ((1, "none"), (2, "fsdp"), (4, layout)):
            got = ranks(size, _resume, tmp_path, step, reader)[0]
            assert all(torch.equal(got[n], want[n]) for n in want), (step, reader)


class Caching(nn.Module):
    """Its table is made in the first forward pass and grows with what it is asked, as that of rotary embeddings does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.rows = net(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.rows:
            self.rows = len(x)
            self.register_buffer("table", torch.arange(self.rows).double(), persistent=False)
        return self.net(x) + 0.1 * self.table[: len(x), None]


def _cached(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Trained from that step on, evaluated between two meetings with a longer batch than any before, and trained with that."""
    unit, loader = (
        Unit(module=Caching(), layout=ech.layouts.LocalSGDStrategy(every=3), optimizer="SGD"),
        ech.Loader(DATA, 8, seed=1),
    )
    if step:
        ech.DistributedCheckpointSaver.restore(str(folder / f"step-{step:08d}"), unit, train_dataloader=loader)
    saver = ech.DistributedCheckpointSaver(folder / f"from-{step}" if step else folder, save_every_n_updates=1)
    ech.fit(unit, loader, [batch(7, 0)], max_updates=5, evaluate_every_n_updates=5, callbacks=[saver])
    ech.train(unit, [batch(7, 1)], max_epochs=unit.train_progress.num_epochs_completed + 1)
    return whole(unit.module)


def test_a_buffer_that_a_pass_makes_or_lets_grow_is_no_obstacle(ranks: Ranks, tmp_path: Path) -> None:
    """A run could not be resumed between two meetings; what an evaluation had let grow was cut again."""
    want = ranks(2, _cached, tmp_path, 0)[0]
    assert largest_difference(ranks(2, _cached, tmp_path, 4)[0], want) == 0


VALID: dict[str, Any] = {"since": 1, "weight": 4.0, "values": {}, "optimizer": {}, "anchor": {}, "outer": {}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"since": "1"},
        {"since": -1},
        {"weight": float("nan")},
        {"values": {"last.weight": torch.zeros(2, 8)}},
        {"anchor": {"no": torch.zeros(1)}},
        {"anchor": {"first.weight": 3}},
        {"outer": {"state": 3}},
    ],
)
def test_a_forged_state_of_a_worker_is_refused(wrong: dict[str, Any]) -> None:
    unit = Unit(module=net(), layout="diloco", optimizer="SGD")
    unit.configure()
    unit.prepared.extras.load_state_dict({"worker": VALID})
    with refused(CheckpointCorruptError):
        unit.prepared.extras.load_state_dict({"worker": VALID | wrong})


# --- evaluation


def _evaluated(layout: Any, evaluates: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    unit, seen = Unit(module=net(), layout=layout, optimizer="AdamW"), list[Any]()
    looks = Hooks(on_eval_step_end=lambda state, unit: seen.append(whole(unit.module)))
    loader, other = ech.Loader(DATA, 8, seed=1), ech.Loader(DATA, 24)
    if evaluates:
        ech.fit(unit, loader, other, max_updates=8, evaluate_every_n_updates=2, callbacks=[looks])
    else:
        ech.train(unit, loader, max_updates=8)
    return seen, whole(unit.module)


@pytest.mark.full
def test_all_ranks_evaluate_the_same_and_train_on_with_their_own(ranks: Ranks) -> None:
    layout = ech.layouts.DiLoCoStrategy(every=3)
    (first, end), (second, _) = ranks(2, _evaluated, layout, True)
    assert len(first) == len(second) > 3
    assert all(torch.equal(a[n], b[n]) for a, b in zip(first, second, strict=True) for n in a)
    assert any(not torch.equal(first[0][n], first[1][n]) for n in first[0])
    _, plain = ranks(2, _evaluated, layout, False)[0]
    assert all(torch.equal(end[n], plain[n]) for n in end)


# --- the rest


def _stop(layout: Any) -> int:
    """Rank 1 alone asks to stop, in its second step."""

    class Stops(Unit):
        may_stop = False

        def compute_loss(self, state: ech.State, data: Any) -> Any:
            if self.prepared.data.rank == 1 and self.train_progress.num_steps_completed == 1:
                state.stop()
            return super().compute_loss(state, data)

    unit = Stops(module=net(), layout=layout, optimizer="SGD")
    ech.train(unit, [batch(4, i) for i in range(20)], max_epochs=1)
    return unit.train_progress.num_steps_completed


def test_a_stop_is_agreed_on_at_the_next_meeting(ranks: Ranks) -> None:
    assert ranks(2, _stop, ech.layouts.LocalSGDStrategy(every=4)) == [4, 4]


def _tail(layout: Any) -> dict[str, torch.Tensor]:
    """Five samples in batches of four: the second update has one sample, and rank 1 none."""
    unit = Unit(module=net(), layout=layout, optimizer="SGD")
    ech.train(unit, ech.Loader(torch.utils.data.Subset(DATA, range(5)), 4), max_epochs=2)
    return whole(unit.module)


@pytest.mark.full
def test_a_worker_without_samples_counts_nothing(ranks: Ranks) -> None:
    want = ranks(2, _tail, "ddp")
    for got in ranks(2, _tail, ech.layouts.LocalSGDStrategy(every=1)):
        assert largest_difference(got, want[0]) < 1e-12


def _buffers() -> tuple[torch.Tensor, torch.Tensor, int]:
    module = seeded(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
    unit = Unit(module=module, layout=ech.layouts.LocalSGDStrategy(every=2), optimizer="SGD")
    rank = unit.prepared.data.rank
    batches = [batch(4, 10 * rank + i) for i in range(2)]
    ech.train(unit, batches, max_epochs=1)
    alone = nn.BatchNorm1d(4).double()
    for x, _ in batches:
        alone(x)
    norm = unit.prepared.unwrapped[0]
    return alone.running_mean, norm.running_mean.clone(), int(norm.num_batches_tracked)


def test_buffers_are_averaged(ranks: Ranks) -> None:
    (a, got, count), (b, other, _) = ranks(2, _buffers)
    assert torch.allclose(got, (a + b) / 2, atol=1e-12, rtol=0)
    assert torch.equal(got, other)
    assert count == 2


def test_what_makes_no_sense_is_refused(ranks: Ranks) -> None:
    options: dict[str, dict[str, Any]] = {
        "precision must not be 'fp16' under 'diloco'": {"precision": "fp16"},
        "ema must be None under 'diloco'": {"swa_params": ech.units.SWAParams(1, 1)},
        "bit-equal training must have a layout with one axis": {"deterministic": "bitwise"},
    }
    for said in ranks(2, lambda: [refusal(Unit, module=net(), layout="diloco", **each) for each in options.values()]):
        assert [words for words, text in zip(options, said, strict=True) if words not in text] == []
    for text in ranks(2, refusal, ech.layouts.prepare_module, net(), CPU, layout="local_sgd"):
        assert "prepare_module must have a layout without cp, pp and local SGD" in text


def test_one_process_trains_as_ever() -> None:
    want = _ours(None, "AdamW", True, 0.3)
    assert largest_difference(_ours("local_sgd", "AdamW", True, 0.3), want) == 0
