"""State that a checkpoint holds and the program has no more, and layers that have other names now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import echelon as ech
from echelon.checkpoint.renamed import moved, suggest
from echelon.common.errors import CheckpointMismatchError
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, whole
from tests.kit.refusals import refused
from tests.kit.saving import Held
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

Saver, Options = ech.DistributedCheckpointSaver, ech.callbacks.RestoreOptions
TRAINING = ech.State(entry_point=ech.units.EntryPoint.TRAIN)
DATA = torch.utils.data.TensorDataset(*batch(48, 0))


class Net(nn.Module):
    """Its layers are called as it is told, and are made in the same order."""

    def __init__(self, first: str = "encoder", second: str = "decoder", last: str = "head", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.order = (first, second, last)
        self.add_module(first, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)))
        self.add_module(second, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
        self.add_module(last, nn.Linear(8, 1))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = self.get_submodule(name)(x)
        return x


def _unit(module: nn.Module | None = None, layout: str = "none", **attributes: Any) -> Any:
    unit = Regression(module=module or Net(), layout=layout, optimizer="AdamW", lr=0.05)
    for name, value in attributes.items():
        setattr(unit, name, value)
    return unit


def _loader() -> ech.Loader:
    return ech.Loader(DATA, 8, seed=1)


def _saved(folder: Path, steps: int = 2, **options: Any) -> Any:
    unit = _unit(**options)
    ech.train(unit, _loader(), max_updates=steps, callbacks=[Saver(folder)])
    return unit


class Hand(ech.TrainUnit[Any]):
    """Two modules, an optimizer each, and a schedule."""

    def __init__(self, *without: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        made: dict[str, Any] = {"a": nn.Linear(4, 4).double(), "b": nn.Linear(4, 1).double()}
        made["of_a"] = torch.optim.AdamW(made["a"].parameters())
        made["of_b"] = torch.optim.AdamW(made["b"].parameters())
        made["schedule"] = torch.optim.lr_scheduler.StepLR(made["of_a"], 1)
        made["counter"], made["mean"] = Held(3), ech.Mean()
        for name in made.keys() - set(without):
            setattr(self, name, made[name])

    def train_step(self, state: ech.State, data: Any) -> None: ...


@pytest.mark.parametrize("name", ["a", "of_a", "schedule", "counter", "mean"])
def test_state_that_the_unit_has_no_more_is_refused_when_strict_and_listed_otherwise(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    Saver(tmp_path).save(TRAINING, Hand())
    path, without = tmp_path / "step-00000000", {"a": ("a", "of_a", "schedule"), "of_a": ("of_a", "schedule")}.get(name, (name,))
    with refused(CheckpointMismatchError):
        Saver.restore(path, Hand(*without))
    assert Saver.restore(path, Hand(*without), restore_options=Options(strict=False)).unexpected == sorted(without)
    assert f"{path} also has state that this unit does not use: {', '.join(sorted(without))}" in caplog.text
    report = Saver.restore(path, Hand(*without), restore_options=Options(allow_changes=without))
    assert report.unexpected == sorted(without)
    assert not Saver.restore(path, Hand()).unexpected


def test_what_options_or_another_kind_of_unit_leave_behind_is_no_error(tmp_path: Path) -> None:
    Saver(tmp_path).save(TRAINING, Hand())
    path = tmp_path / "step-00000000"
    options = Options(restore_optimizers=False, restore_lr_schedulers=False, restore_metrics=False)
    assert not Saver.restore(path, Hand("of_a", "of_b", "schedule", "mean"), restore_options=options).unexpected
    assert Saver.restore(path, Hand("b"), restore_options=Options.weights_only()).unexpected == ["b"]

    class Judge(ech.EvalUnit[Any]):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Linear(4, 1).double()

        def eval_step(self, state: ech.State, data: Any) -> None: ...

    _saved(tmp_path / "half", grad_scaler=torch.amp.GradScaler("cpu"))  # another precision has no scaler: it is listed
    assert Saver.restore(tmp_path / "half/step-00000002", _unit()).unexpected == ["grad_scaler"]
    judge = Judge()
    assert Saver.restore(path, judge, restore_options=Options(strict=False)).unexpected == ["a", "counter"]
    assert torch.equal(judge.b.weight, Hand().b.weight)


def _appeared(folder: Path) -> None:
    Saver(folder).save(TRAINING, Hand("counter", "of_b"))
    with refused(CheckpointMismatchError):
        Saver.restore(folder / "step-00000000", Hand("of_b"))
    unit = Hand("of_b")
    report = Saver.restore(folder / "step-00000000", unit, restore_options=Options(allow_changes=("counter",)))
    assert report.missing == ["counter"] and not report.unexpected and unit.counter.value == 3


@pytest.mark.full
def test_state_that_appeared_is_refused_and_stays_as_it_is_where_it_is_named(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _appeared, tmp_path)


def test_a_position_of_somebody_elses_loader_that_is_not_given_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(list[Any], Held): ...

    unit, own = _unit(), Own([batch(8, i) for i in range(4)])
    own.value = 2
    ech.train(unit, own, max_updates=2, callbacks=[Saver(tmp_path)])
    Saver.restore(tmp_path / "step-00000002", _unit(), train_dataloader=own)
    assert "train_dataloader=" not in caplog.text
    Saver.restore(tmp_path / "step-00000002", _unit())
    assert "in the middle of an epoch; give the loader, too: train_dataloader=" in caplog.text


RENAMED = {"module.encoder": "module.backbone", "module.head": "module.out"}


def _goes_on_renamed(folder: Path, layout: str) -> dict[str, Any]:
    unit, loader = _unit(Net("backbone", "decoder", "out", seed=7), layout), _loader()
    Saver.restore_from_latest(folder, unit, train_dataloader=loader, restore_options=Options(rename=RENAMED))
    ech.train(unit, loader, max_updates=4)
    return whole(unit.module)


@pytest.mark.full
def test_renamed_layers_go_on_with_their_moments_under_any_strategy(ranks: Ranks, tmp_path: Path) -> None:
    want = _saved(tmp_path / "all", steps=4)
    _saved(tmp_path / "c")
    got = [_goes_on_renamed(tmp_path / "c", "none")]
    got += [ranks(2, _goes_on_renamed, tmp_path / "c", layout)[0] for layout in ("fsdp", "zero1")]
    for each in got:
        back = {moved(f"module.{k}", {v: k for k, v in RENAMED.items()}).removeprefix("module."): v for k, v in each.items()}
        assert largest_difference(back, whole(want.module)) < 1e-12


@pytest.mark.full
def test_layers_of_equal_shapes_are_suggested_and_the_suggestion_works(tmp_path: Path) -> None:
    """Also for a whole attribute, and for one of two modules that an optimizer has."""
    saved = _saved(tmp_path)
    other = _unit(Net("backbone", "decoder", "out", seed=7))
    with pytest.raises(CheckpointMismatchError) as caught:
        Saver.restore_from_latest(tmp_path, other)
    for text in ("module.encoder.0.weight", "module.backbone.0.weight", "wanted (8, 4)"):
        assert text in str(caught.value)
    assert f"RestoreOptions(rename={RENAMED!r})" in str(caught.value)
    Saver.restore_from_latest(tmp_path, other, restore_options=Options(rename=RENAMED))
    assert all(torch.equal(a, b) for a, b in zip(other.module.parameters(), saved.module.parameters(), strict=True))

    class Model(ech.TrainUnit[Any]):
        def __init__(self, name: str, extra: str | None = None) -> None:
            super().__init__()
            module = Net()
            setattr(self, name, module)
            parameters = list(module.parameters())
            if extra is not None:
                setattr(self, extra, nn.Linear(3, 3))
                parameters += getattr(self, extra).parameters()
            self.optimizer = torch.optim.AdamW(parameters)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()

        def train_step(self, state: ech.State, data: Any) -> None: ...

    for extra in (None, "more"):
        folder = tmp_path / str(extra)
        before, after = Model("model", extra), Model("net", extra)
        Saver(folder).save(TRAINING, before)
        with refused(CheckpointMismatchError):
            Saver.restore_from_latest(folder, after)
        with torch.no_grad():
            after.optimizer.state[after.net.head.weight]["exp_avg"].zero_()
        Saver.restore_from_latest(folder, after, restore_options=Options(rename={"model": "net"}))
        moment = after.optimizer.state[after.net.head.weight]["exp_avg"]
        assert torch.equal(moment, before.optimizer.state[before.model.head.weight]["exp_avg"]) and moment.any()


def test_a_module_that_became_a_part_of_another_is_found_as_suggested(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    other, loader = _unit(nn.Sequential(Net(seed=7))), _loader()
    with refused(CheckpointMismatchError):
        Saver.restore_from_latest(tmp_path, other, train_dataloader=loader)
    Saver.restore_from_latest(tmp_path, other, train_dataloader=loader, restore_options=Options(rename={"module": "module.0"}))
    ech.train(other, loader, max_updates=4)
    ech.train(saved, _loader(), max_updates=4)
    assert all(torch.equal(a, b) for a, b in zip(other.module.parameters(), saved.module.parameters(), strict=True))


class Parts(ech.TrainUnit[Any]):
    """Two modules, or one that has them as its parts."""

    def __init__(self, *, apart: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        body, head = nn.Linear(4, 8).double(), nn.Linear(8, 1).double()
        if apart:
            self.body, self.head = body, head
        else:
            self.both = nn.ModuleDict({"body": body, "head": head})
        self.parts = lambda: (body, head)
        self.optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=0.1)

    def train_step(self, state: ech.State, data: Any) -> None:
        body, head = self.parts()
        self.optimizer.zero_grad()
        head(body(data[0])).square().mean().backward()
        self.optimizer.step()


@pytest.mark.parametrize("apart", [True, False])
def test_modules_that_became_parts_of_one_and_parts_that_became_modules_are_found_as_suggested(
    tmp_path: Path, apart: bool
) -> None:
    saved, loader = Parts(apart=apart), _loader()
    ech.train(saved, loader, max_updates=2, callbacks=[Saver(tmp_path)])
    names = {"body": "both.body", "head": "both.head"}
    names = names if apart else {new: old for old, new in names.items()}
    other = Parts(apart=not apart, seed=7)
    with pytest.raises(CheckpointMismatchError) as caught:
        Saver.restore(tmp_path / "step-00000002", other)
    assert all(f"{old!r}: {new!r}" in str(caught.value) for old, new in names.items())
    gone, come = (["body", "head"], ["both"]) if apart else (["both"], ["body", "head"])
    assert f"allow_changes={(*gone, *come)!r} leaves only {', '.join(gone)} out" in str(caught.value)  # either alone is refused
    report = Saver.restore(tmp_path / "step-00000002", other, restore_options=Options(rename=names))
    assert not report.missing and not report.unexpected
    for ours, theirs in zip(saved.parts(), other.parts(), strict=True):
        assert torch.equal(ours.weight, theirs.weight)
        assert torch.equal(saved.optimizer.state[ours.bias]["exp_avg"], other.optimizer.state[theirs.bias]["exp_avg"])


def test_the_moments_of_a_layer_that_is_left_behind_are_left_behind(tmp_path: Path) -> None:
    _saved(tmp_path)
    other = _unit(Net())
    other.module.head = nn.Linear(8, 3).double()
    options = Options(rename={"module.head": "module.old"}, strict=False)
    report = Saver.restore(tmp_path / "step-00000002", other, restore_options=options)
    assert {"module.head.bias", "module.head.weight"} < set(report.missing)
    assert {"module.old.weight", "optimizer.state.old.weight.exp_avg"} < set(report.unexpected)
    assert not other.optimizer.state.get(other.module.head.weight)
    assert other.optimizer.state[other.module.encoder[0].weight]["step"] == 2


@pytest.mark.parametrize(
    "rename",
    [{"module.enc": "module.backbone"}, {"module.encoder": "module.decoder"}, {"module.encoder": "module.nowhere"}],
)
def test_a_mapping_that_cannot_be_is_refused_before_anything_is_changed(tmp_path: Path, rename: dict[str, str]) -> None:
    _saved(tmp_path)
    unit = _unit(Net(seed=4))
    with refused(CheckpointMismatchError):
        Saver.restore_from_latest(tmp_path, unit, restore_options=Options(rename=rename))
    assert torch.equal(unit.module.head.weight, Net(seed=4).head.weight)


def _with(change: Callable[[nn.Module], nn.Module]) -> Any:
    module: Any = Net(seed=9)
    module.encoder = change(module.encoder)
    return module


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [lambda m: torch.compile(m, backend="eager"), checkpoint_wrapper, lambda m: m.requires_grad_(False)],
    ids=["compiled", "recomputed", "frozen"],
)
def test_a_submodule_that_was_wrapped_or_frozen_since_keeps_its_names(tmp_path: Path, change: Any) -> None:
    saved = _saved(tmp_path)
    unit, loader = _unit(_with(change)), _loader()
    assert Saver.restore_from_latest(tmp_path, unit, train_dataloader=loader) is True
    got, want = [list(m.parameters()) for m in (unit.module, saved.module)]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    ech.train(unit, loader, max_updates=4, callbacks=[Saver(tmp_path / "more")])
    Saver.restore_from_latest(tmp_path / "more", _unit())


# --- suggestions, as pure functions


@given(st.permutations(["p", "q", "r"]), st.integers(1, 3))
def test_parts_of_different_shapes_are_paired_whatever_they_are_called(names: list[str], depth: int) -> None:
    parts = {"a": [2, 3], "b": [3, 4], "c": [4, 5]}
    inner = ".".join(f"layer{i}" for i in range(depth))
    saved = {f"m.{k}.{inner}.{w}": s[:n] for k, s in parts.items() for w, n in (("weight", 2), ("bias", 1))}
    new = dict(zip(parts, names, strict=True))
    now = {moved(k, {f"m.{old}": f"m.{is_}" for old, is_ in new.items()}): v for k, v in saved.items()}
    assert {moved(k, suggest(saved, now)): v for k, v in saved.items()} == now


def test_shifted_numbers_are_paired_in_their_order_and_other_shapes_not_at_all() -> None:
    saved = {f"m.{i}.weight": [8, 8] for i in (0, 2, 10)}
    now = {f"m.{i}.weight": [8, 8] for i in (1, 4, 20)}
    assert suggest(saved, now) == {"m.0": "m.1", "m.2": "m.4", "m.10": "m.20"}
    assert suggest({"m.a": [2]}, {"m.b": [3]}) == {}
    assert suggest({"m.a": [2], "m.b": [3]}, {"m.x.y": [3]}) == {"m.b": "m.x.y"}
