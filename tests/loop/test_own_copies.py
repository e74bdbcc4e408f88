"""Copies of a model beside a loop of one's own, such as averages and targets; and values that are put into parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import OptimizerError, OwnLoopError, UsageError
from echelon.parallel.names import plain_name
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import prepared, step
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks

X, Y = batch(16, 0)


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, is_plain: bool, *more: Any
) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x, *more), y)

    if not is_plain:
        step(model, optimizer, x, y, loss=loss)
        return
    loss(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def _each(act: Callable[[Any, Any], object]) -> Callable[[Any, Any], None]:
    def way(average: Any, model: Any) -> None:
        for e, p in zip(average.parameters(), model.parameters(), strict=True):
            act(e, p)

    return way


def _states(average: Any, model: Any) -> None:
    theirs = getattr(model, "module", model).state_dict()
    for name, e in average.state_dict().items():
        e.copy_(0.9 * e + 0.1 * theirs[name])


def _target(average: Any, model: Any) -> None:
    average.load_state_dict(model.state_dict())
    model.load_state_dict(average.state_dict())


class _Follower(nn.Module):
    """As ema_pytorch's EMA: it holds the model that it averages, too, and pairs their parameters by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.average = model, copy.deepcopy(model).requires_grad_(False)

    def update_parameters(self, _model: nn.Module) -> None:
        theirs = dict(self.model.named_parameters())
        for name, e in self.average.named_parameters():
            if name in theirs:
                e.lerp_(theirs[name], 0.1)

    def __call__(self, x: torch.Tensor) -> Any:
        return self.average(x)


WAYS: dict[str, Callable[[Any, Any], None]] = {
    "lerp": _each(lambda e, p: e.lerp_(p, 0.1)),
    "scaled": _each(lambda e, p: e.mul_(0.9).add_(p, alpha=0.1)),
    "data": _each(lambda e, p: setattr(e, "data", 0.9 * e.data + 0.1 * p.data)),
    "states": _states,
    "target": _target,
    "averaged": lambda average, model: average.update_parameters(model),
    "follower": lambda average, model: average.update_parameters(model),
}


def _taught(layout: str, frozen: bool) -> Any:
    """A teacher that is called with gradients on, and follows behind each step; `frozen`, or nobody says so: its outputs are
    detached, as those of soft actor-critic's target.
    """
    model, teacher = net(), net().requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(X, Y), 8)
    is_plain = layout == "plain"
    if not is_plain:
        model, teacher, optimizer, loader = ech.prepare(model, teacher, optimizer, loader, layout=layout)
    for x, y in loader:
        update(model, optimizer, x, 0.5 * (y + teacher(x)).detach(), is_plain)
        with torch.no_grad():
            WAYS["scaled"](teacher, model)
    return whole(teacher)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_teacher_follows_what_it_teaches(ranks: Ranks, frozen: bool) -> None:
    for got in ranks(2, _taught, "fsdp", frozen):
        assert largest_difference(got, _taught("plain", frozen)) < 1e-12


def _averaged(way: str, layout: str, folder: Path | None = None, epochs: int = 3, until: int = 3) -> tuple[Any, list[float]]:
    """Plain PyTorch if the layout is "plain". Of the average: its weights, and what it computes after each epoch."""
    model: Any = net()
    makes = {"averaged": lambda of: AveragedModel(of, multi_avg_fn=get_ema_multi_avg_fn(0.9)), "follower": _Follower}
    average: Any = makes.get(way, copy.deepcopy)(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(X, Y), 8)
    is_plain = layout == "plain"
    if not is_plain:
        model, average, optimizer, loader = ech.prepare(
            model, average, optimizer, loader, layout=layout, checkpoints=folder and ech.Checkpoints(folder, every="epoch")
        )
    computed = []
    for epoch in range(epochs) if is_plain else ech.epochs(loader, epochs):
        if epoch == until:
            break
        for x, y in loader:
            update(model, optimizer, x, y, is_plain)
            with torch.no_grad():
                WAYS[way](average, model)
        average.eval()
        with torch.no_grad():
            computed.append(float(average(X).sum()))
    return whole(average), computed


class _OfParts(nn.Module):
    """As DALLE2's decoder: each part has an optimizer and an average of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([net(), net()])

    def forward(self, x: torch.Tensor, which: int) -> Any:
        return self.parts[which](x)


def _averages_of_parts(layout: str) -> list[Any]:
    model: Any = _OfParts()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.parts]
    averages = [_Follower(part) for part in model.parts]
    loader: Any = DataLoader(TensorDataset(X, Y), 8)
    is_plain = layout == "plain"
    if not is_plain:
        model, *others, loader = ech.prepare(model, *optimizers, *averages, loader, layout=layout)
        optimizers, averages = others[:2], others[2:]
    for which in (0, 1):
        for x, y in loader:
            update(model, optimizers[which], x, y, is_plain, which)
            with torch.no_grad():
                averages[which].update_parameters(model)
    return [whole(each.average) for each in averages]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_an_average_may_follow_a_part_of_a_model(ranks: Ranks, layout: str) -> None:
    """It was taken for a model to be trained, got a wrapper under ddp, and averaged nothing."""
    want = _averages_of_parts("plain")
    for got in ranks(2, _averages_of_parts, layout):
        for average, plain in zip(got, want, strict=True):
            assert largest_difference(average, plain) < 1e-12


def _copied_on_meta(layout: str) -> None:
    """A copy made afterwards began with other values than the model under fsdp, and with torch's own error under ddp."""
    for within in (True, False):
        with ech.on_meta():
            model: Any = net()
            average: Any = copy.deepcopy(model) if within else None
        average = average or copy.deepcopy(model)
        given = model, average, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(X, Y), 8)
        if not within:
            with refused(OwnLoopError):
                ech.prepare(*given, layout=layout)
            continue
        model, average, *_ = ech.prepare(*given, layout=layout)
        assert largest_difference(whole(average), whole(model)) == 0


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_copy_of_a_model_on_meta_begins_with_its_values(ranks: Ranks, layout: str) -> None:
    ranks(2, _copied_on_meta, layout)


def _ways(layout: str) -> dict[str, tuple[Any, list[float]]]:
    return {way: _averaged(way, layout) for way in WAYS}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp", "tp", "ddp", "zero2"])
def test_a_copy_that_prepare_is_given_is_split_as_the_model_is(ranks: Ranks, layout: str) -> None:
    want = _ways("plain")
    for got in ranks(2, _ways, layout):
        for way, (weights, computed) in got.items():
            assert largest_difference(weights, want[way][0]) < 1e-12, way
            assert computed == pytest.approx(want[way][1], abs=1e-11), way


@pytest.mark.full
def test_an_average_is_saved_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    straight = ranks(2, _averaged, "averaged", "fsdp")
    ranks(2, _averaged, "averaged", "fsdp", tmp_path, until=2)
    for got, want in zip(ranks(2, _averaged, "averaged", "fsdp", tmp_path), straight, strict=True):
        assert largest_difference(got[0], want[0]) == 0 and got[1] == want[1][2:]


def test_a_copy_that_checkpoints_do_not_have_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An average made after prepare() began anew at a restart, in silence; a copy made in training may be a snapshot."""
    model, optimizer, loader = prepared(DataLoader(TensorDataset(X, Y), 8), layout="none", checkpoints=tmp_path)
    copies = [AveragedModel(model), copy.deepcopy(model)]
    told = [line for line in caplog.messages if "is in no checkpoint" in line]
    for x, y in loader:
        update(model, optimizer, x, y, is_plain=False)
        copies.append(copy.deepcopy(model))
    assert told == [line for line in caplog.messages if "is in no checkpoint" in line] and len(told) == 1


def _with_teacher() -> bool:
    teacher = nn.Linear(4, 1).double().requires_grad_(False)
    prepared(teacher, DataLoader(TensorDataset(X, Y), 8), layout="fsdp")
    return hasattr(teacher.weight, "device_mesh")


def _evaluated_by_its_average() -> tuple[float | None, bool]:
    model = net()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [DataLoader(TensorDataset(X, Y), 8) for _ in range(2)]
    model, average, optimizer, *loaders = ech.prepare(model, average, optimizer, *loaders, layout="ddp")
    for x, y in loaders[0]:
        update(model, optimizer, x, y, False)
    with ech.evaluating(average) as evaluation:
        for x, y in loaders[1]:
            evaluation.log("loss", nn.functional.mse_loss(average(x), y))
        modes = average.training or model.training
    return evaluation.numbers.get("loss"), modes


def test_an_average_may_be_what_an_evaluation_is_asked_for(ranks: Ranks) -> None:
    (first, modes), second = ranks(2, _evaluated_by_its_average)
    assert second == (first, modes) and first is not None and not modes


def test_a_teacher_of_another_kind_stays_whole(ranks: Ranks) -> None:
    assert ranks(2, _with_teacher) == [False, False]


# --- values that are put into parameters, or into their gradients


def _surgery(layout: str) -> tuple[dict[str, torch.Tensor], str]:
    """As PCGrad: gradients of each loss by themselves, changed, and put in place of those of the sum."""
    model: Any = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(X, Y), 8)
    inner, is_plain = model, layout == "plain"
    if not is_plain:
        model, optimizer, loader = ech.prepare(model, optimizer, loader, layout=layout)
    try:
        for x, y in loader:
            with nullcontext() if is_plain else ech.window(model) as window:
                loss, held = nn.functional.mse_loss(model(x), y), list(inner.last.parameters())
                found = torch.autograd.grad(loss, held, retain_graph=True)
                optimizer.zero_grad()
                loss.backward() if is_plain else window.backward(loss)
                for p, g in zip(held, found, strict=True):
                    p.grad = 3 * (g if is_plain else ech.all_mean(g))
                optimizer.step()
    except UsageError as error:
        return {}, str(error)
    return whole(model), ""


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_gradients_put_in_by_hand_are_stepped_or_refused(ranks: Ranks, layout: str) -> None:
    """Under fsdp they were put into gathered parameters: not stepped, but added to the next pass."""
    want = _surgery("plain")[0]
    for got, said in ranks(2, _surgery, layout):
        if layout == "fsdp":
            assert "a gradient must not be put into a parameter of Net that was gathered for a pass" in said
        else:
            assert largest_difference(got, want) < 1e-12


class Older(torch.optim.Optimizer):
    """Puts new tensors into parameters, as scripts of long ago do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data = p.data - 0.1 * p.grad.data


def _put(layout: str) -> dict[str, torch.Tensor]:
    model: Any = net()
    optimizer: Any = Older(model.parameters())
    loader: Any = DataLoader(TensorDataset(X, Y), 8)
    is_plain = layout == "plain"
    if not is_plain:
        model, optimizer, loader = ech.prepare(model, optimizer, loader, layout=layout)
    for x, y in loader:
        update(model, optimizer, x, y, is_plain)
        for p in model.parameters():
            p.data = p.data.clamp(-0.4, 0.4)
    return whole(model)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp", "tp"])
def test_values_that_are_put_into_parameters_are_there(ranks: Ranks, layout: str) -> None:
    want = _put("plain")
    for got in ranks(2, _put, layout):
        assert largest_difference(got, want) < 1e-12


# --- models that were compiled or wrapped before `prepare`, and optimizers of other parameters


DATA = TensorDataset(*batch(16, 0))


def _recomputed(model: Any) -> Any:
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    return model


WRAPPED = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "recomputed": _recomputed,
    "as it is": lambda model: model,
}


def _trained(how: str, layout: str) -> dict[str, torch.Tensor]:
    model = WRAPPED[how](net())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(DATA, 8)
    average: Any = copy.deepcopy(model)
    model, average, optimizer, loader = ech.prepare(model, average, optimizer, loader, layout=layout)
    for _ in ech.epochs(loader, 2):
        for x, y in loader:
            step(model, optimizer, x, y)
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
    both = {"model": model, "average": average}
    return {f"{name}.{plain_name(n)}": p for name, each in both.items() for n, p in whole(each).items()}


def _each_way(layout: str) -> dict[str, dict[str, torch.Tensor]]:
    return {how: _trained(how, layout) for how in WRAPPED}


@pytest.mark.parametrize("layout", ["fsdp", "zero2", pytest.param("zero1", marks=pytest.mark.full)])
def test_what_is_compiled_or_recomputed_before_is_trained_under_every_layout(ranks: Ranks, layout: str) -> None:
    got = ranks(2, _each_way, layout)[0]
    apart = {how: largest_difference(each, got["as it is"]) for how, each in got.items()}
    assert max(apart.values()) < 1e-12, apart


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = net(0), net(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x)


def _of_a_copy(layout: str) -> None:
    """The optimizer holds one part of the model, and a copy of the other."""
    model: Any = Two()
    other = copy.deepcopy(model.two)
    optimizer: Any = torch.optim.SGD([*model.one.parameters(), *other.parameters()], lr=0.1)
    model, optimizer, loader = ech.prepare(model, optimizer, DataLoader(DATA, 8), layout=layout)
    with refused(UsageError if layout == "fsdp" else OptimizerError) as caught:
        for x, y in loader:
            step(model, optimizer, x, y)
    assert "give to prepare() with it" in str(caught.value) and "configure" not in str(caught.value)


@pytest.mark.parametrize("layout", ["none", "fsdp"])
def test_words_about_its_optimizer_are_of_the_loop(ranks: Ranks, layout: str) -> None:
    ranks(1 if layout == "none" else 2, _of_a_copy, layout)


def _wrapped_by_hand(wraps: bool) -> list[float]:
    model = net()
    given = nn.parallel.DistributedDataParallel(model) if wraps else model
    given, optimizer, loader = ech.prepare(given, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, 8))
    for x, y in loader:
        step(given, optimizer, x, y)
    return [float(p.sum()) for p in model.parameters()]


def test_a_model_that_its_author_wrapped_needs_no_word_for_that(ranks: Ranks) -> None:
    assert ranks(2, _wrapped_by_hand, True) == ranks(2, _wrapped_by_hand, False)
