"""Restoring: what changed since, what is missing, weights alone, and states that are not only numbers."""

from __future__ import annotations

import json
import logging
import pickle
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import echelon as ech
from echelon.checkpoint import plain
from echelon.checkpoint.location import Remote
from echelon.common.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointOptionError,
    UsageError,
)
from echelon.loop.checkpointing import changes
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, seeded, whole
from tests.kit.own_loops import told
from tests.kit.refusals import refused
from tests.kit.saving import DATA, Held, Marked, make_loader, make_unit, resume, train_and_save, uninterrupted
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

Saver = ech.DistributedCheckpointSaver
Options = ech.callbacks.RestoreOptions


# --- what changed


OTHER: dict[str, dict[str, Any]] = {
    "global_batch": {"global_batch": 16},
    "seed": {"seed": 2},
    "samples": {"dataset": torch.utils.data.TensorDataset(DATA.tensors[0][:40], DATA.tensors[1][:40])},
    "fingerprint": {"dataset": torch.utils.data.TensorDataset(DATA.tensors[0] + 1, DATA.tensors[1])},
}


@pytest.mark.parametrize("what", OTHER)
def test_other_data_is_shown_in_a_table_and_needs_to_be_allowed(tmp_path: Path, what: str) -> None:
    train_and_save(tmp_path, "none", 2)
    other = ech.Loader(**{"dataset": DATA, "global_batch": 8, "seed": 1, **OTHER[what]})
    unit = make_unit("none", seed=3)
    before = whole(unit.module)
    with refused(CheckpointMismatchError, changed=[what]):
        Saver.restore_from_latest(tmp_path, unit, train_dataloader=other)
    assert largest_difference(whole(unit.module), before) == 0  # refused before anything was changed
    options = Options(allow_changes=(what, "fingerprint"))
    Saver.restore_from_latest(tmp_path, unit, train_dataloader=other, restore_options=options)
    assert unit.train_progress.num_steps_completed == 2
    assert other.seek(2) == other.start == (1 if what == "global_batch" else 2)  # it goes on after the same sixteen samples
    assert not other.accept_changes


def test_what_the_loader_accepts_is_allowed_and_both_lists_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_and_save(tmp_path, "none", 2)
    other = ech.Loader(DATA, 4, seed=2, tail="drop", options=ech.data.LoaderOptions(accept_changes={"seed"}))
    with refused(CheckpointMismatchError):
        Saver.restore_from_latest(tmp_path, make_unit("none"), train_dataloader=other)
    with caplog.at_level(logging.INFO):
        options = Options(allow_changes=("global_batch",))
        Saver.restore_from_latest(tmp_path, make_unit("none"), train_dataloader=other, restore_options=options)
    assert other.start == 4
    (table,) = [record.getMessage() for record in caplog.records if "changed:" in record.getMessage()]
    lines = [" ".join(line.split()[:5]) for line in table.splitlines()[2:]]
    assert lines == ["tail keep drop harmless: the", "global_batch 8 4 allowed: other", "seed 1 2 allowed: another"]


class Foreign(list[Any]):
    """A loader of somebody else's, with a state of its own."""

    state: ClassVar[dict[str, Any]] = {"seed": 1}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_a_foreign_loaders_state_is_not_compared(tmp_path: Path) -> None:
    loader = Foreign([batch(4, 0)] * 3)
    ech.train(make_unit("none"), loader, max_updates=2, callbacks=[Saver(tmp_path)])
    other = Foreign([batch(4, 0)] * 3)
    other.state = {"seed": 2}  # type: ignore[misc]
    Saver.restore_from_latest(tmp_path, make_unit("none"), train_dataloader=other)
    assert other.loaded == {"seed": 1}


def test_the_saved_options_of_an_optimizer_go_on_and_the_scripts_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def chosen(**options: Any) -> Regression:
        return Regression(
            optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, **options),
            schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            step_lr_interval="step",
        )

    ech.train(chosen(weight_decay=0.2, foreach=True), make_loader(), max_updates=2, callbacks=[Saver(tmp_path)])
    unit = chosen(weight_decay=0.3, betas=(0.5, 0.5), foreach=False)
    with caplog.at_level(logging.INFO):
        Saver.restore_from_latest(tmp_path, unit)
    told = (
        r"optimizer.betas +\[0.9, 0.999\] +\[0.5, 0.5\] +harmless: the saved value is used\n +optimizer.weight_decay +0.2 +0.3 "
    )
    assert re.search(told, caplog.text)
    assert "optimizer.lr" not in caplog.text  # a schedule has moved it; both began at 0.1
    group = unit.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.025, 0.2, (0.9, 0.999))
    assert group["foreach"] is False  # how it computes is this script's business


def _in_turn(rates: Any, *more: Any, longer: int = 9) -> Any:
    def make(optimizer: Any) -> Any:
        parts = [rates.LinearLR(optimizer), rates.CosineAnnealingLR(optimizer, longer), *(each(optimizer) for each in more)]
        return rates.SequentialLR(optimizer, parts, list(range(3, 3 * len(parts), 3)))

    return make


def test_another_schedule_is_refused_and_another_length_of_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rates, scheduled = torch.optim.lr_scheduler, partial(Regression, step_lr_interval="step")
    ech.train(scheduled(schedule=_in_turn(rates)), make_loader(), max_updates=4, callbacks=[Saver(tmp_path)])
    other = scheduled(schedule=_in_turn(rates, lambda optimizer: rates.ExponentialLR(optimizer, 0.9)))
    with refused(CheckpointMismatchError):
        Saver.restore_from_latest(tmp_path, other)
    Saver.restore_from_latest(tmp_path, other, restore_options=Options(allow_changes=("lr_scheduler",)))
    assert other.lr_scheduler.last_epoch == 0 and other.train_progress.num_steps_completed == 4
    assert Saver.restore_from_latest(tmp_path, other, restore_options=Options(restore_lr_schedulers=False))
    longer = scheduled(schedule=_in_turn(rates, longer=99))
    with caplog.at_level(logging.INFO):
        Saver.restore_from_latest(tmp_path, longer)
    assert re.search(r"lr_scheduler\[2\].T_max +9 +99 +harmless: the saved value is used", caplog.text)
    assert longer.lr_scheduler.last_epoch == 4


@dataclass
class Config:
    width: int = 8


def _with_another_config(folder: Path, layout: str) -> str:
    unit = make_unit(layout, seed=3)
    unit.config = Config(width=9)  # type: ignore[attr-defined]
    with told() as texts:
        logging.getLogger("echelon").setLevel(logging.INFO)
        Saver.restore_from_latest(folder, unit, train_dataloader=make_loader())
    return "\n".join(texts)


def test_harmless_changes_pass_and_are_said_once_as_is_another_config_of_the_users(ranks: Ranks, tmp_path: Path) -> None:
    unit = make_unit("none")
    unit.config = {"width": 8}  # type: ignore[attr-defined]
    ech.train(unit, make_loader(), max_updates=1, callbacks=[Saver(tmp_path)])
    manifest = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    assert manifest["config"] == json.loads(json.dumps(changes.facts(unit, make_loader())))
    first, second = ranks(2, _with_another_config, tmp_path, "ddp")
    assert re.search(r"config.width +8 +9 +harmless: yours", first) and "world_size" in first and "layout" in first
    assert "harmless" not in second


def test_another_optimizer_is_refused_unless_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = train_and_save(tmp_path, "none", 2)
    unit = Regression(module=net(5), optimizer="SGD")
    with refused(CheckpointMismatchError):
        Saver.restore_from_latest(tmp_path, unit)
    with caplog.at_level(logging.WARNING):
        Saver.restore_from_latest(tmp_path, unit, restore_options=Options(allow_changes=("optimizer", "lr_scheduler")))
    assert largest_difference(whole(unit.module), want) == 0 and not unit.optimizer.state
    assert "allowed" in caplog.text


# --- what is missing, and what nobody asked for


def test_without_strict_the_missing_and_the_unexpected_are_listed_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another shape is refused with or without it."""
    saved = train_and_save(tmp_path, "none", 2)
    module = net(4)
    module.last, module.head = None, nn.Linear(8, 3).double()  # type: ignore[assignment]
    untouched = module.head.weight.detach().clone()
    unit = Regression(module=module, optimizer="AdamW", training=False)
    with refused(CheckpointMismatchError):
        Saver.restore(tmp_path / "step-00000002", unit)
    options = Options.weights_only(strict=False)
    with caplog.at_level(logging.WARNING):
        report = Saver.restore(tmp_path / "step-00000002", unit, restore_options=options)
    assert report.missing == ["module.head.bias", "module.head.weight"]
    assert report.unexpected == ["module.last.bias", "module.last.weight"]
    assert "module.head.bias" in caplog.text and "state that this unit does not use: module.last.bias" in caplog.text
    assert torch.equal(module.head.weight, untouched)
    assert torch.equal(module.first.weight, saved["first.weight"])
    for each in (Options(), options):
        with refused(CheckpointMismatchError):
            Saver.restore_from_latest(tmp_path, Regression(module=net(width=16), optimizer="AdamW"), restore_options=each)


# --- types


def _typed(dtype: torch.dtype, seed: int = 0) -> Regression:
    return Regression(module=net(seed, dtype), optimizer="AdamW", lr=0.05)


def _typed_loader(dtype: torch.dtype) -> ech.Loader:
    x, y = DATA.tensors
    return ech.Loader(torch.utils.data.TensorDataset(x.to(dtype), y.to(dtype)), 8, seed=1)


def test_tensors_that_are_cast_are_listed_and_an_optimizers_state_is_not_cut_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, dtype in (("wide", torch.float32), ("short", torch.bfloat16)):
        ech.train(_typed(dtype), _typed_loader(dtype), max_updates=2, callbacks=[Saver(tmp_path / name)])
    narrow = _typed(torch.bfloat16, seed=5)
    with refused(CheckpointMismatchError):
        Saver.restore_from_latest(tmp_path / "wide", narrow)
    with caplog.at_level(logging.WARNING):
        options = Options.weights_only()
        report = Saver.restore(tmp_path / "wide" / "step-00000002", narrow, restore_options=options)
    assert len(report.cast) == len(list(narrow.module.parameters()))
    assert report.cast["module.first.weight"] == ("float32", "bfloat16")
    assert caplog.text.count("tensors cast") == 1 and f"{len(report.cast)} from float32 to bfloat16" in caplog.text
    Saver.restore_from_latest(tmp_path / "wide", narrow, restore_options=Options(strict=False))
    assert narrow.optimizer.state[narrow.module.first.weight]["exp_avg"].dtype == torch.bfloat16
    wide = _typed(torch.float32)  # nothing is lost in this direction
    report = Saver.restore(tmp_path / "short" / "step-00000002", wide)
    assert report.cast["optimizer.state.first.weight.exp_avg"] == ("bfloat16", "float32")
    ech.train(wide, _typed_loader(torch.float32), max_updates=3)


class Exact(torch.optim.Optimizer):
    """Keeps its averages, in a nested state, in float32, whatever the parameters are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            mean = state.setdefault("means", {}).setdefault("first", torch.zeros_like(parameter, dtype=torch.float32))
            mean.mul_(0.9).add_(parameter.grad.float())
            state["count"] = state.get("count", 0) + 1
            parameter.add_(mean, alpha=-0.1)


def test_an_optimizer_that_keeps_more_digits_than_its_parameters_gets_them_back(tmp_path: Path) -> None:
    unit, other = (Regression(module=net(seed, torch.bfloat16), optimizer=lambda m: Exact(m.parameters())) for seed in (0, 1))
    ech.train(unit, _typed_loader(torch.bfloat16), max_updates=3, callbacks=[Saver(tmp_path)])
    assert Saver.restore(tmp_path / "step-00000003", other).cast == {}
    for a, b in zip(unit.module.parameters(), other.module.parameters(), strict=True):
        one, two = unit.optimizer.state[a], other.optimizer.state[b]
        assert two["means"]["first"].dtype == torch.float32 and torch.equal(one["means"]["first"], two["means"]["first"])
        assert one["count"] == two["count"] == 3


# --- every optimizer of torch's


class Late(nn.Module):
    """Its second layer is used, and has a state, only from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.calls = nn.Linear(4, 4), nn.Linear(4, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x)
        return self.late(x) if self.calls > 3 else x[:, :1]


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("Adadelta", {}),
    ("Adafactor", {}),
    ("Adagrad", {"initial_accumulator_value": 0.5}),
    ("Adam", {"amsgrad": True}),
    ("Adamax", {}),
    ("ASGD", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
]


@pytest.mark.full
def test_every_optimizer_goes_on_bit_by_bit_also_where_it_had_no_state_yet(tmp_path: Path) -> None:
    wrong = {}
    for name, options in OPTIMIZERS:

        def made(seed: int, name: str = name, options: dict[str, Any] = options) -> Regression:
            kind = getattr(torch.optim, name)
            return Regression(module=seeded(Late, seed), optimizer=lambda m: kind(m.parameters(), lr=0.01, **options))

        unit, fresh, ahead = made(0), made(1), made(2)
        ech.train(ahead, make_loader(), max_updates=5)
        ech.train(unit, make_loader(), max_updates=3, callbacks=[Saver(tmp_path / name)])
        for other in (fresh, ahead):
            Saver.restore_from_latest(tmp_path / name, other)
            other.module.calls = 3
        for each in (unit, fresh, ahead):
            ech.train(each, make_loader(), max_updates=6)
        wrong[name] = max(largest_difference(whole(unit.module), whole(other.module)) for other in (fresh, ahead))
    assert {name: d for name, d in wrong.items() if d != 0} == {}


def test_an_optimizer_without_its_modules_and_parameters_that_are_new_to_it(tmp_path: Path) -> None:
    unit = make_unit("none")
    ech.train(unit, make_loader(), max_updates=2, callbacks=[Saver(tmp_path)])
    other = make_unit("none", seed=4)
    Saver.restore_from_latest(tmp_path, other, restore_options=Options(restore_modules=False))
    assert largest_difference(whole(other.module), whole(net(4))) == 0
    for a, b in zip(unit.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(unit.optimizer.state[a]["exp_avg_sq"], other.optimizer.state[b]["exp_avg_sq"])
    module = net(5)
    module.extra = nn.Linear(1, 1).double()
    wider = Regression(module=module, optimizer="AdamW", lr=0.2)
    with refused(CheckpointMismatchError):
        Saver.restore_from_latest(tmp_path, wider)
    report = Saver.restore(tmp_path / "step-00000002", wider, restore_options=Options(strict=False))
    assert "optimizer.param_groups.extra.weight" in report.missing and "module.extra.weight" in report.missing
    assert wider.optimizer.param_groups[0]["lr"] == 0.05 and module.extra.weight not in wider.optimizer.state


def test_a_parameter_that_no_module_of_the_unit_holds_is_in_the_state_of_its_optimizer(tmp_path: Path) -> None:
    def loose(value: float) -> Regression:
        return Regression(optimizer=lambda m: torch.optim.AdamW([*m.parameters(), nn.Parameter(torch.full((2,), value))]))

    ech.train(loose(0.1), make_loader(), max_updates=2, callbacks=[Saver(tmp_path)])
    other = loose(7.0)
    Saver.restore_from_latest(tmp_path, other)
    assert other.optimizer.param_groups[0]["params"][-1].tolist() == pytest.approx([0.1, 0.1])


# --- ranks that differ


class Noted(Held):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.value == "fails":
            raise LookupError("rank 1 alone fails here")


def _differing(folder: Path) -> list[str]:
    second = torch.distributed.get_rank() == 1
    other_data = torch.utils.data.TensorDataset(DATA.tensors[0] + 1, DATA.tensors[1])
    texts = []
    for case in DIFFERS:
        module = net(1, width=16) if second and case == "shape" else net(1)
        kind = "SGD" if second and case == "optimizer" else "AdamW"
        unit = Regression(module=module, layout="none", optimizer=kind)
        if not (second and case == "state"):
            unit.note = Noted("fails" if second and case == "load" else "")  # type: ignore[attr-defined]
        loader = ech.Loader(other_data if second and case == "data" else DATA, 8, seed=1)
        with pytest.raises((CheckpointError, UsageError)) as caught:
            Saver.restore_from_latest(folder, unit, train_dataloader=loader)
        texts.append(str(caught.value))
    return texts


# In what a unit differs on one rank, and what all are told.
DIFFERS = {
    "shape": r"module\.first\.weight.*\(16, 4\)",
    "state": r"ranks restore different units:\n.*rank 0 +rank 1\n +note +Noted +-\n",
    "optimizer": r"optimizer\s+AdamW\s+SGD\s+NOT harmless",
    "load": "rank 1 alone fails here",
    "data": "fingerprint",
}


def test_a_unit_that_differs_on_one_rank_is_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    unit = Regression(module=net(0), optimizer="AdamW")
    unit.note = Noted()  # type: ignore[attr-defined]
    ech.train(unit, make_loader(), max_updates=2, callbacks=[Saver(tmp_path / "c")])
    for texts in ranks(2, _differing, tmp_path / "c"):
        for (case, said), text in zip(DIFFERS.items(), texts, strict=True):
            assert re.search(said, text, re.DOTALL), (case, text)


def test_a_folder_of_checkpoints_is_not_one_and_the_newest_is_named(tmp_path: Path) -> None:
    ech.train(Regression(module=net(0)), [batch(2, 0)] * 2, max_epochs=1, callbacks=[Saver(tmp_path / "run" / "checkpoints")])
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with refused(CheckpointNotFoundError):
            Saver.restore(folder, Regression(module=net(0)))
    with refused(CheckpointNotFoundError):
        Saver.restore(tmp_path / "nowhere", Regression(module=net(0)))


# --- weights of other programs


@pytest.mark.full
def test_weights_of_another_program_are_read_into_any_strategy(ranks: Ranks, tmp_path: Path) -> None:
    want = {k: v.contiguous() for k, v in net(3).state_dict().items()}
    save_file(want, tmp_path / "model.safetensors")
    torch.save({"state_dict": want}, tmp_path / "model.pt")
    for got in ranks(2, _imported, [tmp_path / "model.safetensors", tmp_path / "model.pt", tmp_path]):
        assert got == {"ddp": 0, "fsdp": 0, "zero1": 0, "tp": 0}
    for wrapper in ("module.", "_orig_mod.module.", "model."):
        torch.save({wrapper + k: v for k, v in want.items()}, tmp_path / "wrapped.pt")
        unit = Regression(module=net(0))
        Saver.restore(tmp_path / "wrapped.pt", unit)
        assert largest_difference(whole(unit.module), want) == 0
    unit = Regression(module=net(0, width=16))
    with refused(CheckpointMismatchError):
        Saver.restore(tmp_path / "model.pt", unit)


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(x)))[:, :1]


def _tied(folder: Path) -> dict[str, bool]:
    want = Tied(0).embed.weight
    same = {}
    for kept in ("embed.weight", "head.weight"):
        for layout in ("ddp", "fsdp"):
            unit = Regression(module=Tied(1), layout=layout)
            Saver.restore(folder / f"{kept}.safetensors", unit)
            same[f"{kept} {layout}"] = all(torch.equal(value, want) for value in whole(unit.module).values())
    return same


def test_of_a_tied_parameter_others_keep_one_name(ranks: Ranks, tmp_path: Path) -> None:
    for kept in ("embed.weight", "head.weight"):
        save_file({kept: Tied(0).embed.weight.detach().clone()}, tmp_path / f"{kept}.safetensors")
    for same in ranks(2, _tied, tmp_path):
        assert len(same) == 4 and all(same.values()), same


class Twice(nn.Module):
    """One layer in two places, as a block that is applied again."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        block = nn.Linear(4, 4)
        self.blocks, self.head = nn.ModuleList([block, block]), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def _twice(folder: Path) -> dict[str, float]:
    differ = {}
    for saved in ("ddp", "zero1", "fsdp"):
        unit = Regression(module=Twice(0).double(), layout=saved)
        ech.train(unit, [batch(4, 0)], max_epochs=1, callbacks=[Saver(folder / saved, save_every_n_updates=1)])
        for layout in ("ddp", "zero1", "fsdp"):
            other = Regression(module=Twice(1).double(), layout=layout)
            Saver.restore_from_latest(str(folder / saved), other)
            differ[f"{saved} read by {layout}"] = largest_difference(whole(unit.module), whole(other.module))
    return differ


def test_a_layer_in_two_places_is_restored(ranks: Ranks, tmp_path: Path) -> None:
    for differ in ranks(2, _twice, tmp_path):
        assert len(differ) == 9 and not any(differ.values()), differ


class Untied(Tied):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.head.weight = nn.Parameter(self.embed.weight.detach() + 1)


def _was_untied(path: Path, layout: str, want: torch.Tensor) -> tuple[str, dict[str, bool], list[str]]:
    unit = Regression(module=Tied(1).double(), layout=layout)
    before = whole(unit.module)
    with pytest.raises(CheckpointMismatchError) as caught:
        Saver.restore(path, unit)
    assert largest_difference(before, whole(unit.module)) == 0.0
    report = Saver.restore(path, unit, restore_options=ech.callbacks.RestoreOptions(strict=False, restore_optimizers=False))
    return str(caught.value), {n: torch.equal(v, want) for n, v in whole(unit.module).items()}, report.unexpected


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["ours", "another's"])
def test_a_tied_parameter_that_was_saved_with_two_values_is_refused(ranks: Ranks, tmp_path: Path, layout: str, kind: str) -> None:
    module = Untied(0).double()
    if kind == "ours":
        ech.train(Regression(module=module), [batch(4, 0)], max_epochs=1, callbacks=[Saver(tmp_path, save_every_n_updates=1)])
        (path,) = tmp_path.glob("step-*")
    else:
        path = tmp_path / "model.safetensors"
        save_file({n: p.detach().clone() for n, p in module.named_parameters()}, path)
    for said, took_first, unexpected in ranks(2, _was_untied, path, layout, module.embed.weight.detach()):
        assert re.search(r"module\.head\.weight +other values +is module\.embed\.weight", said) and "strict=False" in said, said
        assert took_first == {"embed.weight": True}
        assert "module.head.weight" in unexpected


def _imported(paths: list[Path]) -> dict[str, float]:
    found: dict[str, float] = {}
    want = {n: p.detach() for n, p in net(3).named_parameters()}
    for layout in ("ddp", "fsdp", "zero1", "tp"):
        for path in paths:
            unit = make_unit(layout, seed=1)
            Saver.restore(path, unit)
            found[layout] = max(found.get(layout, 0), largest_difference(whole(unit.module), want))
    return found


def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    for name in ("model.pt", "model.bin"):
        (tmp_path / name).write_bytes(pickle.dumps({"a": Marked(tmp_path / "ran")}))
        with refused(CheckpointError):
            Saver.restore(tmp_path / name, make_unit("none"))
    assert not (tmp_path / "ran").exists()


def test_a_checkpoints_own_files_hold_no_pickle(tmp_path: Path) -> None:
    train_and_save(tmp_path, "none", 2)
    folder = tmp_path / "step-00000002"
    assert {p.suffix for p in folder.iterdir()} == {".json", ".safetensors"}
    assert load_file(folder / "tensors-00000.safetensors")  # the real library reads them
    for path in folder.iterdir():
        assert b"ctorch" not in path.read_bytes() and b"PK\x03\x04" not in path.read_bytes()


# --- any state


def test_states_of_many_kinds_come_back_as_they_were() -> None:
    tensor = torch.randn(3, 2).to(torch.bfloat16)
    value: dict[Any, Any] = {
        "plain": [1, 2.5, None, True, "text", float("inf"), 2**70],
        3: {"~": 1, ("a", 1): {4, 5}},
        "counter": Counter({3: 2}),
        "ordered": OrderedDict(b=1, a=2),
        "tuple": (1, (2, [3])),
        "tensors": [tensor, torch.tensor(3), torch.empty(0, 4), torch.tensor([1 + 2j]), torch.tensor([True])],
        "numpy": [np.arange(3), np.float32(1.5), np.array([], dtype=np.int16), np.array(7)],
        "bytes": b"\x00\xff",
        "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
        "odd": [complex(1, 2), frozenset([1])],
        "history": defaultdict(list, loss=[1.0, 2.0]),
        "counts": defaultdict(int, {("a", 1): 3, "~": 1}),
        "window": deque([1, (2, 3)], maxlen=4),
    }
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(plain.encode(value, tensors))
    got = plain.decode(json.loads(text), lambda name, dtype, shape: tensors[name])
    assert list(got) == list(value) and got["plain"] == value["plain"]
    for key in (3, "counter", "ordered", "tuple", "bytes", "torch", "odd", "history", "counts", "window"):
        assert got[key] == value[key] and type(got[key]) is type(value[key]), key
    assert got["history"]["new"] == [] and got["counts"]["new"] == 0 and got["window"].maxlen == 4
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got["tensors"], value["tensors"], strict=True))
    for a, b in zip(got["numpy"], value["numpy"], strict=True):
        assert np.array_equal(a, b) and a.dtype == b.dtype and type(a) is type(b)
    with refused(CheckpointError):
        plain.encode({"a": defaultdict(lambda: 1)}, {})
    with refused(CheckpointError):
        plain.encode({"a": {"b": [Path("x")]}}, {})


# --- a URL


@pytest.mark.full
def test_a_url_is_a_folder_like_any_other(tmp_path: Path) -> None:
    import fsspec

    with pytest.MonkeyPatch.context() as patch, refused(CheckpointOptionError):
        patch.setitem(sys.modules, "fsspec.core", None)  # what to install
        Saver("s3://bucket/run")
    url = "memory://bucket/run"
    fs = fsspec.filesystem("memory")
    saver = Saver(url, save_every_n_updates=2, keep_last_n_checkpoints=2)
    assert not Saver.restore_from_latest(url, make_unit("none"))
    fs.pipe_file("/bucket/run/step-00000009/tensors-00000.safetensors", b"of a killed save")
    ech.train(make_unit("none"), make_loader(), max_updates=6, callbacks=[saver])
    assert sorted(p.rsplit("/", 1)[1] for p in fs.ls("/bucket/run", detail=False)) == ["step-00000004", "step-00000006"]
    unit, loader = make_unit("none", seed=9), make_loader()
    newest = "/bucket/run/step-00000006/tensors-00000.safetensors"
    data = bytearray(fs.cat_file(newest))
    data[-1] ^= 1
    fs.pipe_file(newest, bytes(data))
    assert Saver.restore_from_latest(url, unit, train_dataloader=loader)
    assert unit.train_progress.num_steps_completed == 4
    ech.train(unit, loader, max_updates=8, callbacks=[Saver(url, async_checkpoint=True, save_every_n_updates=4)])
    assert largest_difference(whole(unit.module), uninterrupted("none", 8)) == 0
    assert Saver.restore_from_latest(url, unit) and unit.train_progress.num_steps_completed == 8


def _save_by_url(folder: str) -> None:
    import fsspec

    train_and_save(Remote(fsspec.filesystem("file"), folder, "file"), "fsdp", 4)  # type: ignore[arg-type]


@pytest.mark.full
def test_ranks_write_to_a_url_together(ranks: Ranks, tmp_path: Path) -> None:
    """By the library of URLs; `place` would make a Path of this machine's files."""
    ranks(2, _save_by_url, str(tmp_path / "c"))
    assert largest_difference(ranks(2, resume, tmp_path / "c", "ddp", 8)[0], uninterrupted("none", 8)) < 1e-12
