"""Buffers: every layout evaluates one function, the one that ddp evaluates, and checkpoints hold it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.compat.torchtnt.framework import fit as fit_by_steps
from tests.conftest import Ranks
from tests.kit.models import Batch, batch, largest_difference, whole
from tests.kit.units import Hooks, Own, Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")
PARALLEL = ("ddp", "zero1", "fsdp", "zero2", "hsdp")


class Queue(nn.Module):
    """Of the newest rows, as contrastive learning keeps them; it takes part in the forward pass. Counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 6))
        self.register_buffer("full", torch.tensor(False))
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x + 0.1 * self.rows.mean(0) + self.table
        if self.training:
            self.rows = torch.cat([x.detach()[:2], self.rows])[:4]  # another tensor each time
            self.passes += 1
            self.full.fill_(bool(self.passes > 2))
        return out


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2))
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)
        self.queue = Queue()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.queue(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x[:, None])[:, 0])


def _unit(layout: Any, **options: Any) -> Regression:
    return Regression(module=Norms().double(), layout=layout, lr=0.02, **options)


def _buffers(unit: Any) -> dict[str, torch.Tensor]:
    return {n: b.detach().double().clone() for n, b in unit.prepared.unwrapped.named_buffers()}


def _outputs(unit: Any) -> dict[str, torch.Tensor]:
    """What it computes now on the same rows: on all ranks the same, if it is the same function."""
    unit.module.eval()
    with torch.no_grad():
        return {"out": unit.module(batch(3, 99)[0]).clone()}


def _rows(count: int) -> list[Batch]:
    return [batch(3 + dist.get_rank(), 10 * i + dist.get_rank()) for i in range(count)]


def _fit(layouts: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    done = {}
    for layout in layouts:
        unit, seen, losses = _unit(layout, **options), list[dict[str, torch.Tensor]](), list[float]()
        unit.on_eval_step_end = lambda state, data, step, loss, outputs, losses=losses: losses.append(float(loss))
        # Every evaluation's buffers and loss, as its last step had them.
        look = Hooks(on_eval_end=lambda _, u, seen=seen: seen.append({**_buffers(u), "loss": torch.tensor(u.eval_loss)}))
        same = [batch(3, 500 + i) for i in range(2)]  # the same rows on all ranks: so the losses are the function's
        # TorchTNT's counts micro-batches: in the middle of a window as well as at its end.
        fit = (
            partial(fit_by_steps, evaluate_every_n_steps=3)
            if "accumulate" in options
            else partial(ech.fit, evaluate_every_n_updates=3)
        )
        fit(unit, _rows(7), same, max_epochs=1, evaluate_every_n_epochs=None, callbacks=[look])
        assert len(seen) == 2
        after = _outputs(unit)  # the forward pass of which makes the buffers equal
        told = {"losses": torch.tensor(losses, dtype=torch.float64)}
        done[str(layout)] = seen, told | whole(unit.module), after, _buffers(unit)
    return done


def _alike(first: dict[str, Any], second: dict[str, Any], like: str) -> None:
    for layout, (evaluations, parameters, out, buffers) in first.items():
        want, want_parameters, want_out, want_buffers = first[like]
        others, other_parameters, other_out, other_buffers = second[layout]
        assert largest_difference(parameters, other_parameters) == 0, layout
        for mine, theirs, right in zip(evaluations, others, want, strict=True):
            assert largest_difference(mine, theirs) == 0, layout
            assert largest_difference(mine, right) < 1e-11, layout
        assert largest_difference(parameters, want_parameters) < 1e-11, layout
        assert largest_difference(out, other_out) == 0 and largest_difference(out, want_out) < 1e-11, layout
        assert largest_difference(buffers, other_buffers) == 0 and largest_difference(buffers, want_buffers) < 1e-11, layout


class _BeginsWithout(nn.Module):
    """Its only buffer is None until it has seen rows."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen = x.detach().mean(0)
            self.mean = seen if self.mean is None else 0.9 * self.mean + 0.1 * seen
        return self.last(x - self.mean)


def _begins_without(layout: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    unit = Regression(module=_BeginsWithout().double(), layout=layout, lr=0.02)
    ech.train(unit, _rows(4), max_epochs=1)
    return _outputs(unit) | _buffers(unit)


@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp"])
def test_a_buffer_that_begins_as_none_is_one_function_too(ranks: Ranks, layout: str) -> None:
    first, second = ranks(2, _begins_without, layout)
    assert first.keys() == second.keys() == {"out", "mean"} and largest_difference(first, second) == 0


class _Repeats(nn.Module):
    """Its buffers are a table of positions as PyTorch's tutorial makes it, and one number for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)
        self.register_buffer("positions", torch.arange(20.0).view(5, 4).unsqueeze(0).transpose(0, 1).double())
        self.register_buffer("scale", torch.tensor(2).expand(4))  # torch broadcasts each dtype by itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x * self.scale + self.positions[0])


def _resumed(folder: str, layouts: Sequence[str]) -> list[float]:
    differences = []
    for layout in layouts:
        torch.manual_seed(0)
        units = [Regression(module=_Repeats().double(), layout=layout, lr=1e-5) for _ in range(2)]
        ech.train(units[0], [batch(3, i) for i in range(2)], max_epochs=1, checkpoints=f"{folder}/{layout}")
        ech.DistributedCheckpointSaver.restore_from_latest(f"{folder}/{layout}", units[1])
        differences.append(largest_difference(*(_buffers(unit) | whole(unit.module) for unit in units)))
    return differences


def test_buffers_that_repeat_their_elements_are_broadcast_and_restored(ranks: Ranks, tmp_path: Path) -> None:
    assert _resumed(str(tmp_path), ["none"]) == [0]
    assert ranks(2, _resumed, str(tmp_path), ["ddp", "local_sgd", "fsdp"]) == [[0] * 3] * 2


def _left_by_training() -> dict[str, dict[str, torch.Tensor]]:
    left = {}
    for layout in PARALLEL:
        unit = _unit(layout)
        ech.train(unit, _rows(4), max_epochs=1)
        left[layout] = _buffers(unit)
    return left


def test_ranks_have_the_same_buffers_when_training_has_ended(ranks: Ranks) -> None:
    """Each had what its own rows of the last step made of them."""
    first, second = ranks(2, _left_by_training)
    for layout in PARALLEL:
        assert largest_difference(first[layout], second[layout]) == 0, layout


# TorchTNT's fit counts micro-batches: where they accumulate, in the middle of a window, too.
@pytest.mark.full
@pytest.mark.parametrize(
    ("layouts", "options"),
    [
        (PARALLEL, {}),
        (("ddp", "zero1"), {"accumulate": 2}),
        (("fsdp", "hsdp"), {"accumulate": 2}),
    ],
)
def test_every_strategy_evaluates_with_the_buffers_that_ddp_has(
    ranks: Ranks, layouts: tuple[str, ...], options: dict[str, Any]
) -> None:
    _alike(*ranks(2, _fit, layouts, options), like=layouts[0])


@pytest.mark.full
def test_averaged_buffers_are_one_function_too(ranks: Ranks) -> None:
    averages = {"swa_params": ech.units.SWAParams(0, 1, use_in_evaluation=True), "step_lr_interval": "step"}
    first, second = ranks(2, _fit, ["ddp", "fsdp"], averages)
    for layout, (_, losses, *_) in first.items():
        assert largest_difference(losses, second[layout][1]) == 0, layout
        assert largest_difference(losses, first["ddp"][1]) < 1e-11, layout


def _by_hand() -> list[dict[str, torch.Tensor]]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    module = ech.layouts.prepare_fsdp(Norms().double(), CPU)
    own = Own(module, torch.optim.SGD(module.parameters(), lr=0.02))
    ech.train(own, _rows(4), max_epochs=1)
    found = [_outputs(own)]
    for wrap in (fully_shard, lambda m: FullyShardedDataParallel(m, device_id=CPU)):
        module = Norms().double()
        module.queue.table += dist.get_rank()  # that nobody made equal yet
        unit = Regression(module=wrap(module), lr=0.02)
        ech.train(unit, _rows(4), max_epochs=1)
        found.append(_outputs(unit))
    return found


@pytest.mark.full
def test_modules_that_were_sharded_by_hand_too(ranks: Ranks) -> None:
    first, second = ranks(2, _by_hand)
    for mine, theirs in zip(first, second, strict=True):
        assert largest_difference(mine, theirs) == 0
    assert largest_difference(first[1], first[2]) < 1e-11


def _saved(folder: str, layout: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Saved right after a step, when each rank has taken its own rows into account; and read again by all."""
    unit = _unit(layout, swa_params=ech.units.SWAParams(0, 1), step_lr_interval="step")
    ech.train(unit, _rows(3), max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder)])
    again = _unit("ddp", swa_params=ech.units.SWAParams(0, 1), step_lr_interval="step")
    ech.DistributedCheckpointSaver.restore_from_latest(folder, again)

    def buffers(unit: Any) -> dict[str, torch.Tensor]:
        averaged = {n: t.double().clone() for n, t in unit.swa_model.state_dict().items() if n.startswith("buffers.")}
        return _buffers(unit) | averaged

    return buffers(unit), buffers(again)


@pytest.mark.full
def test_a_checkpoint_holds_the_first_ranks_buffers_all_of_them(ranks: Ranks, tmp_path: Path) -> None:
    """Not some of each rank's: a mean from one and a variance from another belong to no data."""
    for i, layout in enumerate(("ddp", "fsdp", ech.DDPStrategy(broadcast_buffers=False))):
        (mine, read), (theirs, _) = ranks(2, _saved, str(tmp_path / str(i)), layout)
        assert largest_difference(mine, theirs) > 0
        assert largest_difference(mine, read) == 0, layout


class Table(Norms):
    """Its one buffer is a table that nobody changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.norm = self.queue = nn.Identity()
        self.register_buffer("table", torch.arange(6.0))


def _traffic() -> int:
    unit = Regression(module=Table().double(), layout="fsdp")
    watched = mock.patch("torch.distributed.broadcast", side_effect=dist.broadcast)
    sent: list[Any] = []
    ech.train(unit, _rows(5), max_epochs=1, callbacks=[Hooks(on_train_start=lambda *_: sent.append(watched.start()))])
    watched.stop()
    return sent[0].call_count


@pytest.mark.full
def test_what_never_changes_is_never_sent(ranks: Ranks) -> None:
    assert ranks(2, _traffic) == [0, 0]
