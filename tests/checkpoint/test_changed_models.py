"""Models that are changed after they were made parallel, or that parallel ranks cannot train as one process does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import EchelonError, LayoutError, UsageError
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, whole
from tests.kit.own_loops import own_loop, step, told
from tests.kit.refusals import refused
from tests.kit.units import KINDS, Regression, under_each

pytestmark = pytest.mark.standing_ranks

Change = Callable[[Any, torch.optim.Optimizer, int], torch.optim.Optimizer | None]
STEPS, ROWS, CHANGED = 5, 4, 2
REPLICAS = "echelon.loop.replicas"


class Changing(Net):
    """Its forward heeds attributes, and layers that it gets later."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.more, self.skips = 1.0, None, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) if not self.skips else self.last(self.first(x))
        return self.scale * (out if self.more is None else out + self.more(x))


def _model(seed: int = 0) -> Changing:
    torch.manual_seed(seed)
    return Changing().double()


def _grow(module: Any, optimizer: torch.optim.Optimizer, seed: int | None = 7) -> None:
    """By the rank's own random numbers without a seed."""
    if seed is not None:
        torch.manual_seed(seed)
    module.more = nn.Linear(4, 1).double()
    optimizer.add_param_group({"params": module.more.parameters()})


def _grow_and_replace(module: Any, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    _grow(module, optimizer)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _load(module: Any) -> None:
    getattr(module, "module", module).load_state_dict(_model(seed=3).state_dict())


@torch.no_grad()
def _noise(module: Any) -> None:
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.01)


@torch.no_grad()
def _on_rank_0(module: Any, *_: Any) -> None:
    if dist.get_rank() == 0:
        next(module.parameters()).mul_(0.5)


# What is done before a step with the module, the optimizer and the step's number; it may give another optimizer.
CHANGES: dict[str, Change] = {
    "grow and replace": lambda m, o, step: _grow_and_replace(m, o) if step == CHANGED else None,
    "grow": lambda m, o, step: _grow(m, o) if step == CHANGED else None,
    "grow apart": lambda m, o, step: _grow(m, o, None) if step == CHANGED else None,
    "rescale": lambda m, o, step: setattr(m, "scale", 0.5**step),
    "load": lambda m, o, step: _load(m) if step == CHANGED else None,
    "convert": lambda m, o, step: m.to("cpu").double() and None,
    "skip last": lambda m, o, step: setattr(m, "skips", step == STEPS - 1),
    "noise": lambda m, o, step: _noise(m),
    "on rank 0": _on_rank_0,
    "nothing": lambda m, o, step: None,
}


class Changes(ech.Callback):
    def __init__(self, change: Change) -> None:
        self.change = change

    def on_train_step_start(self, state: ech.State, unit: Any) -> None:
        replaced = self.change(unit.module, unit.optimizer, unit.train_progress.num_steps_completed)
        unit.optimizer = replaced or unit.optimizer


def _trained(layout: Any, change: str, model: Callable[[], nn.Module] = _model) -> dict[str, torch.Tensor]:
    unit = Regression(module=model(), layout=layout)
    ech.train(unit, _loader(STEPS), max_epochs=1, callbacks=[Changes(CHANGES[change])])
    return whole(unit.module)


def _reference(change: str, model: Callable[[], nn.Module] = _model, kind: str = "SGD") -> dict[str, torch.Tensor]:
    """The same in plain PyTorch."""
    module = model()
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
    x, y = batch(ROWS * STEPS, seed=1)
    for at in range(STEPS):
        optimizer = CHANGES[change](module, optimizer, at) or optimizer
        rows = slice(at * ROWS, (at + 1) * ROWS)
        nn.functional.mse_loss(module(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("change", ["grow", "grow and replace", "rescale", "load", "convert"])
def test_what_is_changed_in_training_is_changed_under_every_strategy(ranks: Ranks, change: str) -> None:
    want = _reference(change)
    for of_rank in ranks(2, under_each, KINDS, _trained, change):
        for layout, got in of_rank.items():
            assert largest_difference(got, want) < 1e-12, layout


def _refusal(layout: Any, change: str = "nothing", model: Callable[[], nn.Module] = _model) -> str:
    try:
        _trained(layout, change, model)
    except EchelonError as error:
        return str(error)
    return "nothing was refused"


def test_a_layer_that_each_rank_drew_for_itself_is_refused(ranks: Ranks) -> None:
    for of_rank in ranks(2, under_each, ["ddp", "fsdp"], _refusal, "grow apart"):
        for layout, said in of_rank.items():
            assert "the module has got parameters that differ between ranks" in said, layout


def _skipping_at_the_end() -> Any:
    found = ech.DDPStrategy(find_unused_parameters=True)
    return under_each(["ddp", "zero1"], _refusal, "skip last"), _trained(found, "skip last"), _trained("fsdp", "skip last")


@pytest.mark.full
def test_layers_that_only_the_last_step_left_out_are_named_before_its_update(ranks: Ranks) -> None:
    """torch raises in the next forward pass, and there is none: each rank kept gradients of its own."""
    want = _reference("skip last")
    for texts, *right in ranks(2, _skipping_at_the_end):
        for layout, said in texts.items():
            assert "got no gradient of blocks.0.0.weight and 7 more. " in said, layout
            assert "find_unused_parameters=True" in said
        for got in right:
            assert largest_difference(got, want) < 1e-12


# --- optimizers that change


def test_a_unit_that_has_trained_can_be_pickled() -> None:
    unit = Regression(module=_model(), device=torch.device("cpu"))
    ech.train(unit, _loader(), max_epochs=1)
    assert largest_difference(whole(pickle.loads(pickle.dumps(unit)).module), whole(unit.module)) == 0


def _copied() -> tuple[list[str], bool]:
    unit = Regression(module=_model(), layout="ddp")
    other = copy.deepcopy(unit.module)
    other.scale = 3.0
    other(batch(2, seed=1)[0]).sum().backward()
    return sorted(set(vars(other)) - set(vars(unit.module))), other.module.scale == 3.0 != unit.module.scale


def test_a_copy_of_the_wrapper_has_its_own_parts_and_reaches_its_own_module(ranks: Ranks) -> None:
    assert ranks(2, _copied) == [([], True)] * 2


class Warmth(ech.AutoUnit[Any]):
    """Its loss has a parameter that is no part of the module, and that the optimizer gets later, or never."""

    def __init__(self, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.warmth, self.given = nn.Parameter(torch.zeros(1, dtype=torch.float64)), optimizer

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = data
        out = self.module(x)
        return nn.functional.mse_loss(out + self.warmth, y + (x.sum() > 0)), out

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return self.given or torch.optim.SGD(module.parameters(), lr=0.01), None


class Later(ech.Callback):
    """Changes the optimizer before the second epoch."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def on_train_epoch_start(self, state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_epochs_completed == 1:
            self.change(unit)


def _give_warmth(unit: Any) -> None:
    unit.optimizer.add_param_group({"params": [unit.warmth]})


def _stop_moving(unit: Any) -> None:
    unit.optimizer = torch.optim.SGD(unit.module.parameters(), lr=0.0)


def _loader(epochs: int = 1) -> Any:
    return ech.Loader(TensorDataset(*batch(ROWS * epochs, seed=1)), global_batch=ROWS, shuffle=False)


def test_a_scaler_knows_what_the_optimizer_has_got_and_which_it_is() -> None:
    moved = {}
    for precision in ("fp32", "fp16"):
        unit = Warmth(module=_model(), precision=precision, options=ech.UnitOptions(device=torch.device("cpu")))
        ech.train(unit, _loader(), max_epochs=2, callbacks=[Later(_give_warmth)])
        moved[precision] = unit.warmth.item()
    assert 0 < abs(moved["fp32"]) < 0.1 and moved["fp16"] == pytest.approx(moved["fp32"], rel=0.05)
    unit = Warmth(module=_model(), precision="fp16", options=ech.UnitOptions(device=torch.device("cpu")))
    seen: list[dict[str, torch.Tensor]] = []
    later = Later(lambda unit: (_stop_moving(unit), seen.append(whole(unit.module)))[0])
    ech.train(unit, _loader(), max_epochs=2, callbacks=[later])
    assert largest_difference(whole(unit.module), seen[0]) == 0


def _of_a_second_unit() -> float:
    first = Warmth(module=_model(), layout="ddp")
    ech.train(first, _loader(4), max_epochs=1)
    second = Warmth(optimizer=first.optimizer, module=first.module)
    ech.train(second, _loader(4), max_epochs=2, callbacks=[Later(_give_warmth)])
    return second.warmth.item()


def test_an_optimizer_tells_the_unit_that_it_trains_with_now(ranks: Ranks) -> None:
    first, other = ranks(2, _of_a_second_unit)
    assert first == other != 0


# --- layers that the loss's own code freezes


def _in_turns(module: nn.Module, step: int) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("last") if step % 2 else not name.startswith("last"))


def _later(module: nn.Module, step: int) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(step >= CHANGED or not name.startswith("first"))


FREEZES = {"in turns": _in_turns, "later": _later}


class Freezing(Regression):
    """Freezes and unfreezes layers where no layout can see it before the pass."""

    freeze: Callable[[nn.Module, int], None]

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.freeze(self.prepared.unwrapped, self.train_progress.num_steps_completed)
        return super().compute_loss(state, data)


def _frozen(layout: Any, how: str) -> dict[str, torch.Tensor] | str:
    unit = Freezing(module=_model(), layout=layout)
    unit.freeze = FREEZES[how]
    try:
        ech.train(unit, _loader(STEPS), max_epochs=1)
    except UsageError as error:
        return str(error)
    return {name: p.detach().clone() for name, p in unit.prepared.named_parameters()}


def _frozen_under_each() -> dict[str, Any]:
    found = ech.DDPStrategy(find_unused_parameters=True)
    return {how: (_frozen("ddp", how), _frozen(found, how)) for how in FREEZES}


@pytest.mark.full
def test_what_the_losss_own_code_freezes_is_averaged_or_refused(ranks: Ranks) -> None:
    CHANGES.update({how: lambda module, optimizer, step, freeze=freeze: freeze(module, step) for how, freeze in FREEZES.items()})
    for of_rank in ranks(2, _frozen_under_each):
        for how, given in of_rank.items():
            for got in given:
                if isinstance(got, str):  # torch waited for what was frozen in its pass
                    assert "the loss must depend on all trained parameters, got no gradient of " in got, how
                else:
                    assert largest_difference(got, _reference(how)) < 1e-12, how
            assert not isinstance(given[1], str) or how == "later", given[1]


# --- loops of one's own


def _own_loop(layout: str) -> dict[str, torch.Tensor]:
    model = _model()
    model, optimizer, loader = ech.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.1), _loader(STEPS), layout=layout)
    for x, y in loader:
        step(model, optimizer, x, y)
    return whole(model)


@pytest.mark.full
def test_an_optimizer_that_makes_its_state_as_it_is_built_is_taken(ranks: Ranks) -> None:
    want = _reference("nothing", kind="Adagrad")
    for of_rank in ranks(2, under_each, KINDS, _own_loop):
        for layout, got in of_rank.items():
            assert largest_difference(got, want) < 1e-12, layout


def _parts_in_a_window() -> None:
    model = _model()
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), _loader()
    model, optimizer, loader = ech.prepare(*parts, layout="fsdp")
    with refused(LayoutError):
        for x, _ in loader:
            step(model, optimizer, x, loss=lambda model, x: model.last(model.first(x)).mean())


def test_what_torch_says_of_parts_is_explained_in_a_window(ranks: Ranks) -> None:
    ranks(2, _parts_in_a_window)


# --- hooks on parameters


def _masked() -> Changing:
    model = _model()
    model.first.weight.register_hook(lambda gradient: gradient * 0)
    return model


def _stepping() -> Changing:
    model = _model()
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def _hooks() -> dict[str, torch.Tensor]:
    for layout in ("fsdp", "zero2"):
        for model in (_masked, _stepping):
            with refused(LayoutError):
                _trained(layout, "nothing", model)
    unit = Regression(module=_model(), layout="fsdp")
    next(unit.module.parameters()).register_hook(lambda gradient: gradient * 0)
    with refused(LayoutError):
        ech.train(unit, _loader(), max_epochs=1)
    return _trained("ddp", "nothing", _masked)


@pytest.mark.full
def test_a_hook_on_a_parameter_acts_or_is_refused(ranks: Ranks) -> None:
    for masked in ranks(2, _hooks):
        assert largest_difference(masked, _reference("nothing", _masked)) < 1e-12


# --- models


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4, **options)
        self.last = nn.Linear(4, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.rows((x[:, 0].abs() * 4).long().clamp(max=7)))


def _transposed() -> nn.Module:
    model = _model()
    model.first.weight = nn.Parameter(model.first.weight.detach().t().contiguous().t())
    return model


def _penalty(module: nn.Module, data: Any) -> torch.Tensor:
    x, y = data[0].requires_grad_(), data[1]
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return nn.functional.mse_loss(out, y) + slope.square().sum(1).mean()


def _models() -> dict[str, torch.Tensor]:
    for layout, model in (
        ("ddp", lambda: Words(max_norm=1.0)),
        ("fsdp", lambda: Words(max_norm=1.0)),
        ("fsdp", lambda: Words(sparse=True)),
    ):
        with refused(LayoutError):
            _trained(layout, "nothing", model)
    with refused(LayoutError):
        ech.train(Regression(module=_model(), layout="fsdp", loss=_penalty), [batch(ROWS, seed=1)], max_epochs=1)
    return _trained("fsdp", "nothing", _transposed)


@pytest.mark.full
def test_what_a_strategy_cannot_train_is_refused_with_what_to_do(ranks: Ranks) -> None:
    for transposed in ranks(2, _models):
        assert largest_difference(transposed, _reference("nothing", _transposed)) < 1e-12


# --- copies that drift apart


def _said_of_copies(layout: str, change: str, folder: Path | None) -> list[str]:
    with told(REPLICAS) as said:
        unit = Regression(module=_model(), layout=layout)
        savers = [] if folder is None else [ech.DistributedCheckpointSaver(folder / f"{layout} {change}", save_every_n_updates=2)]
        ech.train(unit, _loader(STEPS), max_epochs=1, callbacks=[Changes(CHANGES[change]), *savers])
    return said


def _of_each_change(folder: Path | None) -> dict[str, dict[str, list[str]]]:
    layouts = ["ddp", "fsdp", "hsdp"]
    return {change: under_each(layouts, _said_of_copies, change, folder) for change in ("noise", "on rank 0", "nothing")}


@pytest.mark.full
@pytest.mark.parametrize("saves", [True, False], ids=["at a save", "at the end"])
def test_ranks_that_have_changed_their_copies_each_in_its_own_way_are_told_once(
    ranks: Ranks, tmp_path: Path, saves: bool
) -> None:
    first, other = ranks(2, _of_each_change, tmp_path if saves else None)
    for layout in ("ddp", "hsdp"):  # under zero1 the owner's values go to all after each update
        (said,) = first["noise"][layout]
        assert said.startswith("the ranks hold different values of module.first.weight (one of 12 parameters)"), said
        (said,) = first["on rank 0"][layout]
        assert "module.first.weight (one of " in said
    assert first["noise"]["fsdp"] == [] and set(map(len, first["nothing"].values())) == {0}
    assert all(not said for of_change in other.values() for said in of_change.values())


class SetByItsBatch(nn.Module):
    """Takes its scale from one of its batches: the first, as the activation norm of Glow, or a later one, as a KAN its grid."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.scale, self.net, self.left = nn.Parameter(torch.ones(1, dtype=torch.float64)), _model(), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.left == 0:
            self.scale.data.copy_(x.std())
        self.left -= 1
        return self.net(x / self.scale)


def _said_of_a_batch(layout: str, number: int) -> list[str]:
    model = SetByItsBatch(number)
    with told(REPLICAS) as said:
        model, optimizer, loader = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), _loader(STEPS), layout=layout)
        for at, (x, y) in enumerate(loader):
            step(model, optimizer, x, y)
            if at == number:
                return list(said)  # after this update, long before a save
    return []


@pytest.mark.parametrize(("layout", "number"), [("ddp", 0), ("zero1", 0), ("zero1", 3)])
def test_parameters_that_each_rank_sets_from_one_of_its_batches_are_told_of_after_its_update(
    ranks: Ranks, layout: str, number: int
) -> None:
    """Under zero1 the step sends the owner's values to all, which hid that the passes had other ones."""
    (said,), other = ranks(2, _said_of_a_batch, layout, number)
    assert said.startswith("the ranks hold different values of module.scale (one of ") and not other


def _said_of_rates() -> list[str]:
    """A rate that falls on rank 0 alone; the epoch in which it does is the last."""
    model = _model()
    with told(REPLICAS) as said:
        parts = model, torch.optim.SGD(model.parameters(), lr=0.1), _loader(STEPS)
        model, optimizer, loader = ech.prepare(*parts, layout="ddp")
        for x, y in loader:
            step(model, optimizer, x, y)
            if ech.is_main():
                optimizer.param_groups[0]["lr"] *= 0.3
    return said


def test_a_loop_whose_ranks_have_other_rates_is_told_at_its_end(ranks: Ranks) -> None:
    (said,), nothing = ranks(2, _said_of_rates)
    assert "must be copies" in said and not nothing, said


class Plain(ech.TrainUnit[Any]):
    """A training step as on one process."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.teacher = module, net(3 + ech.rank()).requires_grad_(False)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def train_step(self, state: ech.State, data: Any) -> None:
        nn.functional.mse_loss(self.module(data[0]), data[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _said_of_own_models() -> dict[str, list[str]]:
    """By how the ranks differ: in samples, in nothing, in the shapes of what they train."""
    said = {}
    for way in ("samples", "nothing", "shapes"):
        own = ech.rank() if way == "samples" else 0
        with told(REPLICAS) as said[f"unit, {way}"]:
            module = (
                nn.Sequential(nn.Linear(4, 3 + ech.rank()), nn.Linear(3 + ech.rank(), 1)).double() if way == "shapes" else net()
            )
            ech.train(Plain(module), [batch(ROWS, seed=own)] * 2, max_epochs=1)
    with told(REPLICAS) as said["loop, samples"]:  # which the ranks share
        own_loop(net(), DataLoader(TensorDataset(*batch(8, seed=0)), 4), layout="none")
    with told(REPLICAS) as said["loop, an average in shards"]:
        model = nn.Sequential(nn.Linear(4, 2), nn.AvgPool1d(2)).double()  # whose parts are of one shape
        parts = model, AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1), _loader(STEPS)
        model, _, optimizer, loader = ech.prepare(*parts, layout="fsdp")
        for x, y in loader:
            step(model, optimizer, x, y)
    return said


def test_ranks_that_each_train_a_model_of_their_own_are_told(ranks: Ranks) -> None:
    """A forgotten layout: nothing averaged the gradients, rank 0's model was saved, and nothing said so."""
    of_ranks = ranks(2, _said_of_own_models)
    for way, said in of_ranks[0].items():
        assert ["trains its own model" in line for line in said] == [True] * way.endswith("samples"), (way, said)
    assert not any(of_ranks[1].values())


class Scaled(nn.Module):
    """Its first parameter is a number, which is never split."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones((), dtype=torch.float64)), _model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale * self.inner(x)
        return out


def _two_saves_of_four(folder: Path) -> list[str]:
    with told(REPLICAS) as said:
        unit = Regression(module=Scaled(), layout="dp_replicate=2,dp_shard=2")
        saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=2)
        ech.train(unit, _loader(STEPS), max_epochs=1, callbacks=[Changes(_on_rank_0), saver])
    return said


@pytest.mark.full
def test_ranks_that_hold_copies_in_several_groups_agree_on_what_they_have_been_told(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks(4, _two_saves_of_four, tmp_path)
    (said,) = first
    assert "module.scale" in said and others == [[], [], []]
