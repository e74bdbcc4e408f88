"""One norm over any mixture of whole and sharded gradients: torch's own over the whole tensors is the reference."""

from __future__ import annotations

import math
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import UsageError
from echelon.parallel.gradients.clip import clip_by_norm_, clip_by_value_, pass_zeros, scale_
from echelon.parallel.gradients.unreduced_params import after_backward
from echelon.world.mesh import ParallelDims
from tests.conftest import Ranks
from tests.kit.models import Batch, Net, batch, largest_difference, net, plain_training, seeded, whole
from tests.kit.own_loops import own_loop
from tests.kit.refusals import answer, refusal
from tests.kit.units import Own as Steps
from tests.kit.units import Regression, under_each

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")
NORM_TYPES = [1.0, 2.0, 3.0, math.inf]


def _whole(dtype: torch.dtype = torch.float64, size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 6), (7,), (4, 4), (6, 3), (3, 5), (1, 2), (4,), (2, 2)]
    return [torch.randn(shape, generator=generator, dtype=dtype) * (i + 1) * size for i, shape in enumerate(shapes)]


def _mixture(grads: list[torch.Tensor]) -> list[nn.Parameter]:
    """The same gradients: whole, split over one mesh, over another, over both, over one of two; unevenly, too."""
    dims = ParallelDims.of(4, tp=2)
    root, data, tp = dims.root_mesh(CPU), dims.data_mesh(CPU), dims.tp_mesh(CPU)
    kinds: list[Any] = [
        None,
        (data, [Shard(0)]),
        (tp, [Shard(1)]),
        (root, [Shard(0), Shard(1)]),
        (root, [Shard(0), Replicate()]),
        (root, [Replicate(), Shard(0)]),
        (root, [Replicate(), Replicate()]),
        (tp, [Replicate()]),
    ]
    parameters = []
    for grad, kind in zip(grads, kinds, strict=True):
        held = grad.clone() if kind is None else distribute_tensor(grad, *kind)
        parameter = nn.Parameter(torch.zeros_like(held))
        parameter.grad = held
        parameters.append(parameter)
    return parameters


def _gathered(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    grads = [p.grad for p in parameters if p.grad is not None]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def _clip(max_norm: float) -> list[tuple[float, list[torch.Tensor], int]]:
    found = []
    for norm_type in NORM_TYPES:
        parameters = _mixture(_whole())
        with mock.patch("torch.distributed.all_reduce", side_effect=dist.all_reduce) as sent:
            norm = clip_by_norm_(parameters, max_norm, norm_type)
        assert norm.dim() == 0 and norm.dtype == torch.float64
        found.append((float(norm), _gathered(parameters), sent.call_count))
    return found


@pytest.mark.full
@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_one_norm_for_any_mixture_in_one_message_per_axis(ranks: Ranks, max_norm: float) -> None:
    results = ranks(4, _clip, max_norm)
    for norm_type, found in zip(NORM_TYPES, zip(*results, strict=True), strict=True):
        plain = [nn.Parameter(torch.zeros_like(g)) for g in _whole()]
        for parameter, grad in zip(plain, _whole(), strict=True):
            parameter.grad = grad
        want = float(torch.nn.utils.clip_grad_norm_(plain, max_norm, norm_type))
        assert len({norm for norm, _, _ in found}) == 1  # to the bit, on every rank
        for norm, grads, messages in found:
            assert norm == pytest.approx(want, rel=1e-13) and messages == 2
            for got, parameter in zip(grads, plain, strict=True):
                assert torch.allclose(got, parameter.grad, rtol=1e-12, atol=0)


def _others() -> dict[str, Any]:
    parameters = _mixture(_whole())
    clip_by_value_(parameters, 0.7)
    scale_(parameters, 3.0)
    found: dict[str, Any] = {"values": _gathered(parameters)}
    # A kind without any gradient on one rank only must not leave the others waiting.
    parameters = _mixture(_whole())
    if dist.get_rank() in (1, 3):
        parameters[2].grad = None  # its tensor-parallel half: zeros on these ranks
    found["missing"] = float(clip_by_norm_(parameters, math.inf))
    found["large"] = float(clip_by_norm_(_mixture(_whole(torch.float32, 7e17)), math.inf))
    none = _mixture(_whole())
    for parameter in none:
        parameter.grad = None
    found["none"] = float(clip_by_norm_(none, 1.0))
    with pytest.raises(UsageError, match=r"norm_type must be above 0, .*, got 0"):
        clip_by_norm_(parameters, 1.0, 0.0)
    return found


@pytest.mark.full
def test_values_scales_missing_and_huge_gradients(ranks: Ranks) -> None:
    whole = _whole()
    half = [g.clone() for g in whole]
    half[2][:, 2:] = 0
    for found in ranks(4, _others):
        for got, grad in zip(found["values"], whole, strict=True):
            assert torch.equal(got, grad.clamp(-0.7, 0.7) * 3.0)
        assert found["missing"] == pytest.approx(float(torch.nn.utils.get_total_norm(half)), rel=1e-13)
        norm = float(torch.nn.utils.get_total_norm([g.double() for g in _whole(torch.float32, 7e17)]))
        assert found["large"] == pytest.approx(norm, rel=1e-6)  # its square is beyond float32
        assert found["none"] == 0.0


def test_where_a_device_says_so_means_over_nothing_pass_zeros() -> None:
    """Of twenty losses at different depths, one divides by weights beforehand; the other way gradients are as they were."""

    def gradient(counts: torch.Tensor, where: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(4, 1, dtype=torch.float64)
        errors = layer(torch.ones(6, 4, dtype=torch.float64)).square().squeeze(1)
        loss = (errors * (counts / counts.sum())).sum()
        for power in range(1, 20):
            loss = loss + (errors.tanh() ** power * counts).sum() / counts.sum()
        pass_zeros(loss, torch.tensor(where))
        loss.backward(gradient=loss.new_tensor(0.0 if where else 0.5))
        assert layer.weight.grad is not None
        return layer.weight.grad

    assert torch.equal(gradient(torch.zeros(6, dtype=torch.float64), True), torch.zeros(1, 4, dtype=torch.float64))
    counted = torch.tensor([1.0, 0, 1, 1, 0, 1], dtype=torch.float64)
    assert bool(gradient(counted, False).abs().min() > 0)


def test_what_is_to_run_after_a_backward_pass_runs_once_with_all_gradients_in_the_callers_thread() -> None:
    """By a private name of torch's."""
    first, last = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    said: list[tuple[bool, bool, bool]] = []

    def ended() -> None:
        said.append((first.grad is not None, last.grad is not None, threading.current_thread() is threading.main_thread()))

    # `last` is used last, so that its gradient comes first.
    last.register_post_accumulate_grad_hook(lambda _: after_backward(ended))
    for times in (1, 2):
        ((first * 2).exp() * last).sum().backward()
        assert said == [(True, True, True)] * times


# --- a forward pass around DistributedDataParallel: AutoUnit reduces all the same, a unit of one's own is told


UPDATES, ACCUMULATION = 3, 2


class Methods(Net):
    """A model that computes its loss itself, as many of Hugging Face's do, and that has a buffer which training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.encode(x))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self(x), y)


class Around(Regression):
    """Calls the module in one of the ways in which people do."""

    def __init__(self, way: str, module: nn.Module, **options: Any) -> None:
        self.net, self.way, self.count = module, way, 0  # as a LightningModule has it
        super().__init__(module=module, **options)

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        (x, y), net = data, self.net
        self.count += 1
        way = self.way
        if way == "in turns":
            way = ("wrapper", "inner", "inner", "wrapper", "forward")[self.count % 5]
        elif way == "by rank":
            way = ("wrapper", "inner")[dist.get_rank()]
        elif way == "twice":
            half = len(x) // 2
            one = nn.functional.mse_loss(self.module(x[:half]), y[:half], reduction="sum")
            return (one + nn.functional.mse_loss(net(x[half:]), y[half:], reduction="sum")) / len(x), None
        if way == "after a look":
            with torch.no_grad():
                self.module(x)
            way = "inner"
        out = {
            "wrapper": lambda: self.module(x),
            "inner": lambda: net(x),
            "inside": lambda: self.prepared.unwrapped(x),
            "forward": lambda: net.forward(x),
            "parts": lambda: net.last(net.encode(x)),
            "functional": lambda: torch.func.functional_call(net, dict(net.named_parameters()), (x,)),
            "method": lambda: None,
        }[way]()
        return (net.loss(x, y) if out is None else nn.functional.mse_loss(out, y)), out


WAYS = ("wrapper", "inner", "inside", "forward", "parts", "functional", "method", "in turns", "by rank", "twice", "after a look")
LAYOUTS: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "unused": lambda: ech.DDPStrategy(find_unused_parameters=True),
    "static": lambda: ech.DDPStrategy(static_graph=True),
    "copies": lambda: ech.DDPStrategy(gradient_as_bucket_view=False),
}


def _data(rank: int, size: int) -> list[Batch]:
    return [batch(2 + 2 * ((i + rank) % 2), 10 * i + rank) for i in range(UPDATES * ACCUMULATION)]


def _train(ways: list[tuple[str, str]], *, recompute: bool = False) -> dict[tuple[str, str], Any]:
    rank, done = dist.get_rank(), {}
    for name, way in ways:
        options: dict[str, Any] = {"gradient_accumulation_steps": _accumulation(name), "clip_grad_norm": 0.5}
        if recompute:
            options["activation_checkpoint_params"] = ech.layouts.ActivationCheckpointParams()
        unit = Around(way, seeded(Methods), layout=LAYOUTS[name](), **options)
        ech.train(unit, _data(rank, dist.get_world_size()), max_epochs=1)
        unit.module.eval()
        with torch.no_grad():
            unit.module(batch(2, 99)[0])  # as an evaluation begins
        done[name, way] = whole(unit.module), unit.norms, unit.prepared.unwrapped.mean.clone()
    return done


def _accumulation(layout: str) -> int:
    return 1 if layout == "static" else ACCUMULATION  # of a static graph torch 2.13 accumulates nothing


def _want(ranks: int, size: int = ACCUMULATION) -> tuple[dict[str, torch.Tensor], list[float]]:
    shares = [_data(r, ranks) for r in range(ranks)]
    starts = range(0, UPDATES * ACCUMULATION, size)
    windows = [[share[start + m] for m in range(size) for share in shares] for start in starts]
    got, _, norms = plain_training(windows, clip=0.5, module=seeded(Methods))
    return got, norms


@pytest.mark.full
def test_gradients_are_reduced_whatever_way_the_module_is_called(ranks: Ranks) -> None:
    # A static graph is the same in every step, and has no forward pass of the wrapper's own after one around it.
    ways = [(s, w) for s in LAYOUTS for w in WAYS if not (s == "static" and w in ("in turns", "twice"))]
    first, second = ranks(2, _train, ways)
    for key, (got, got_norms, mean) in first.items():
        want, norms = _want(2, _accumulation(key[0]))
        assert largest_difference(got, want) < 1e-11, key
        assert got_norms == pytest.approx(norms, rel=1e-10), key
        assert largest_difference(got, second[key][0]) == 0 and torch.equal(mean, second[key][2]), key


def test_recomputed_activations_too(ranks: Ranks) -> None:
    want, _ = _want(2)
    for done in ranks(2, _train, [("ddp", "inner"), ("zero1", "method")], recompute=True):
        assert all(largest_difference(got, want) < 1e-11 for got, _, _ in done.values())


class Own(ech.TrainUnit[Any]):
    """A step of the user's own, around its wrapper."""

    def __init__(self, *, reduces: bool = False, closure: bool = False, wrapper: bool = False, thaws: bool = False) -> None:
        super().__init__()
        self.net = net()
        self.net.first.requires_grad_(not thaws)
        self.ddp = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.reduces, self.closure, self.wrapper, self.thaws = reduces, closure, wrapper, thaws

    def _is_frozen(self) -> bool:
        return self.thaws and self.train_progress.num_steps_completed < 2

    def _compute(self, data: Batch) -> torch.Tensor:
        self.net.first.requires_grad_(not self._is_frozen())
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss((self.ddp if self.wrapper else self.net)(data[0]), data[1])
        loss.backward()
        others = self.net.first if self.wrapper else self.net
        for parameter in others.parameters() if self.reduces and not self._is_frozen() else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        return loss.detach()

    def train_step(self, state: ech.State, data: Batch) -> None:
        if self.closure:
            self.optimizer.step(lambda: self._compute(data))
        else:
            self._compute(data)
            self.optimizer.step()


def _own(options: dict[str, bool]) -> Any:
    unit = Own(**options)

    def train() -> dict[str, torch.Tensor]:
        ech.train(unit, [batch(4, 10 * i + dist.get_rank()) for i in range(4)], max_epochs=1)
        return whole(unit.net)

    return answer(train)


def test_a_unit_of_ones_own_is_told_on_all_ranks_that_nothing_was_reduced(ranks: Ranks) -> None:
    for options in ({}, {"closure": True}):
        first, second = ranks(2, _own, options)
        assert first == second and "ddp.first.weight differs between ranks" in first


@pytest.mark.full
def test_a_unit_of_ones_own_is_told_that_what_it_unfroze_is_not_reduced(ranks: Ranks) -> None:
    thaws = {"wrapper": True, "thaws": True}
    for options in (thaws, thaws | {"closure": True}):
        first, second = ranks(2, _own, options)
        assert first == second and "ddp.first.weight differs between ranks" in first
    got, other = ranks(2, _own, thaws | {"reduces": True})
    assert isinstance(got, dict) and largest_difference(got, other) == 0


@pytest.mark.full
def test_who_reduces_by_hand_may(ranks: Ranks) -> None:
    want, _, _ = plain_training([[batch(4, 10 * i), batch(4, 10 * i + 1)] for i in range(4)])
    for options in ({"reduces": True}, {"wrapper": True}, {"wrapper": True, "closure": True}, {"reduces": True, "closure": True}):
        for got in ranks(2, _own, options):
            assert largest_difference(got, want) < 1e-12, options


class Odd(Own):
    """One rank alone does what the others do not do, at its second step."""

    def __init__(self, what: str, *, may_stop: bool) -> None:
        super().__init__(wrapper=True, thaws=what == "thaws", closure=what == "closure")
        self.what, self.may_stop = what, may_stop

    def _is_frozen(self) -> bool:
        return dist.get_rank() == 0 or super()._is_frozen()

    def _compute(self, data: Batch) -> torch.Tensor:
        if self.what == "thaws":
            self.net.first.requires_grad_(self._is_now())
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.ddp(data[0]), data[1])
        loss.backward(retain_graph=True)
        if self.what != "thaws" and self._is_now():
            loss.backward()
        return loss.detach()

    def _is_now(self) -> bool:
        return dist.get_rank() == 1 and self.train_progress.num_steps_completed >= (3 if self.what == "last" else 1)


def _odd(what: str, may_stop: bool) -> str:
    unit = Odd(what, may_stop=may_stop)
    return refusal(ech.train, unit, [batch(4, 10 * i + dist.get_rank()) for i in range(4)], max_epochs=1)


@pytest.mark.full
@pytest.mark.parametrize("may_stop", [True, False])
def test_what_one_rank_alone_does_is_told_on_all(ranks: Ranks, may_stop: bool) -> None:
    first, second = ranks(2, under_each, ["backward", "closure", "last", "thaws"], _odd, may_stop)
    assert first == second
    for what, said in first.items():
        assert "differs between ranks" in said, what


def _lbfgs(module: nn.Module, search: str | None) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=5, line_search_fn=search)


def _searched(layout: str, search: str | None) -> dict[str, torch.Tensor]:
    """LBFGS, whose line search computes as often as the loss asks for."""
    module = ech.layouts.prepare_module(net(), torch.device("cpu"), layout=layout)
    unit = Steps(module, _lbfgs(module, search), closure=True)
    ech.train(unit, [batch(4, 10 * i + dist.get_rank()) for i in range(3)], max_epochs=1)
    return whole(module)


@pytest.mark.full
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_a_line_search_decides_by_the_loss_of_all_ranks(ranks: Ranks, search: str | None) -> None:
    module = net()
    optimizer = _lbfgs(module, search)
    for i in range(3):
        x, y = (torch.cat(parts) for parts in zip(batch(4, 10 * i), batch(4, 10 * i + 1), strict=True))

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(module(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    for got in ranks(2, _searched, "ddp", search):
        assert largest_difference(got, whole(module)) < 1e-8


def _whole_weight(parameter: Any) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _read_outside(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A penalty on weights, and a term in which rows meet a block's weight, whose shards only the block's own forward gathers."""
    out, weights = model(x), {n.removeprefix("module."): _whole_weight(p) for n, p in model.named_parameters()}
    penalty = 0.01 * torch.stack([weight.abs().sum() for weight in weights.values()]).sum()
    return nn.functional.mse_loss(out + x @ weights["blocks.0.0.weight"][:4, :1], y) + penalty


def _trained_outside(layout: str, accumulate: int) -> dict[str, torch.Tensor]:
    loader = DataLoader(TensorDataset(*batch(7, 0)), 4 // accumulate)  # the last update is of two rows and one
    return whole(own_loop(net(), loader, _read_outside, epochs=2, layout=layout, accumulate=accumulate))


@pytest.mark.parametrize(
    ("size", "layout", "accumulate"),
    [
        (2, "fsdp", 1),
        pytest.param(2, "fsdp", 2, marks=pytest.mark.full),
        pytest.param(2, "zero2", 1, marks=pytest.mark.full),
        pytest.param(4, "dp_shard=2,tp=2", 1, marks=pytest.mark.full),
    ],
)
def test_a_weight_that_the_loss_reads_has_the_gradient_of_all_ranks_samples(
    ranks: Ranks, size: int, layout: str, accumulate: int
) -> None:
    """Each shard got that of its own rank's, in silence, at the scale of its part of the batch."""
    (x, y), sgd = batch(7, 0), lambda parameters: torch.optim.SGD(parameters, 0.1)
    windows = [[(x[:4], y[:4])], [(x[4:], y[4:])]] * 2
    want, _, _ = plain_training(windows, optimizer=sgd, loss_of=_read_outside)
    for got in ranks(size, _trained_outside, layout, accumulate):
        assert largest_difference(got, want) < 1e-12
