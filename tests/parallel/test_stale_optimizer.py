"""Optimizers whose parameters a layout has replaced, or split in several ways: what they hold is trained, or refused in words."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import Batch, Net, batch, largest_difference, net, plain_training, seeded, whole
from tests.kit.own_loops import own_loop
from tests.kit.refusals import answer, refusal
from tests.kit.units import PARALLEL, SEVERAL, Own, Regression, under_each

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")


def _given(own: torch.optim.Optimizer, **options: Any) -> Regression:
    """Its optimizer is made by whoever makes the unit."""
    return Regression(optimizer=lambda module: own, **options)


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _trained(unit: Any) -> Any:
    """The parameters, or what was said."""
    rank = dist.get_rank() if dist.is_initialized() else 0

    def train() -> dict[str, torch.Tensor]:
        ech.train(unit, [batch(4, 10 * i + rank) for i in range(3)], max_epochs=1)
        return whole(unit.module)

    return answer(train)


def _early(layout: Any, *, assigned: bool = False) -> Any:
    module = net()
    own = _sgd(module.parameters())
    unit = _given(own, module=module, layout=layout)
    if assigned:
        unit.optimizer, unit.lr_scheduler = own, None
    return _trained(unit)


def _all_early() -> dict[str, Any]:
    with ech.on_meta():
        empty = net()
    meta = _given(_sgd(empty.parameters()), module=empty, layout="fsdp")
    wholes = ech.FSDPStrategy(reshard_after_forward=False)
    return {
        **{layout: _early(layout) for layout in PARALLEL},
        "tp": _early(ech.Layout(tp=-1)),
        "assigned": _early("fsdp", assigned=True),
        "assigned, ddp": _early("ddp", assigned=True),
        "meta": _trained(meta),
        "whole": _early(wholes),
    }


@pytest.mark.full
def test_an_optimizer_made_before_the_module_was_sharded_is_refused_or_right(ranks: Ranks) -> None:
    """A module that is not sharded keeps its parameters: then it may be made beforehand."""
    want, _, _ = plain_training([[batch(4, 10 * i), batch(4, 10 * i + 1)] for i in range(3)])
    first, second = ranks(2, _all_early)
    for name, got in first.items():
        if isinstance(got, str):
            assert got == second[name] and "before the module was sharded (first: first.weight)" in got, name
        else:
            assert name in ("ddp", "zero1", "assigned, ddp") and largest_difference(got, want) < 1e-12, name


def _copies(layout: str | None) -> list[Any]:
    found = [
        _trained(_given(_sgd(copy.deepcopy(net()).parameters()), module=net(), layout=layout)),
        _trained(_given(_sgd(nn.Linear(3, 3).parameters()), module=net(), layout=layout)),
    ]
    module = net()
    unit = _given(_sgd(module.parameters()), module=copy.deepcopy(module), layout=layout)
    unit.net = module  # an attribute of the unit: what else it is for, only a step can show
    some = net()  # of what it has, some is trained: a look at the first gradients shows what is not
    half = _sgd([*some.blocks.parameters(), *copy.deepcopy(some).first.parameters()])
    return [*found, _trained(unit), _trained(_given(half, module=some, layout=layout))]


def test_an_optimizer_over_another_model_is_refused_under_every_strategy(ranks: Ranks) -> None:
    for layout in ("ddp", "fsdp", "zero1", "none"):
        first, second = ranks(2, _copies, layout) if layout != "none" else [_copies(None)] * 2
        assert first == second
        assert "holds 12 parameters that no module of the unit has (first: float64 (8, 4))" in first[0], layout
        assert (
            "holds 2 parameters that no module of the unit has" in first[1] and "has a gradient in the first update" in first[2]
        )
        if layout != "fsdp":
            assert "none of the 2 parameters" in first[3] and "outside the module but shaped like its own" in first[3], layout


def _by_hand() -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def early(make: Any) -> Any:
        module = net()
        own = _sgd(module.parameters())
        return _trained(Own(make(module), own))

    def in_between(module: nn.Module) -> torch.optim.Optimizer:
        """Made when the blocks are split, and the root is not."""
        for block in module.blocks:
            fully_shard(block)
        own = _sgd(module.parameters())
        fully_shard(module)
        return own

    def after_a_look(module: nn.Module) -> torch.optim.Optimizer:
        """An evaluation leaves the root's parameters whole."""
        with torch.no_grad():
            module(batch(2, 0)[0])
        return _sgd(module.parameters())

    half, looked = net(), net()
    fully_shard(looked)
    return {
        "prepare_fsdp": early(lambda m: ech.layouts.prepare_fsdp(m, CPU)),
        "fully_shard": early(fully_shard),
        "fsdp1": early(lambda m: FullyShardedDataParallel(m, device_id=CPU)),
        "in between": _trained(Own(half, in_between(half))),
        "after a look": _trained(Own(looked, after_a_look(looked))),
    }


def test_in_a_unit_of_ones_own_too(ranks: Ranks) -> None:
    first, second = ranks(2, _by_hand)
    assert all(isinstance(got, str) for got in first.values()) and first == second
    assert "Own.optimizer holds 12 parameters, 12 of which are from before the module was sharded" in first["prepare_fsdp"]
    for name in ("fully_shard", "fsdp1", "in between"):
        assert "that no module of the unit has" in first[name], name


class Head(Regression):
    """Trains a module that is no part of its own, and a weight of its loss."""

    def __init__(self, layout: Any, how: str = "Head", **options: Any) -> None:
        super().__init__(layout=layout, lr=0.02, **options)
        self.how, self.head = how, seeded(nn.Linear, 5, in_features=1, out_features=1)
        self.log_weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        error = nn.functional.mse_loss(self.head(self.module(data[0])), data[1])
        return torch.exp(-self.log_weight) * error + self.log_weight, None

    def others(self) -> list[nn.Parameter]:
        return [*self.head.parameters(), self.log_weight]

    def trained(self) -> dict[str, torch.Tensor]:
        return {**whole(self.module), **{f"~{i}": p.detach().clone() for i, p in enumerate(self.others())}}

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        if self.how == "foreach":  # as a GPU's default: it treats a group as one list
            optimizer = torch.optim.AdamW([*module.parameters(), *self.others()], lr=0.01, foreach=True)
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if self.how == "Probe":  # the module stays as it is, though nobody froze it
            return torch.optim.SGD(self.others(), lr=0.02, momentum=0.9), None
        optimizer = torch.optim.SGD([*module.parameters(), *(self.others() if self.how == "Head" else [])], lr=0.02, momentum=0.9)
        if self.how == "Added":
            optimizer.add_param_group({"params": self.others()})
        return optimizer, None


def _rows(rank: int) -> list[Batch]:
    return [batch(2 + rank, 10 * i + rank) for i in range(5)]  # the last window is short


def _heads(kinds: list[tuple[str, Any]]) -> dict[str, Any]:
    done = {}
    for kind, layout in kinds:
        unit = Head(layout, kind, accumulate=2)
        ech.train(unit, _rows(dist.get_rank()), max_epochs=1)
        done[f"{kind} {layout}"] = unit.trained()
    return done


def _wanted(kind: str) -> dict[str, torch.Tensor]:
    """One process, all rows of a window at once."""
    unit, (first, second) = Head("none", kind), (_rows(0), _rows(1))
    others, module = unit.others(), net()
    made = torch.optim.SGD(others if kind == "Probe" else [*module.parameters(), *others], lr=0.02, momentum=0.9)

    def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(-others[2]) * nn.functional.mse_loss(unit.head(module(x)), y) + others[2]

    windows = [[*first[start : start + 2], *second[start : start + 2]] for start in (0, 2, 4)]
    got = plain_training(windows, module=module, optimizer=lambda _: made, loss_of=loss)[0]
    return {**got, **{f"~{i}": p.detach() for i, p in enumerate(others)}}


@pytest.mark.full
@pytest.mark.parametrize("layouts", SEVERAL)
def test_what_is_trained_besides_the_module_is_reduced_and_weighed_as_well(ranks: Ranks, layouts: list[str]) -> None:
    kinds = [(kind, layout) for kind in ("Head", "Added", "Probe") for layout in layouts]
    first, second = ranks(2, _heads, kinds)
    for kind, layout in kinds:
        got = first[f"{kind} {layout}"]
        assert largest_difference(got, _wanted(kind)) < 1e-12, (kind, layout)
        assert largest_difference(got, second[f"{kind} {layout}"]) == 0, (kind, layout)


class Grown(Head):
    """Its optimizer is given what is besides the module after the first update."""

    def on_train_step_end(self, state: ech.State, data: Batch, step: int, results: Any) -> None:
        if step == 1:
            for parameter in self.others():
                parameter.grad = None
            self.optimizer.add_param_group({"params": self.others()})


def test_what_an_optimizer_is_given_while_it_trains_is_weighed_in_one_process_too() -> None:
    unit, rows = Grown("none", "Grown", accumulate=2), [batch(size, 10 * size) for size in (2, 3, 4, 5, 1, 2)]
    ech.train(unit, rows, max_epochs=1)
    twin, module = Head("none"), net()
    others = twin.others()
    made = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)

    def grow(module: nn.Module, updates: int) -> None:
        if updates == 1:
            for parameter in others:
                parameter.grad = None
            made.add_param_group({"params": others})

    def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(-others[2]) * nn.functional.mse_loss(twin.head(module(x)), y) + others[2]

    windows = [rows[start : start + 2] for start in (0, 2, 4)]
    got = plain_training(windows, module=module, optimizer=lambda _: made, loss_of=loss, after=grow)[0]
    wanted = {**got, **{f"~{i}": p.detach() for i, p in enumerate(others)}}
    assert largest_difference(unit.trained(), wanted) < 1e-12


def _apart(layout: str) -> str:
    unit = Head(layout)
    unit.log_weight = nn.Parameter(torch.full((), float(dist.get_rank()), dtype=torch.float64))
    return refusal(ech.train, unit, [batch(2, 0)], max_epochs=1)


def test_what_begins_differently_on_each_rank_is_refused(ranks: Ranks) -> None:
    for layout in ("ddp", "fsdp"):
        first, second = ranks(2, _apart, layout)
        assert first == second and "that differ between ranks" in first


def _frozen(layout: str) -> list[float]:
    torch.manual_seed(dist.get_rank())
    return [
        float(p.sum()) for p in whole(Regression(module=nn.Linear(4, 4).requires_grad_(False), layout=layout).module).values()
    ]


def test_what_is_frozen_altogether_is_rank_0s_too(ranks: Ranks) -> None:
    """DistributedDataParallel has nothing to wrap there: each rank kept features of its own, below what else was trained."""
    for layout in ("ddp", "fsdp"):
        first, second = ranks(2, _frozen, layout)
        assert first == second


def _legitimate() -> dict[str, Any]:
    """Right programs, none of which may be refused."""
    tied = net()
    tied.blocks[1][0].weight = tied.blocks[0][0].weight
    frozen = net()
    frozen.requires_grad_(False)
    frozen.last.requires_grad_(True)
    sharded, helper = ech.layouts.prepare_fsdp(net(), CPU), nn.Linear(4, 4).double()
    units = {
        "tied": Regression(module=tied, layout="fsdp"),
        "frozen": _given(_sgd(frozen.last.parameters()), module=frozen, layout="ddp"),
        "part": Own(sharded, _sgd([p for n, p in sharded.named_parameters() if "last" in n])),
        # A model that is only looked through, and another that is trained, which the unit cannot know.
        "elsewhere": Own(sharded, _sgd(helper.parameters())),
        "cast": Regression(module=net(dtype=torch.float32).double(), layout="fsdp"),
    }
    return {name: _trained(unit) for name, unit in units.items()}


@pytest.mark.full
def test_right_programs_are_not_refused(ranks: Ranks) -> None:
    for done in ranks(2, _legitimate):
        assert {name: got for name, got in done.items() if isinstance(got, str)} == {}


def _foreach() -> dict[str, Any]:
    done = {}
    for layout in ("none", "ddp", "fsdp"):
        unit = Head(layout, "foreach", step_lr_interval="step")
        ech.train(unit, [batch(4, i) for i in range(3)], max_epochs=1)
        assert len(unit.optimizer.param_groups) == 1 and len(unit.optimizer.param_groups[0]["params"]) == 15
        done[layout] = unit.trained()
    return done


def test_a_group_of_sharded_and_whole_parameters_steps_as_one(ranks: Ranks) -> None:
    for done in ranks(2, _foreach):
        assert largest_difference(done["none"], done["ddp"]) < 1e-12 and largest_difference(done["none"], done["fsdp"]) < 1e-12


# --- an optimizer over whole and split parameters: its groups are the user's own outside of a step, however that ends


class Scaled(Net):
    """With a scalar, which stays whole under fsdp."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Failing(torch.optim.SGD):
    """Has no memory left in one of its steps."""

    steps, fails_at = 0, 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == self.fails_at:
            raise torch.OutOfMemoryError("nothing left")
        return super().step(closure)


def _stepped(make: Any, layout: str) -> dict[str, torch.Tensor]:
    unit = Regression(optimizer=lambda module: make(module.parameters()), layout=layout)
    rank = unit.prepared.data.rank if layout == "fsdp" else 0
    ech.train(unit, [batch(4, 2 * i + rank) for i in range(3)], max_epochs=1)
    return whole(unit.module)


def _plain(make: Any, layout: str) -> dict[str, torch.Tensor]:
    windows = [[batch(4, 2 * i + r) for r in range(2 if layout == "fsdp" else 1)] for i in range(3)]
    return plain_training(windows, optimizer=make)[0]


class Unit(Regression):
    fails_at = 2

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        optimizer = Failing(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.fails_at = self.fails_at
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def _after_an_error() -> list[tuple[int, int, list[float]]]:
    found = []
    for fails_at in (1, 2):
        unit = Unit(module=seeded(Scaled), layout="fsdp")
        unit.fails_at = fails_at
        count = len(list(unit.module.parameters()))
        with pytest.raises(torch.OutOfMemoryError):
            ech.train(unit, [batch(4, i) for i in range(3)], max_epochs=1)
        groups = unit.optimizer.state_dict()["param_groups"]
        unit.lr_scheduler.step()
        found.append((len(groups), len(groups[0]["params"]) - count, unit.lr_scheduler.get_last_lr()))
    return found


@pytest.mark.full
def test_after_a_step_that_failed_the_groups_are_the_users_own(ranks: Ranks) -> None:
    for found in ranks(2, _after_an_error):
        assert [each[:2] for each in found] == [(1, 0)] * 2
        assert all(len(rates) == 1 for *_, rates in found)


def _own_loop(late: bool) -> tuple[int, int, float]:
    model: Any = seeded(Scaled)
    optimizer: Any = Failing(model.parameters(), lr=0.1)
    optimizer.fails_at = 2
    scheduler = None if late else torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(24, 0)), 8, shuffle=True)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="fsdp")
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    failed = 0
    for _ in ech.epochs(loader, 1):
        for x, y in loader:
            with ech.window(model) as window:
                window.backward(nn.functional.mse_loss(model(x), y))
                try:
                    optimizer.step()
                except torch.OutOfMemoryError:
                    failed += len(optimizer.param_groups)
                optimizer.zero_grad()
                scheduler.step()
    return failed, len(optimizer.param_groups), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("late", [False, True])
def test_in_a_loop_of_ones_own_too_and_schedules_go_on(ranks: Ranks, late: bool) -> None:
    for found in ranks(2, _own_loop, late):
        assert found == (1, 1, pytest.approx(0.0125))


class Lamb(torch.optim.Optimizer):
    """Scales each parameter's step by the ratio of two norms, which it reads in the way that `read` says."""

    def __init__(self, parameters: Any, read: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.read = read

    def _of(self, tensor: torch.Tensor) -> Any:
        if self.read == "float":
            return float(tensor.pow(2).sum()) ** 0.5
        return tensor.norm().item() if self.read == "item" else tensor.norm()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                size, change = self._of(p), self._of(p.grad)
                p.sub_(p.grad * (group["lr"] * size / change if change > 0 else group["lr"]))


class Plain(torch.optim.Optimizer):
    """Makes its state by the shape of the parameter alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros(p.shape, dtype=p.dtype))
            p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=0.1)


class Squares(torch.optim.SGD):
    """Keeps one number for each parameter, as NovoGrad does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("square", torch.zeros((), dtype=p.dtype)).copy_(p.grad.square().sum())


READS = {read: partial(Lamb, read=read) for read in ("item", "float", "tensor")}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_an_optimizer_that_reads_norms_reads_those_of_whole_parameters(ranks: Ranks, layout: str) -> None:
    want = _plain(READS["item"], layout)
    for found in ranks(2, under_each, READS, lambda read: _stepped(READS[read], layout)):
        assert {read: far for read, got in found.items() if not (far := largest_difference(got, want)) < 1e-12} == {}


def test_an_optimizer_with_a_list_of_its_own_steps_on_all_of_it(ranks: Ranks) -> None:
    keeps = partial(First, keeps=True)
    for got in ranks(2, _stepped, keeps, "tp"):
        assert largest_difference(got, _plain(keeps, "tp")) < 1e-12


class First(Lamb):
    """Steps on its first group only; or on a list of its own, with that one's options."""

    def __init__(self, parameters: Any, keeps: bool) -> None:
        super().__init__(parameters, "tensor")
        self.mine = list(self.param_groups[0]["params"]) if keeps else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        for p in self.mine or group["params"]:
            p.sub_(p.grad * group["lr"])


def _searches() -> None:
    """By its closure, in a step of the user's own."""
    module = ech.layouts.prepare_module(net(), torch.device("cpu"), layout="fsdp")
    unit = Own(module, torch.optim.LBFGS(module.parameters()), closure=True)
    ech.train(unit, [batch(4, 0)], max_epochs=1)


def _own_loop_of(make: Any) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(24, 0)), 8, shuffle=True)
    own_loop(net(), loader, lambda model, x, y: nn.functional.mse_loss(model(x), y), optimizer=make, layout="fsdp")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        # Where some layers are split, the first group has some of the parameters.
        (
            lambda: _stepped(partial(First, keeps=False), "tp"),
            ("First.step must go through all of self.param_groups", "for group in self.param_groups"),
        ),
        (lambda: _stepped(Plain, "fsdp"), ("Plain cannot step parameters that are split", "torch.zeros_like(p)")),
        (lambda: _own_loop_of(Plain), ("Plain cannot step parameters that are split", "torch.zeros_like(p)")),
        (lambda: _own_loop_of(partial(Squares, lr=0.1)), ("Squares cannot step parameters that are split", "AssertionError")),
        (_searches, ("LBFGS cannot step parameters that are split over the ranks", "Train under 'ddp'")),
    ],
)
def test_an_optimizer_that_cannot_step_parts_is_named_with_a_remedy(ranks: Ranks, train: Any, words: tuple[str, ...]) -> None:
    for said in ranks(2, refusal, train):
        assert all(word in said for word in words), said


class Slowly(torch.optim.Optimizer):
    """Wraps another optimizer, and leaves out what torch's own makes of itself."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.state, self.defaults = base, base.state, base.defaults
        self.param_groups = base.param_groups
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure: Any = None) -> None:
        self.base.step()


def _slowly(parameters: Any) -> Slowly:
    return Slowly(torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp"])
def test_a_wrapper_that_leaves_out_torchs_hooks_trains_all_the_same(ranks: Ranks, layout: str) -> None:
    for got in ranks(2, _stepped, _slowly, layout):
        assert largest_difference(got, _plain(_slowly, layout)) < 1e-12
