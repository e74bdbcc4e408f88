"""Models that are changed after they were made parallel, or that parallel ranks cannot train as one process does."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import echelon as ech
from echelon.common.errors import EchelonError, LayoutError, UsageError
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, whole
from tests.kit.refusals import refused
from tests.kit.units import KINDS, Regression, under_each

pytestmark = pytest.mark.standing_ranks

Change = Callable[[Any, torch.optim.Optimizer, int], torch.optim.Optimizer | None]
STEPS, ROWS, CHANGED = 5, 4, 2


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


def _nothing(module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def _grow(module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == CHANGED:
        torch.manual_seed(7)
        module.more = nn.Linear(4, 1).double()
        optimizer.add_param_group({"params": module.more.parameters()})


def _grow_and_replace(module: Any, optimizer: torch.optim.Optimizer, step: int) -> torch.optim.Optimizer | None:
    if step != CHANGED:
        return None
    torch.manual_seed(7)
    module.more = nn.Linear(4, 1).double()
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _rescale(module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    module.scale = 0.5**step


def _load(module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == CHANGED:
        getattr(module, "module", module).load_state_dict(_model(seed=3).state_dict())


def _convert(module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    module.to("cpu").double()


def _skip_last(module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    module.skips = step == STEPS - 1


CHANGES: dict[str, Change] = {
    "grow and replace": _grow_and_replace,
    "grow": _grow,
    "rescale": _rescale,
    "load": _load,
    "convert": _convert,
    "skip last": _skip_last,
    "nothing": _nothing,
}


class Changes(ech.Callback):
    def __init__(self, change: Change) -> None:
        self.change = change

    def on_train_step_start(self, state: ech.State, unit: Any) -> None:
        replaced = self.change(unit.module, unit.optimizer, unit.train_progress.num_steps_completed)
        unit.optimizer = replaced or unit.optimizer


def _trained(layout: Any, change: str, model: Callable[[], nn.Module] = _model) -> dict[str, torch.Tensor]:
    unit = Regression(module=model(), layout=layout)
    data = ech.Loader(TensorDataset(*batch(ROWS * STEPS, seed=1)), global_batch=ROWS, shuffle=False)
    ech.train(unit, data, max_epochs=1, callbacks=[Changes(CHANGES[change])])
    return whole(unit.module)


def _reference(change: str, model: Callable[[], nn.Module] = _model, kind: str = "SGD") -> dict[str, torch.Tensor]:
    """The same in plain PyTorch."""
    module = model()
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
    x, y = batch(ROWS * STEPS, seed=1)
    for step in range(STEPS):
        optimizer = CHANGES[change](module, optimizer, step) or optimizer
        rows = slice(step * ROWS, (step + 1) * ROWS)
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


def _copied() -> tuple[list[str], bool]:
    unit = Regression(module=_model(), layout="ddp")
    other = copy.deepcopy(unit.module)
    other.scale = 3.0
    other(batch(2, seed=1)[0]).sum().backward()
    return sorted(set(vars(other)) - set(vars(unit.module))), other.module.scale == 3.0 != unit.module.scale


def test_a_copy_of_the_wrapper_has_its_own_parts_and_reaches_its_own_module(ranks: Ranks) -> None:
    assert ranks(2, _copied) == [([], True)] * 2


def _grown_apart(layout: str) -> str:
    def grow(module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == CHANGED:  # from each rank's own RNG
            module.more = nn.Linear(4, 1).double()
            optimizer.add_param_group({"params": module.more.parameters()})

    CHANGES["apart"] = grow
    return _refusal(layout, "apart")


def _refusal(layout: Any, change: str = "nothing", model: Callable[[], nn.Module] = _model) -> str:
    try:
        _trained(layout, change, model)
    except EchelonError as error:
        return str(error)
    return "nothing was refused"


def test_a_layer_that_each_rank_drew_for_itself_is_refused(ranks: Ranks) -> None:
    for of_rank in ranks(2, under_each, ["ddp", "fsdp"], _grown_apart):
        for layout, said in of_rank.items():
            assert "the module has got parameters that differ between ranks" in said, layout


def _skipping_at_the_end() -> Any:
    found = ech.DDPStrategy(find_unused_parameters=True)
    return under_each(["ddp", "zero1"], _refusal, "skip last"), _trained(found, "skip last"), _trained("fsdp", "skip last")


@pytest.mark.full
def test_layers_that_only_the_last_step_left_out_are_named_before_its_update(ranks: Ranks) -> None:
    """torch raises in the next forward pass, and there is none: each rank kept gradients of its own."""
    want = _reference("skip last")
    for told, *right in ranks(2, _skipping_at_the_end):
        for layout, said in told.items():
            assert "got no gradient of blocks.0.0.weight and 7 more. " in said, layout
            assert "find_unused_parameters=True" in said
        for got in right:
            assert largest_difference(got, want) < 1e-12


# --- optimizers that change


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
    """Gradients of the new ones were 65536 times too large, and an optimizer that had been replaced still stepped."""
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


def test_a_unit_that_has_trained_can_be_pickled() -> None:
    unit = Regression(module=_model(), device=torch.device("cpu"))
    ech.train(unit, _loader(), max_epochs=1)
    assert largest_difference(whole(pickle.loads(pickle.dumps(unit)).module), whole(unit.module)) == 0


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
    """Gradients of layers that were unfrozen in a pass stayed each rank's own."""
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


def _own_loop(layout: str, kind: str) -> dict[str, torch.Tensor]:
    model = _model()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    loader = ech.Loader(TensorDataset(*batch(ROWS * STEPS, seed=1)), global_batch=ROWS, shuffle=False)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, layout=layout)
    for _ in ech.epochs(loader, 1):
        for x, y in loader:
            with ech.window(model) as window:
                window.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return whole(model)


@pytest.mark.full
def test_an_optimizer_that_makes_its_state_as_it_is_built_is_taken(ranks: Ranks) -> None:
    """Adagrad was taken for one that had stepped."""
    want = _reference("nothing", kind="Adagrad")
    for of_rank in ranks(2, under_each, KINDS, _own_loop, "Adagrad"):
        for layout, got in of_rank.items():
            assert largest_difference(got, want) < 1e-12, layout


def _parts_in_a_window() -> str:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ech.Loader(TensorDataset(*batch(ROWS, seed=1)), global_batch=ROWS)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="fsdp")
    with refused(LayoutError) as raised:
        for _ in ech.epochs(loader, 1):
            for x, _ in loader:
                with ech.window(model) as window:
                    window.backward(model.last(model.first(x)).mean())
    return str(raised.value)


def test_what_torch_says_of_parts_is_explained_in_a_window(ranks: Ranks) -> None:
    for said in ranks(2, _parts_in_a_window):
        assert "its parameters are split over the ranks" in said


# --- hooks on parameters


def _masked() -> Changing:
    model = _model()
    model.first.weight.register_hook(lambda gradient: gradient * 0)
    return model


def _stepping() -> Changing:
    model = _model()
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def _late_hook() -> str:
    unit = Regression(module=_model(), layout="fsdp")
    next(unit.module.parameters()).register_hook(lambda gradient: gradient * 0)
    data = ech.Loader(TensorDataset(*batch(ROWS, seed=1)), global_batch=ROWS)
    with refused(LayoutError) as raised:
        ech.train(unit, data, max_epochs=1)
    return str(raised.value)


def _hooks() -> Any:
    lost = {name: under_each(["fsdp", "zero2"], _refusal, "nothing", model) for name, model in HOOKED.items()}
    return _trained("ddp", "nothing", _masked), lost, _late_hook()


HOOKED = {"mask": _masked, "step": _stepping}


@pytest.mark.full
def test_a_hook_on_a_parameter_acts_or_is_refused(ranks: Ranks) -> None:
    want = _reference("nothing", _masked)
    for masked, lost, late in ranks(2, _hooks):
        assert largest_difference(masked, want) < 1e-12
        for of_kind in lost.values():
            for layout, said in of_kind.items():
                assert said.startswith(f"layout {layout!r} puts another parameter in the place of first.weight"), said
        assert "register_step_pre_hook" in late


# --- models


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4, **options)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.rows((x[:, 0].abs() * 4).long().clamp(max=7)))


def _words(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Words(**options).double()


def _bounded() -> nn.Module:
    return _words(max_norm=1.0)


def _sparse() -> nn.Module:
    return _words(sparse=True)


def _transposed() -> nn.Module:
    model = _model()
    model.first.weight = nn.Parameter(model.first.weight.detach().t().contiguous().t())
    return model


def _container() -> nn.Module:
    return nn.ModuleDict({"net": net()})


class Penalty(Regression):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = data[0].requires_grad_(), data[1]
        out = self.module(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return nn.functional.mse_loss(out, y) + slope.square().sum(1).mean(), out


def _penalty() -> str:
    unit = Penalty(module=_model(), layout="fsdp")
    with refused(LayoutError) as raised:
        ech.train(unit, [batch(ROWS, seed=1)], max_epochs=1)
    return str(raised.value)


def _models() -> dict[str, Any]:
    return {
        "bounded": under_each(["ddp", "fsdp"], _refusal, "nothing", _bounded),
        "sparse": _refusal("fsdp", "nothing", _sparse),
        "container": _refusal("fsdp", "nothing", _container),
        "penalty": _penalty(),
        "transposed": _trained("fsdp", "nothing", _transposed),
    }


@pytest.mark.full
def test_what_a_strategy_cannot_train_is_refused_with_what_to_do(ranks: Ranks) -> None:
    want = _reference("nothing", _transposed)
    for of_rank in ranks(2, _models):
        for said in of_rank["bounded"].values():
            assert said.startswith("rows: max_norm must be None on several ranks, got 1.")
        assert "sparse=False" in of_rank["sparse"]
        assert "must have a forward, got a ModuleDict" in of_rank["container"]
        assert "'ddp' or 'zero1'" in of_rank["penalty"]
        assert largest_difference(of_rank["transposed"], want) < 1e-12


# --- copies that drift apart


def _noise(module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


def _on_rank_0(module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if dist.get_rank() == 0:
        with torch.no_grad():
            next(module.parameters()).mul_(0.5)


CHANGES |= {"noise": _noise, "on rank 0": _on_rank_0}


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("echelon.loop.checkpointing.replicas")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def _said_of_copies(layout: str, change: str, folder: Path | None) -> list[str]:
    with _heard() as said:
        unit = Regression(module=_model(), layout=layout)
        name = f"{layout} {change}"
        savers = [] if folder is None else [ech.DistributedCheckpointSaver(folder / name, save_every_n_updates=2)]
        data = ech.Loader(TensorDataset(*batch(ROWS * STEPS, seed=1)), global_batch=ROWS)
        ech.train(unit, data, max_epochs=1, callbacks=[Changes(CHANGES[change]), *savers])
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


def _said_of_rates() -> list[str]:
    """A rate that falls on rank 0 alone; the epoch in which it does is the last."""
    model, loader = _model(), ech.Loader(TensorDataset(*batch(ROWS * STEPS, seed=1)), global_batch=ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _heard() as said:
        trained, optimizer, batches = ech.prepare(model, optimizer, loader, layout="ddp")
        for rows, wanted in batches:
            with ech.window(trained) as window:
                window.backward(nn.functional.mse_loss(trained(rows), wanted))
                optimizer.step()
                optimizer.zero_grad()
            if ech.is_main():
                optimizer.param_groups[0]["lr"] *= 0.3
    return said


def test_a_loop_whose_ranks_have_other_rates_is_told_at_its_end(ranks: Ranks) -> None:
    (said,), nothing = ranks(2, _said_of_rates)
    assert "must be copies" in said and not nothing, said


class Scaled(nn.Module):
    """Its first parameter is a number, which is never split."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones((), dtype=torch.float64)), _model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale * self.inner(x)
        return out


def _two_saves_of_four(folder: Path) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("echelon.loop.checkpointing.replicas")
    log.addHandler(handler)
    try:
        unit = Regression(module=Scaled(), layout="dp_replicate=2,dp_shard=2")
        saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=2)
        ech.train(unit, _loader(STEPS), max_epochs=1, callbacks=[Changes(_on_rank_0), saver])
    finally:
        log.removeHandler(handler)
    return said


@pytest.mark.full
def test_ranks_that_hold_copies_in_several_groups_agree_on_what_they_have_been_told(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 3 shares no group with rank 0: it did not know, and waited for the others at the next save."""
    first, *others = ranks(4, _two_saves_of_four, tmp_path)
    (said,) = first
    assert "module.scale" in said and others == [[], [], []]
