"""Ranks that stand differently where the library has them meet: all end with the same error or go on alike, and none hangs."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.callbacks import EarlyStopping
from echelon.common.errors import RankFailedError
from echelon.compat.trainer.rank import kept_global_batch
from echelon.loop.callbacks.early_stopping import EarlyStopChecker
from tests.conftest import Ranks
from tests.kit.models import seeded, whole
from tests.kit.own_loops import step
from tests.kit.refusals import refusal
from tests.kit.units import Hooks, Own, Regression

STEPS = 4
Case = Callable[[str, Path], Any]


def _odd() -> bool:
    return dist.get_rank() == 1


class _Two(nn.Module):
    """A layer that a pass may leave out, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.spare(x) if spare else x)


class _Wide(nn.Module):
    """Its blocks are gathered, and reduced, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class _Unit(Regression):
    def __init__(self, layout: Any, module: nn.Module | None = None, **options: Any) -> None:
        super().__init__(module=seeded(_Two) if module is None else module, layout=layout, **options)

    def step(self) -> int:
        return self.train_progress.num_steps_completed


def _data(count: int = STEPS, rows: int = 4) -> list[Any]:
    torch.manual_seed(dist.get_rank())
    return [(torch.randn(rows, 3).double(), torch.randn(rows, 1).double()) for _ in range(count)]


def _train(unit: Any, data: Any = None, *callbacks: ech.Callback, max_epochs: int = 1) -> Any:
    ech.train(unit, _data() if data is None else data, max_epochs=max_epochs, callbacks=callbacks)
    return unit


def _at(hook: str, act: Callable[[Any, Any], Any]) -> ech.Callback:
    """A callback of all ranks that does something on one."""
    return Hooks(**{hook: lambda state, unit: act(state, unit) if _odd() else None})


def _trains(unit: Any, name: str, *, so: bool) -> None:
    for each, parameter in unit.prepared.named_parameters():
        if each.startswith(name):
            parameter.requires_grad_(so)


# --- the ways in which a rank may stand alone: of what it trains, its model, its batches and its optimizer


def _frozen(layout: str) -> Any:
    module = seeded(_Two)
    module.spare.weight.requires_grad_(not _odd())
    return _train(_Unit(layout, module))


def _unfrozen_later(layout: str, hook: str) -> Any:
    module = seeded(_Two)
    module.spare.requires_grad_(False)
    thaw = _at(hook, lambda _, unit: _trains(unit, "spare", so=unit.step() > 0))
    return _train(_Unit(layout, module), None, thaw, max_epochs=2)


class _Freezes(_Unit):
    """Within a step, where no rank hears of another before the backward pass."""

    everywhere = False

    def weight(self, data: Any) -> Any:
        if self.step() in (2, 3) and (_odd() or self.everywhere):
            _trains(self, "spare", so=self.step() == 3)
        return super().weight(data)


def _frozen_in_a_step(layout: str, everywhere: bool = False) -> Any:
    unit = _Freezes(layout)
    unit.everywhere = everywhere
    return _train(unit)


def _other_model(layout: str, how: str) -> Any:
    torch.manual_seed(0)
    names = ["a", "b"] if how != "order" or _odd() else ["b", "a"]
    with ech.on_meta() if how == "meta" and _odd() else contextlib.nullcontext():
        module = nn.Sequential(OrderedDict((name, nn.Linear(3, 3)) for name in names))
        if how == "more" and _odd():
            module.append(nn.Linear(3, 3))
    return _train(_Unit(layout, module.to(torch.float32 if how == "dtype" and _odd() else torch.float64)))


class _Skips(_Unit):
    def compute_loss(self, state: Any, data: Any) -> Any:
        out = self.module(data[0], not _odd() or self.step() < 2)
        return nn.functional.mse_loss(out, data[1]), out


class _Computes(_Unit):
    """Its loss passes through a function that is given: (unit, state, loss) -> loss."""

    def __init__(self, layout: Any, way: Callable[..., Any]) -> None:
        super().__init__(layout)
        self.way = way

    def compute_loss(self, state: Any, data: Any) -> Any:
        loss, out = super().compute_loss(state, data)
        return self.way(self, state, loss), out


def _logged(unit: Any, state: Any, loss: torch.Tensor) -> torch.Tensor:
    if _odd() == (str(state.active_phase) == "train"):
        state.log("mine", loss)
    return loss


def _logs_in_evaluation(layout: str) -> Any:
    unit = _Unit(layout)
    unit.on_eval_step_end = lambda state, *rest: state.log("mine", 1.0) if _odd() else None
    ech.evaluate(unit, _data())
    return unit


def _evaluates_alone(unit: Any) -> Any:
    _train(unit)
    if not _odd():
        ech.evaluate(unit, _data())
    return _train(unit)


class _Own(Own, ech.EvalUnit[Any]):
    """Steps by itself, and evaluates without meeting anyone but for what it logs."""

    def __init__(self, layout: str) -> None:
        super().__init__(ech.layouts.prepare_module(seeded(_Two), torch.device("cpu"), layout=layout))

    def eval_step(self, state: Any, data: Any) -> Any:
        state.log("off", data[0].sum())


def _empty_batch(layout: str) -> Any:
    data = _data()
    if _odd():
        data[2] = (data[2][0][:0], data[2][1][:0])
    return _train(_Unit(layout), data)


def _grouped(module: nn.Module) -> torch.optim.Optimizer:
    named = dict(module.named_parameters())
    spare = [p for n, p in named.items() if "spare" in n]
    rest = [p for n, p in named.items() if "spare" not in n]
    return torch.optim.SGD([{"params": rest}, *([] if _odd() else [{"params": spare}])], lr=0.1)


class _Plain(torch.optim.Optimizer):
    """One that knows no learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad


def _optimizer_of_its_own(layout: str) -> Any:
    """Besides the module, each rank has a layer for itself, which it trains in its own way."""
    unit = _Unit(layout)
    unit.own = nn.Linear(3, 3).double()
    unit.own_optimizer = torch.optim.SGD(unit.own.parameters(), lr=0.2 if _odd() else 0.1)
    return _train(unit)


def _stops_in_eval(layout: str) -> Any:
    unit = _Unit(layout)
    stop = _at("on_eval_step_end", lambda state, unit: state.stop())
    ech.fit(unit, _data(), _data(), max_epochs=3, callbacks=[stop])
    return unit


def _unless_odd(callback: ech.Callback) -> list[ech.Callback]:
    return [] if _odd() else [callback]


def _early_stopping() -> ech.Callback:
    return EarlyStopping(monitored_attr="lr", early_stop_checker=EarlyStopChecker("min", 3), interval="epoch")


def _other_folder(layout: str, folder: Path, *, all_of_it: bool = False) -> Any:
    """As on machines that have a disk each: of a file, or a checkpoint, that is not on one of them."""
    _train(_Unit(layout), None, ech.DistributedCheckpointSaver(folder / "all", save_every_n_epochs=1))
    dist.barrier()
    own, before = folder / f"disk{dist.get_rank()}", Path.cwd()
    shutil.copytree(folder / "all", own)
    (saved,) = (each.name for each in own.iterdir() if each.name.startswith("step"))
    if _odd():
        shutil.rmtree(own / saved) if all_of_it else (own / saved / "tensors-00000.safetensors").unlink()
    os.chdir(own)
    try:
        dist.barrier()
        if all_of_it:
            return kept_global_batch(Path(saved), DataLoader([1]), 2, 1)
        unit = _Unit(layout)
        ech.DistributedCheckpointSaver.restore(saved, unit)
    finally:
        os.chdir(before)
    return unit


def _fail(*_: Any) -> None:
    raise ValueError("a fault of one rank alone")


CASES: dict[str, Case] = {
    "frozen": lambda layout, folder: _frozen(layout),
    "frozen later": lambda layout, folder: _train(
        _Unit(layout),
        None,
        _at("on_train_step_end", lambda state, unit: unit.step() == 1 and _trains(unit, "spare.weight", so=False)),
    ),
    "unfrozen later": lambda layout, folder: _unfrozen_later(layout, "on_train_step_end"),
    "unfrozen with an epoch": lambda layout, folder: _unfrozen_later(layout, "on_train_epoch_start"),
    "block frozen later": lambda layout, folder: _train(
        _Unit(layout, seeded(_Wide)),
        None,
        _at("on_train_step_end", lambda state, unit: _trains(unit, "blocks.1", so=False)),
    ),
    "frozen in a step": lambda layout, folder: _frozen_in_a_step(layout),
    "frozen in a step everywhere": lambda layout, folder: _frozen_in_a_step(layout, everywhere=True),
    "another order": lambda layout, folder: _other_model(layout, "order"),
    "another type": lambda layout, folder: _other_model(layout, "dtype"),
    "more layers": lambda layout, folder: _other_model(layout, "more"),
    "on meta": lambda layout, folder: _other_model(layout, "meta"),
    "no gradient": lambda layout, folder: _train(_Skips(layout)),
    "logs": lambda layout, folder: _train(_Computes(layout, _logged)),
    "logs in evaluation": lambda layout, folder: _logs_in_evaluation(layout),
    "evaluates alone": lambda layout, folder: _evaluates_alone(_Unit(layout)),
    "own evaluates alone": lambda layout, folder: _evaluates_alone(_Own(layout)),
    "empty batch": lambda layout, folder: _empty_batch(layout),
    "shorter": lambda layout, folder: _train(_Unit(layout), _data(STEPS - _odd())),
    "shorter iterator": lambda layout, folder: _train(_Unit(layout), iter(_data(STEPS - _odd()))),
    "other accumulation": lambda layout, folder: _train(_Unit(layout, accumulate=2 + 2 * _odd())),
    "other rate": lambda layout, folder: _train(_Unit(layout, lr=0.2 if _odd() else 0.1)),
    "other rate later": lambda layout, folder: _train(
        _Unit(layout),
        None,
        _at("on_train_epoch_end", lambda state, unit: unit.optimizer.param_groups[0].update(lr=0.05)),
        max_epochs=2,
    ),
    "without a group": lambda layout, folder: _train(_Unit(layout, optimizer=_grouped)),
    "other optimizer": lambda layout, folder: _train(
        _Unit(layout, optimizer=lambda m: (torch.optim.AdamW if _odd() else torch.optim.SGD)(m.parameters(), lr=0.1))
    ),
    "optimizer without a rate": lambda layout, folder: _train(_Unit(layout, optimizer=lambda m: _Plain(m.parameters()))),
    "optimizer of its own": lambda layout, folder: _optimizer_of_its_own(layout),
    "asks to stop": lambda layout, folder: _train(
        _Unit(layout), None, _at("on_train_step_end", lambda state, unit: unit.step() == 1 and state.stop())
    ),
    "stops in eval": lambda layout, folder: _stops_in_eval(layout),
    "saver on one": lambda layout, folder: _train(
        _Unit(layout), None, *_unless_odd(ech.DistributedCheckpointSaver(folder, save_every_n_epochs=1))
    ),
    "early stopping on one": lambda layout, folder: _train(_Unit(layout), None, *_unless_odd(_early_stopping())),
    "a file": lambda layout, folder: _other_folder(layout, folder),
    "a folder": lambda layout, folder: _other_folder(layout, folder, all_of_it=True),
    "callback raises": lambda layout, folder: _train(_Unit(layout), None, _at("on_train_step_end", _fail)),
    "loss raises": lambda layout, folder: _train(
        _Computes(layout, lambda unit, state, loss: _fail() if _odd() and unit.step() == 2 else loss)
    ),
    "loss without gradient": lambda layout, folder: _train(
        _Computes(layout, lambda unit, state, loss: loss.detach() if _odd() and unit.step() == 2 else loss)
    ),
}


def _outcome(case: str, layout: str, folder: Path) -> Any:
    try:
        unit = CASES[case](layout, folder)
        return "done", unit.train_progress.num_steps_completed, whole(unit.module)
    except Exception as error:
        return type(error).__name__, str(error), None


# --- what becomes of it


@pytest.mark.standing_ranks
@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("a folder", "another one for rank 1"),
        pytest.param("a file", "rank 1, without files that others see: tensors-00000.safetensors", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_that_one_rank_sees_otherwise_is_told_to_all(ranks: Ranks, tmp_path: Path, lacks: str, words: str) -> None:
    first, second = ranks(2, _outcome, lacks, "ddp", tmp_path)
    assert first == second and first[0] == "CheckpointCorruptError" and words in first[1]


TOLD: list[tuple[str, list[str], str]] = [
    ("frozen", ["fsdp", "hsdp"], "spare.weight is frozen on one rank and trained on another"),
    ("frozen later", ["ddp", "fsdp", "zero1"], "spare.weight was frozen on rank 1 and not on rank 0"),
    ("unfrozen later", ["fsdp", "ddp"], "spare.weight was unfrozen on rank 1 and not on rank 0"),
    ("unfrozen with an epoch", ["ddp", "fsdp"], "spare.weight was unfrozen on rank 1 and not on rank 0"),
    ("block frozen later", ["fsdp", "ddp"], "blocks.1.0.weight was frozen on rank 1 and not on rank 0"),
    ("another order", ["ddp", "fsdp"], "has b.weight (3, 3) of float64 on rank 0, it has a.weight"),
    ("another type", ["ddp", "fsdp"], "it has a.weight (3, 3) of float32 on another"),
    ("more layers", ["fsdp", "ddp"], "has nothing more on rank 0, it has 2.weight"),
    ("on meta", ["fsdp", "ddp"], "of float64 without values on another"),
    ("no gradient", ["fsdp", "zero2"], "spare"),
    ("logs", ["ddp", "fsdp"], "rank 0: nothing, rank 1: mine"),
    ("logs in evaluation", ["ddp", "fsdp"], "rank 0: nothing, rank 1: mine"),
    ("evaluates alone", ["ddp", "fsdp"], "make the same calls"),
    ("own evaluates alone", ["ddp"], "make the same calls"),
    ("shorter", ["ddp", "fsdp"], "rank 0: 4, rank 1: 3"),
    ("shorter iterator", ["ddp", "fsdp"], "the end of the train epoch"),
    ("other accumulation", ["ddp", "fsdp"], "'accumulate': 4"),
    ("other rate", ["ddp", "fsdp"], "lr of its groups: 0.2)"),
    ("other rate later", ["ddp", "zero1"], "lr of its groups: 0.05) on another"),
    ("without a group", ["ddp", "fsdp"], "lr of its groups: 0.1, 0.1)"),
    ("other optimizer", ["ddp", "fsdp"], "AdamW"),
    ("saver on one", ["ddp", "fsdp"], "DistributedCheckpointSaver"),
    ("early stopping on one", ["ddp", "fsdp"], "EarlyStopping"),
]


def _outcomes(cases: list[tuple[str, str]], folder: Path) -> list[Any]:
    """One after another, in folders of their own; ranks that an error left at other places would hang in the next."""
    found = []
    for number, (case, layout) in enumerate(cases):
        (own := folder / str(number)).mkdir(exist_ok=True)
        found.append(_outcome(case, layout, own))
    return found


@pytest.mark.full
@pytest.mark.standing_ranks
def test_all_ranks_are_told_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """The ranks stay after the error, so that one that waits for another would wait for ever."""
    asked = [(case, layout, words) for case, layouts, words in TOLD for layout in layouts]
    one, two = ranks(2, _outcomes, [each[:2] for each in asked], tmp_path, timeout_s=240)
    for (case, layout, words), first, second in zip(asked, one, two, strict=True):
        assert first == second, (case, layout)
        assert first[0] == "RanksDisagreeError" and words in first[1], (case, layout, first)


ALIKE = [
    *("empty batch", "asks to stop", "stops in eval", "optimizer without a rate", "optimizer of its own"),
    "frozen in a step everywhere",
]


@pytest.mark.full
@pytest.mark.standing_ranks
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_all_ranks_go_on_alike(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    found = ranks(2, _outcomes, [(case, layout) for case in ALIKE], tmp_path, timeout_s=240)
    for case, (first, steps, mine), (second, others_steps, others) in zip(ALIKE, *found, strict=True):
        assert (first, second) == ("done", "done") and steps == others_steps, (case, steps, others_steps)
        assert all(torch.equal(mine[name], others[name]) for name in mine), case


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "layout", "words"),
    [
        ("callback raises", "ddp", "a fault of one rank alone"),
        ("loss raises", "fsdp", "a fault of one rank alone"),
        ("loss without gradient", "ddp", "compute_loss returned"),
        ("loss without gradient", "fsdp", "compute_loss returned"),
        ("no gradient", "ddp", "must depend on all trained parameters"),
        ("frozen in a step", "ddp", "spare.weight was frozen on rank 1 and not on another"),
        ("frozen in a step", "fsdp", "spare.weight was frozen on rank 1 and not on another"),
    ],
)
def test_a_fault_of_one_rank_ends_all(ranks: Ranks, tmp_path: Path, case: str, layout: str, words: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        ranks(2, _alone, case, layout, tmp_path)
    assert words in str(caught.value)


def _alone(case: str, layout: str, folder: Path) -> None:
    CASES[case](layout, folder)


# --- in a pipeline


class _FailsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ValueError("a fault of one rank alone")


class _Block(nn.Module):
    """One that fails in a later pass, if `way` is "forward" or "backward"."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.inner, self.way, self.passes = nn.Linear(3, 3), way, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        if self.way and torch.is_grad_enabled() and not x.is_meta:
            self.passes += 1
            if self.passes > 3:
                if self.way == "forward":
                    raise ValueError("a fault of one rank alone")
                return _FailsBack.apply(x)
        return x


def _staged(way: str, at: int, schedule: str, dims: dict[str, int]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(_Block(way if i == at else "") for i in range(4)), nn.Linear(3, 1)).double()
    unit = Regression(module=module, layout=ech.Layout(pp=2, schedule=schedule, **dims), accumulate=2)
    torch.manual_seed(0)
    ech.train(unit, [(torch.randn(4, 3).double(), torch.randn(4, 1).double()) for _ in range(8)], max_epochs=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "at", "schedule", "dims"),
    [
        ("forward", 0, "1f1b", {}),
        ("backward", 3, "1f1b", {}),
        ("forward", 3, "1f1b", {}),
        ("backward", 0, "zero_bubble", {}),
        ("forward", 3, "1f1b", {"dp_replicate": 2}),
    ],
)
def test_a_fault_in_a_stage_is_told_of_its_own_rank(ranks: Ranks, way: str, at: int, schedule: str, dims: dict[str, int]) -> None:
    """The others are told of it, or wait in vain; and torch would have told of a backward pass in words of its own."""
    with pytest.raises(RankFailedError) as caught:
        ranks(2 * dims.get("dp_replicate", 1), _staged, way, at, schedule, dims)
    half = dims.get("dp_replicate", 1)
    assert caught.value.rank // half == (at > 1)
    assert "\nValueError: a fault of one rank alone" in str(caught.value)


class _Tied(nn.Module):
    """The first and the last layer, of other stages, have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(3, 3), nn.ModuleList(_Block() for _ in range(4))
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _tied(frozen_on: int) -> Any:
    def freeze(state: Any, unit: Any) -> None:
        if dist.get_rank() == frozen_on and unit.train_progress.num_steps_completed == 4:
            unit.module.first.weight.requires_grad_(False)

    unit = Regression(module=seeded(_Tied), layout=ech.Layout(pp=2), accumulate=2)
    data = [(torch.randn(4, 3).double(), torch.randn(4, 3).double()) for _ in range(8)]
    ech.train(unit, data, max_epochs=1, callbacks=[Hooks(on_train_step_end=freeze)])
    return unit.module.first.weight.detach()


@pytest.mark.full
@pytest.mark.standing_ranks
@pytest.mark.parametrize("frozen_on", [0, 1])
def test_copies_of_a_tied_weight_stay_equal_where_one_is_frozen(ranks: Ranks, frozen_on: int) -> None:
    one, other = ranks(2, _tied, frozen_on)
    assert torch.equal(one, other)


# --- in a loop of one's own

Leaves = Callable[[int, bool], str]


def _loop(leaves: Leaves, layout: str, accumulation: int = 1, epochs: int = 2) -> Any:
    """`leaves(batch, odd)` says what the loop does before the window of a batch, which it counts from 1."""
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    data = TensorDataset(torch.randn(32, 3).double(), torch.randn(32, 1).double())
    optimizer: Any = torch.optim.SGD(module.parameters(), 0.1)
    loader: Any = ech.Loader(data, global_batch=8, accumulate=accumulation)
    model, optimizer, loader = ech.prepare(module, optimizer, loader, layout=layout)
    batch = 0
    for _ in ech.epochs(loader, epochs):
        for x, y in loader:
            batch += 1
            what = leaves(batch, dist.get_rank() == 1)
            if what == "continue":
                continue
            if what == "break":
                break
            step(model, optimizer, x, y)
    return batch, whole(model)


def _continues_at(at: int) -> Leaves:
    return lambda batch, odd: "continue" if odd and batch == at else ""


def _break_of_one(batch: int, odd: bool) -> str:
    return "break" if odd and batch == 3 else ""  # behind the second, at which DDP lays its buckets out


def _of_all(batch: int, odd: bool) -> str:
    return {2: "continue", 4: "continue", 6: "break"}.get(batch, "")


@pytest.mark.full
@pytest.mark.parametrize(
    ("leaves", "layout", "accumulation", "said"),
    [
        (_continues_at(2), "ddp", 1, "rank 1 skipped 1 of the batches that the others trained on"),
        (_continues_at(2), "ddp", 2, "rank 1 skipped 1 of the batches that the others trained on"),
        (_continues_at(2), "fsdp", 1, "rank 1 skipped 1 of the batches that the others trained on"),
        (_continues_at(4), "ddp", 1, "rank 1 skipped 1 of the batches that the others trained on"),  # an epoch's last
        (_break_of_one, "ddp", 1, "rank 1 left the loop over the batches, which the others go on with"),
    ],
    ids=["continue-ddp", "continue-accumulation", "continue-fsdp", "continue-last", "break-ddp"],
)
def test_a_batch_that_one_rank_leaves_out_ends_all(
    ranks: Ranks, leaves: Leaves, layout: str, accumulation: int, said: str
) -> None:
    with pytest.raises(RankFailedError) as caught:
        ranks(2, _loop, leaves, layout, accumulation)
    assert f"RanksDisagreeError: {said}" in str(caught.value)


@pytest.mark.standing_ranks
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_batches_that_all_leave_out_are_left_out(ranks: Ranks, layout: str, accumulation: int) -> None:
    (batches, mine), (others_batches, others) = ranks(2, _loop, _of_all, layout, accumulation)
    assert batches == others_batches
    assert all(torch.equal(mine[name], others[name]) for name in mine)


def _leaves_other_numbers(batch: int, odd: bool) -> str:
    return "continue" if batch in ((1, 2) if odd else (1,)) else ""


@pytest.mark.standing_ranks
def test_other_numbers_of_batches_are_told_to_all(ranks: Ranks) -> None:
    first, second = ranks(2, refusal, _loop, _leaves_other_numbers, "ddp", kind=ech.errors.RanksDisagreeError)
    assert first == second and "rank 0: 1 skipped" in first and "rank 1: 2 skipped" in first


def _other_rows(**axes: Any) -> str:
    parts: Any = {"up": nn.Linear(3, 8), "act": nn.ReLU(), "down": nn.Linear(8, 1)}
    rows = 4 + dist.get_rank()
    data = [(torch.randn(rows, 3).double(), torch.randn(rows, 1).double())]
    unit = Regression(module=seeded(lambda: nn.Sequential(OrderedDict(parts))), layout=ech.Layout(**axes))
    return refusal(ech.train, unit, data, max_epochs=1, kind=ech.errors.RanksDisagreeError)


@pytest.mark.standing_ranks
@pytest.mark.parametrize("axes", [{"tp": 2, "plan": {"up": "colwise", "down": "rowwise"}}, {"pp": 2, "stages": ["down"]}])
def test_ranks_of_the_same_samples_are_told_of_other_rows(ranks: Ranks, axes: dict[str, Any]) -> None:
    first, second = ranks(2, _other_rows, **axes)
    assert first == second and "[[4, 3], [4, 1]] on rank 0" in first and "[[5, 3], [5, 1]] on rank 1" in first


class _ScaledBy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)) * scale)


class _ScalesAlone(Regression):
    def compute_loss(self, state: Any, data: Any) -> Any:
        out = self.module(data[0], torch.full((1,), 1.0 + dist.get_rank()).double())
        return nn.functional.mse_loss(out, data[1]), out


def _other_scale() -> str:
    data = [(torch.randn(4, 16, 3).double(), torch.randn(4, 16, 1).double())]
    unit = _ScalesAlone(module=seeded(_ScaledBy), layout="cp=2")
    return refusal(ech.train, unit, data, max_epochs=1, kind=ech.errors.ContextParallelError)


@pytest.mark.standing_ranks
def test_a_value_that_the_ranks_of_a_sequence_have_otherwise_is_told_to_all(ranks: Ranks) -> None:
    first, second = ranks(2, _other_scale)
    assert first == second and "argument 1 on the 2 ranks of a sequence" in first
