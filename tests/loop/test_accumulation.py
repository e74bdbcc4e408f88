"""Accumulation under `fully_shard`: what a rank keeps and sends before a window's last micro-batch, and the same numbers."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import UsageError
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, plain_training, whole
from tests.kit.tracing import Trace
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

WINDOW = 3
STEPS = 5  # the last window has two


class _Measured(Regression):
    """Notes what its window keeps after the first micro-batch, and what its first window sends: reduced, and all-reduced."""

    kept = 0
    sent: tuple[int, int] = (0, 0)

    def train_step(self, state: ech.State, data: Any) -> Any:
        at = self.train_progress.num_steps_completed
        if at == 0:
            self.before, self.trace = _living(), Trace()
            self.trace.__enter__()
        made = super().train_step(state, data)
        if at == 0:
            self.kept = _living() - self.before
        elif at == WINDOW - 1:
            self.trace.__exit__(None, None, None)
            self.sent = self.trace.reduced.total(), self.trace.all_reduced.total()
        return made


def _living() -> int:
    """Bytes of all tensors, once threads have let go: gloo's holds a gathered unit for a moment after `wait` returned."""
    gc.collect()
    least: list[int] = []
    for _ in range(10):
        storages = {}
        for each in gc.get_objects():
            if isinstance(each, torch.Tensor) and not each.is_meta:
                local = each.to_local() if hasattr(each, "to_local") else each
                storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        least.append(sum(storages.values()))
        time.sleep(0.01)
    return min(least)


def _mine(unit: ech.AutoUnit[Any], steps: int = STEPS, rows: int = 8) -> list[Any]:
    rank, size = unit.prepared.data.rank, unit.prepared.data.size
    return [tuple(t.chunk(size)[rank] for t in batch(rows, i)) for i in range(steps)]


LATER: Any = {"requires_gradient_sync": False}
HYBRID: Any = {"sharding_strategy": "HYBRID_SHARD"}
# Of each: how often the gradients are reduced and scattered in a window, in sizes of the model, and how much of them is
# all-reduced; None: not looked at.
LAYOUTS: dict[str, tuple[Any, list[float | None]]] = {
    "fsdp": ("fsdp", [3.0, None]),
    "fsdp, later": (ech.FSDPStrategy(**LATER), [1.0, 0.0]),
    "zero2": ("zero2", [3.0, None]),
    "hsdp": ("hsdp", [3.0, 0.5]),
    "hsdp, later": (ech.FSDPStrategy(**HYBRID, **LATER), [1.0, 0.5]),
    "hsdp, at once": (ech.FSDPStrategy(**HYBRID, requires_all_reduce=True), [3.0, 1.5]),
    "tp x fsdp": (ech.Layout(tp=2), [None, None]),
}


def _measure_all() -> dict[str, Any]:
    found = {}
    for name, (layout, _) in LAYOUTS.items():
        unit = _Measured(module=net(width=64), layout=layout, accumulate=WINDOW)
        ech.train(unit, _mine(unit), max_epochs=1)
        found[name] = {"kept": unit.kept, "sent": unit.sent, "values": whole(unit.module)}
    return found


@pytest.mark.full
def test_a_rank_keeps_its_shards_of_the_gradients_and_the_numbers_are_the_same(ranks: Ranks) -> None:
    found = ranks(4, _measure_all)
    size = sum(p.numel() for p in Net(width=64).parameters()) * 8  # float64
    plain, _, _ = plain_training([[batch(8, i) for i in steps] for steps in (range(3), range(3, 5))], module=net(width=64))
    for got in found:
        for name, seen in got.items():
            assert largest_difference(seen["values"], plain) < 1e-9, name
    for name, seen in found[0].items():
        # Of the whole gradients: one where nothing travels yet, else shards, and some small change.
        shards = 1.0 if "later" in name else 0.5 if "hsdp" in name else 0.25
        assert shards - 0.02 < seen["kept"] / size < shards + 0.12, name
        wanted = LAYOUTS[name][1]
        sent = [round(each / size, 1) for each in seen["sent"]]
        assert [is_ if want is not None else None for is_, want in zip(sent, wanted, strict=True)] == wanted, name


class _Takes(nn.Module):
    """Two heads of one shape in the root, or two equal blocks, or two layers of the root; a batch says which is used."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = net(dtype=dtype)
        if kind == "blocks":
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2))
        elif kind == "heads":
            self.heads = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        else:
            self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)
        self.to(dtype)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        parts = getattr(self, "blocks", None) or getattr(self, "heads", None) or (self.first, self.second)
        return parts[which](self.body(x))


def _chosen(layout: Any, heads: list[int], kind: str = "heads", precision: str | None = None, accumulate: int = 2) -> Any:
    """The parameters, or what it was refused with."""
    dtype = torch.float64 if precision is None else torch.float32

    def loss(module: nn.Module, data: Any) -> torch.Tensor:
        return nn.functional.mse_loss(module(data[0], data[2]), data[1])

    unit = Regression(module=_Takes(kind, dtype), layout=layout, accumulate=accumulate, precision=precision, loss=loss)
    data = [(*(t.to(dtype) for t in rows), head) for rows, head in zip(_mine(unit, len(heads)), heads, strict=True)]
    try:
        ech.train(unit, data, max_epochs=1)
    except UsageError as error:
        return str(error)
    return whole(unit.module)


def _choose_all(heads: list[int]) -> dict[str, Any]:
    layouts = {
        "ddp": ech.DDPStrategy(find_unused_parameters=True),
        "fsdp": "fsdp",
        "hsdp": "hsdp",
        "at once": ech.FSDPStrategy(**HYBRID, requires_all_reduce=True),
        "later": ech.FSDPStrategy(**HYBRID, **LATER),
    }
    return {name: _chosen(layout, heads) for name, layout in layouts.items()}


def _chosen_by_copy(others: list[int]) -> Any:
    return _chosen("hsdp", [0, 0, 0] if dist.get_rank() < 2 else others, accumulate=3)


@pytest.mark.full
def test_other_parameters_in_each_micro_batch_are_right_or_refused(ranks: Ranks) -> None:
    """torch adds a unit's deferred gradients by place: a head's would end in the other one's."""
    for got in ranks(4, _choose_all, [0, 1, 1, 1]):
        assert "heads.0" in got["hsdp"] and "FSDPStrategy(requires_all_reduce=True)" in got["hsdp"]
        for name in ("fsdp", "at once", "later"):
            assert largest_difference(got[name], got["ddp"]) < 1e-9, name
    for got in ranks(4, _choose_all, [0, 0, 1, 1]):  # the same within each window
        assert largest_difference(got["hsdp"], got["ddp"]) < 1e-9
    for others in ([0, 1, 0], [0, 0, 1]):  # what the ranks of one copy find all are told
        said = ranks(4, _chosen_by_copy, others)
        assert said == [said[0]] * 4 and "heads.0" in said[0] and "FSDPStrategy(requires_all_reduce=True)" in said[0]


class _GivesUp(Regression):
    """Its first epoch has one micro-batch of a window of two; the window is given up."""

    def get_next_train_batch(self, state: ech.State, data_iter: Any) -> Any:
        if self.train_progress.num_epochs_completed == 0 and self.train_progress.num_steps_completed == 1:
            raise StopIteration
        return super().get_next_train_batch(state, data_iter)


def _given_up(layout: Any, half: bool = False) -> dict[str, torch.Tensor]:
    dtype = torch.float32 if half else torch.float64
    options = {"module": net(dtype=dtype), "precision": "bf16" if half else None}
    unit = _GivesUp(layout=layout, accumulate=2, **options)
    ech.train(unit, [tuple(t.to(dtype) for t in rows) for rows in _mine(unit, 4)], max_epochs=2)
    return {n: p.double() for n, p in whole(unit.module).items()}


def _give_up_all() -> dict[str, Any]:
    return {
        "fsdp": _given_up("fsdp"),
        "hsdp": _given_up("hsdp"),
        "later": _given_up(ech.FSDPStrategy(**LATER)),
        "later, bf16": _given_up(ech.FSDPStrategy(**LATER), half=True),
    }


@pytest.mark.full
def test_a_window_that_is_given_up_leaves_nothing_for_the_next(ranks: Ranks) -> None:
    plain, _, _ = plain_training([[batch(8, 0), batch(8, 1)], [batch(8, 2), batch(8, 3)]])
    for name, got in ranks(4, _give_up_all)[0].items():
        assert largest_difference(got, plain) < (2e-2 if "bf16" in name else 1e-9), name


def _turns(kind: str) -> tuple[Any, Any]:
    return tuple(_chosen(layout, [0, 1, 0, 1], kind, "bf16") for layout in (ech.FSDPStrategy(**LATER), "fsdp"))  # type: ignore[return-value]


@pytest.mark.full
def test_kept_gradients_in_a_lower_precision_are_those_of_each_micro_batch_or_refused(ranks: Ranks) -> None:
    """torch fails at a block that no pass has gathered yet, and cannot reduce gradients of two types of one block."""
    for later, at_once in ranks(2, _turns, "blocks"):
        assert largest_difference(later, at_once) < 1e-5
    for later, at_once in ranks(2, _turns, "layers"):
        assert "Leave out requires_gradient_sync=False" in later and isinstance(at_once, dict)
