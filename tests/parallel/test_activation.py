"""Recompute: the same numbers, names and random masks under every layout, in less memory."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import echelon as ech
from echelon.common.errors import CompileError, UsageError
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, seeded, whole
from tests.kit.refusals import refused
from tests.kit.units import KINDS, Regression

pytestmark = pytest.mark.standing_ranks

Params = ech.layouts.ActivationCheckpointParams


class Block(nn.Module):
    """Running statistics of both kinds, dropout, a keyword tensor, and an argument that is no tensor."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Dropout(0.4), nn.Tanh())
        self.norm = nn.InstanceNorm1d(6, track_running_stats=True)

    def forward(self, x: torch.Tensor, power: int = 1, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(self.inner(x)[:, :, None].expand(-1, -1, 3) * torch.arange(3.0, dtype=x.dtype)).mean(2) + x
        return x**power if shift is None else x**power + shift


class Normed(nn.Module):
    tp_plan: ClassVar = {"first": "colwise_gather"}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block(m) for m in (0.1, None))
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.blocks[0](x, 2, shift=x.sin())
        x = self.blocks[1](self.blocks[1](x), shift=None)  # twice in a step
        return self.last(x)


def _steps(module: nn.Module, updates: int = 3) -> dict[str, torch.Tensor]:
    """A few steps of plain PyTorch; gradients of the last, parameters and buffers."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for i in range(updates):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(batch(5, i)[0]), batch(5, i)[1]).backward()
        optimizer.step()
    gradients = {f"{n}.grad": p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {**gradients, **{n: v.detach().clone() for n, v in module.state_dict().items()}}


def _apply(module: nn.Module, params: Params) -> nn.Module:
    from echelon.parallel.recipe.activation import checkpoint_activations

    return checkpoint_activations(module, params)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "blocks": lambda m: _apply(m, Params()),
    "every other block": lambda m: _apply(m, Params(every=2)),
    "whole": lambda m: _apply(m, Params(check_fn=lambda b: isinstance(b, Normed))),
    "nested": lambda m: _apply(m, Params(check_fn=lambda b: isinstance(b, (Normed, Block, nn.Sequential, nn.BatchNorm1d)))),
    "policy": lambda m: _apply(m, Params(auto_wrap_policy={Block})),
    "by operator": lambda m: _apply(m, Params(save_ops=[torch.ops.aten.addmm.default])),
    "offloaded": lambda m: _apply(m, Params(offload_to_cpu=True)),
    "by hand": lambda m: m.requires_grad_() if [ech.nn.checkpoint_wrapper(b) for b in m.blocks] else None,
    "by hand and by params": lambda m: _apply(ech.nn.checkpoint_wrapper(m.blocks[0]) and m, Params()),
    "copied": lambda m: copy.deepcopy(_apply(m, Params())),
    "pickled": lambda m: pickle.loads(pickle.dumps(_apply(m, Params()))),
}


def _calls(module: nn.Module, name: str) -> list[int]:
    calls: list[int] = []
    module.get_submodule(name).register_forward_hook(lambda *a: calls.append(1))
    return calls


@pytest.mark.parametrize("way", WAYS)
def test_recompute_changes_no_number_and_no_name(way: str) -> None:
    """Gradients, parameters, running statistics and their counts, bit for bit; and it does recompute."""
    want = _steps(seeded(Normed))
    module = WAYS[way](seeded(Normed))
    once, twice = _calls(module, "blocks.0.inner.0"), _calls(module, "blocks.1.inner.0")
    got = _steps(module)
    want_calls = {"nested": (12, 24), "every other block": (6, 6)}.get(way, (6, 12))
    assert (len(once), len(twice)) == want_calls
    assert largest_difference(got, want) == 0
    assert got["blocks.0.inner.1.num_batches_tracked"] == 3 and got["blocks.1.inner.1.num_batches_tracked"] == 6
    assert type(module) is Normed and type(module.blocks[0]) is Block


def test_nothing_is_recomputed_without_gradients() -> None:
    module = _apply(seeded(Normed), Params())
    calls = _calls(module, "blocks.0.inner.0")
    with torch.no_grad():
        module(batch(5, 0)[0])
    assert len(calls) == 1
    want, plain = module.eval()(batch(5, 0)[0]), seeded(Normed).eval()
    plain.load_state_dict(module.state_dict())
    assert torch.equal(want, plain(batch(5, 0)[0]))
    want.sum().backward()  # in eval mode, with gradients
    plain(batch(5, 0)[0]).sum().backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert largest_difference(dict(module.named_buffers()), dict(plain.named_buffers())) == 0


def test_a_second_backward_pass_through_the_same_graph() -> None:
    def twice(module: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        loss = module(batch(5, 0)[0]).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return {**{n: p.grad for n, p in module.named_parameters()}, **dict(module.named_buffers())}

    assert largest_difference(twice(_apply(seeded(Normed), Params())), twice(seeded(Normed))) == 0


class _Changes(nn.Module):
    """Its result depends on what earlier passes left: a spectral norm's vectors, a counter, a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.passes, self.mean = 0, nn.Buffer(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.norm((self.normed(x) - self.mean).sin() * self.passes)


@pytest.mark.parametrize("nested", [False, True])
def test_a_recomputation_begins_as_the_pass_did_and_changes_nothing(nested: bool) -> None:
    def trained(recomputes: bool) -> dict[str, torch.Tensor]:
        module = seeded(lambda: nn.Sequential(_Changes(), _Changes())).double()
        if recomputes:
            for part in (module, *module) if nested else module:
                ech.nn.checkpoint_wrapper(part)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for number in range(6):
            module.train(number not in (0, 3))  # what changes in training, too, is not what a first pass in eval mode changed
            for _ in range(2):  # two forward passes before the backward passes
                loss = sum(module(batch(5, each)[0]).square().mean() for each in (number, number + 1))
                loss.backward()
            optimizer.step()
        assert [part.passes for part in module] == [24, 24]
        return dict(module.state_dict())

    assert largest_difference(trained(True), trained(False)) < 1e-14


def test_an_error_in_the_recomputation_leaves_the_statistics_in_place() -> None:
    module = _apply(seeded(Normed), Params())
    norm = module.blocks[1].inner[1]
    loss = module(batch(5, 0)[0]).square().mean()
    before = {n: b.clone() for n, b in norm.named_buffers()}
    fails = module.blocks[1].norm.register_forward_pre_hook(lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    fails.remove()
    assert largest_difference(dict(norm.named_buffers()), before) == 0
    module(batch(5, 1)[0]).square().mean().backward()
    assert int(norm.num_batches_tracked) == 4


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def test_chosen_operators_are_kept_and_others_recomputed() -> None:
    counts = {}
    for name in ("none", "blocks", "by operator"):
        module = WAYS[name](seeded(Normed)) if name in WAYS else seeded(Normed)
        with _Count() as mode:
            module(batch(5, 0)[0]).square().mean().backward()
        counts[name] = tuple(mode.counts[getattr(torch.ops.aten, op).default] for op in ("addmm", "sin", "native_batch_norm"))
    assert counts == {"none": (5, 1, 6), "blocks": (8, 1, 12), "by operator": (5, 1, 12)}


def test_kept_operators_with_a_weight_that_blocks_share_under_autocast() -> None:
    """The copy of the weight in bfloat16 was made in one block, and missing when the other one was recomputed."""
    gradients: list[dict[str, Any]] = []
    for recompute in (None, "selective"):
        module = net(dtype=torch.float32)
        module.blocks[1][0].weight = module.blocks[0][0].weight
        made = ech.layouts.prepare_module(module, torch.device("cpu"), recompute=recompute)
        with torch.autocast("cpu", torch.bfloat16):
            loss = made(batch(5, 0, torch.float32)[0]).square().mean()
        loss.backward()
        assert torch.is_autocast_cache_enabled()
        gradients.append({name: p.grad for name, p in module.named_parameters()})
    assert largest_difference(*gradients) < 1e-2  # the copy's gradients are summed in bfloat16


@pytest.mark.full
def test_recompute_and_compile() -> None:
    """Names stay; dropout and statistics are as without. aot_eager is the compiler's front half, without inductor's code."""
    want = _steps(seeded(Normed), updates=2)
    module = _apply(seeded(Normed), Params())
    module.compile(backend="aot_eager")
    assert largest_difference(_steps(module, updates=2), want) < 1e-14


def test_the_compiler_backend_that_draws_other_masks_is_refused() -> None:
    with refused(CompileError):
        Regression(compile=ech.layouts.TorchCompileParams(backend="eager"), recompute=Params())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "at least 1"),
        ({"check_fn": lambda m: True, "auto_wrap_policy": {Block}}, "Give one"),
        ({"context_fn": lambda: (None, None), "save_ops": [torch.ops.aten.mm.default]}, "Give one"),
        ({"check_fn": lambda m: False}, "chose no submodule of Normed"),
        ({"auto_wrap_policy": {nn.ModuleList}}, "has no forward of its own"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _apply(seeded(Normed), Params(**options))


# --- under the layouts


def _trained(layout: str) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters and this rank's statistics, with each way of recomputing."""
    found = {}
    choices = {"blocks": Params(), "whole": Params(check_fn=lambda m: isinstance(m, Normed))}
    for name, params in {"plain": None, **choices, "nested": Params(check_fn=lambda m: isinstance(m, (Normed, Block)))}.items():
        module = seeded(Normed)
        ech.seed(5)
        unit = Regression(module=module, layout=layout, recompute=params, accumulate=2)
        ech.train(unit, [batch(5, 10 * unit.prepared.data.rank + i) for i in range(4)], max_epochs=1)
        buffers = {n: b.detach().clone() for n, b in unit.prepared.unwrapped.named_buffers()}
        found[name] = {**whole(unit.module), **buffers}
    return found


@pytest.mark.full
@pytest.mark.parametrize("layout", [*KINDS, "zero2"])
def test_recompute_under_every_strategy(ranks: Ranks, layout: str) -> None:
    for found in ranks(2, _trained, layout):
        plain = found.pop("plain")
        assert int(plain["blocks.1.inner.1.num_batches_tracked"]) == 8
        for name, got in found.items():
            assert largest_difference(got, plain) < 1e-13, name


# --- RNGs


class Masks(nn.Module):
    """A dropout that writes its masks down."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        self.drawn.append(mask.detach().clone())
        return x * mask


def _with_masks() -> nn.Module:
    ech.seed(11)
    module = net()
    for block in module.blocks:
        block[3] = Masks()
    return module


def _masks(layout: str) -> list[tuple[int, list[torch.Tensor]]]:
    """Data-parallel rank and masks, without and with recompute."""
    found = []
    for params in (None, Params()):
        module = _with_masks()
        masks = [m for m in module.modules() if isinstance(m, Masks)]
        unit = Regression(module=module, layout=layout, recompute=params)
        ech.train(unit, [batch(16, i) for i in range(2)], max_epochs=1)
        if params is not None:
            assert all(len(m.drawn) == 4 for m in masks)  # forward, again, forward, again
            assert all(torch.equal(m.drawn[i], m.drawn[i + 1]) for m in masks for i in (0, 2))
        found.append((unit.prepared.data.rank, [d for m in masks for d in m.drawn[:: 1 if params is None else 2]]))
    return found


@pytest.mark.full
@pytest.mark.parametrize("layout", KINDS)
def test_dropout_differs_between_data_parallel_ranks(ranks: Ranks, layout: str) -> None:
    """And rank 0 draws what plain PyTorch would; what is recomputed is masked as it was."""
    plain = _with_masks()
    for i in range(2):
        plain(batch(16, i)[0])
    want = [d for m in plain.modules() if isinstance(m, Masks) for d in m.drawn]
    for (rank_0, first), (rank_1, second) in zip(*ranks(2, _masks, layout), strict=True):
        assert (rank_0, rank_1) == ((0, 0) if layout == "tp" else (0, 1))
        assert all(torch.equal(a, b) for a, b in zip(first, want, strict=True))
        # Ranks that share layers work on the same samples, and mask them alike.
        assert all(torch.equal(a, b) == (rank_0 == rank_1) for a, b in zip(first, second, strict=True))
