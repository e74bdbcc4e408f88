"""Compilation block by block, and recomputation: the same numbers under every layout, what is made when and what is kept."""

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
from echelon.contracts.overrides import Overrides, impose
from echelon.parallel.recipe.compilation import Compiled
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, plain_training, seeded, whole
from tests.kit.refusals import refused
from tests.kit.units import KINDS, Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")


class Counting:
    """A backend that counts its graphs; `aot_eager` makes them, so that backward passes and recomputation are traced, too."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class Numbered(nn.Module):
    """A block whose forward uses its number, as those of transformers do."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.inner = layer_idx, nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * (0.1 * self.layer_idx)


class Deep(nn.Module):
    def __init__(self, numbered: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(Numbered(i if numbered else 1) for i in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _graphs(numbered: bool, evaluates: bool) -> tuple[list[int], float]:
    """The number of graphs after each step of two epochs whose last batch is short, an evaluation after each; and the error."""
    backend, seen = Counting(), []

    class Unit(Regression):
        def on_train_step_end(self, *args: Any) -> None:
            seen.append(backend.graphs)

    data = [batch(rows, i) for i, rows in enumerate((4, 4, 4, 3))]
    unit = Unit(module=seeded(Deep, numbered=numbered), compile=ech.layouts.TorchCompileParams(blocks=True, backend=backend))
    if evaluates:
        ech.fit(unit, data, data, max_epochs=2)
    else:
        ech.train(unit, data, max_epochs=2)
    want, _, _ = plain_training([[b] for b in data] * 2, module=seeded(Deep, numbered=numbered))
    return seen, largest_difference(whole(unit.module), want)


@pytest.mark.full
def test_no_graph_is_made_after_the_second_shape() -> None:
    """Nine equal blocks share one graph; a short batch makes one for any number of rows; evaluation has its own two."""
    seen, far = _graphs(numbered=False, evaluates=True)
    assert far < 1e-12
    assert seen[:4] == [1, 1, 1, 2] and seen[4:] == [seen[4]] * 4 and seen[4] <= 4


@pytest.mark.full
def test_blocks_that_use_their_number_are_all_compiled() -> None:
    """torch gives up after eight graphs of one function and goes on without a word to the user."""
    seen, far = _graphs(numbered=True, evaluates=False)
    assert far < 1e-12
    assert seen == [9, 9, 9, 18, 18, 18, 18, 18]


def _under(layouts: list[tuple[str, str, Any]]) -> dict[str, float]:
    """Layouts with presets, fullgraph: hooks of fully_shard would break a graph that they were in."""
    found = {}
    for name, layout, preset in layouts:
        torch._dynamo.reset()
        recomputed: Any = ech.layouts.ActivationCheckpointParams(memory_budget=preset) if isinstance(preset, float) else preset
        backend = "eager" if preset == "none" else "aot_eager"
        compiled = ech.layouts.TorchCompileParams(blocks=True, backend=backend, fullgraph=True)
        unit = Regression(layout=layout, compile=compiled, recompute=recomputed)
        assert all(isinstance(block.forward, Compiled) for block in unit.prepared.unwrapped.blocks)
        rank, size = unit.prepared.data.rank, unit.prepared.data.size
        ech.train(unit, [batch(4, 10 * step + rank) for step in range(2)], max_epochs=1)
        want, _, _ = plain_training([[batch(4, 10 * step + r) for r in range(size)] for step in range(2)])
        found[f"{name}, {preset}"] = largest_difference(whole(unit.module), want)
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "cases",
    [
        [("ddp", "ddp", "none"), ("fsdp", "fsdp", "selective")],
        [*(("fsdp", "fsdp", preset) for preset in ("none", "blocks", 0.5)), ("tp", "tp", 0.5)],
    ],
)
def test_presets_and_strategies_change_no_number(ranks: Ranks, cases: list[tuple[str, str, Any]]) -> None:
    for found in ranks(2, _under, cases):
        assert {case: far for case, far in found.items() if not far < 1e-12} == {}


class _Attends(nn.Module):
    """The samples of a batch attend to each other; then dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 8) -> (B, 8)
        heads = self.query(x).unflatten(1, (-1, 2)).transpose(0, 1)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return self.dropout(self.out(seen.transpose(0, 1).flatten(1)))


class _Attention(nn.Module):
    tp_plan: ClassVar = {"blocks.*.query": "colwise", "blocks.*.out": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(_Attends() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 4) -> (B, 1)
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def _random_under_tp() -> dict[str, float]:
    """How far recomputed compiled blocks are from those that keep all and are not compiled, by preset."""

    def trained(**options: Any) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        unit = Regression(module=seeded(_Attention), layout="tp=2", **options)
        torch.manual_seed(1)
        ech.train(unit, [batch(4, step) for step in range(2)], max_epochs=1)
        return whole(unit.module)

    want, compiled = trained(), ech.layouts.TorchCompileParams(blocks=True, backend="aot_eager", fullgraph=True)
    return {preset: largest_difference(trained(compile=compiled, recompute=preset), want) for preset in ("blocks", "selective")}


def test_recomputed_blocks_with_split_layers_attend_and_drop_as_written_when_compiled(ranks: Ranks) -> None:
    """Their graphs have meshes, and torch cannot give such a graph the RNG states with which it would draw again."""
    for found in ranks(2, _random_under_tp):
        assert {preset: far for preset, far in found.items() if not far < 1e-12} == {}


def _compiled_by_hand(how: str) -> tuple[float, int, list[str]]:
    """How far a wrapped module that was compiled as a whole is from plain PyTorch; the graphs; the names in its state."""
    torch._dynamo.reset()
    backend, module = Counting(), net()
    wrapped: Any = nn.parallel.DistributedDataParallel(module) if how == "ddp" else torch.distributed.fsdp.fully_shard(module)
    unit = Regression(module=torch.compile(wrapped, backend=backend), accumulate=2, clip_grad_norm=0.5)
    rank = unit.prepared.data.rank
    ech.train(unit, [batch(4, 10 * step + rank) for step in range(3)], max_epochs=1)
    rows = [[batch(4, 10 * step + r) for r in range(2)] for step in range(3)]
    want, _, _ = plain_training([rows[0] + rows[1], rows[2]], clip=0.5)
    return largest_difference(whole(unit.prepared.module), want), backend.graphs, sorted(unit.prepared_modules())


@pytest.mark.full
@pytest.mark.parametrize("how", ["ddp", "fully_shard"])
def test_a_wrapper_that_is_compiled_is_called_compiled(ranks: Ranks, how: str) -> None:
    for far, graphs, names in ranks(2, _compiled_by_hand, how):
        assert far < 1e-12 and graphs and names == ["module"]


class Drawing(nn.Module):
    """A block that draws random numbers in the way that `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.inner(x)).sin() + 2
        if self.how == "dropout":
            return nn.functional.dropout(x, 0.5)
        if self.how == "rrelu":
            return nn.functional.rrelu(x - 4, training=True)
        if self.how == "attention":
            heads = x.view(2, 8, 2, 8).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
            return x + mixed.transpose(1, 2).reshape(16, 16)
        return x * (torch.rand(x.shape) < 0.5)


def _off_by(how: str, backend: str, budget: float, layout: str = "none", options: Any = None) -> float:
    """How far the gradient of a compiled model is from the difference of two forward passes with the same seed, relatively."""
    torch._dynamo.reset()
    module = seeded(lambda: nn.Sequential(*(Drawing(how) for _ in range(3))))
    compiled = ech.layouts.TorchCompileParams(blocks=True, backend=backend, options=options)
    recompute = ech.layouts.ActivationCheckpointParams(memory_budget=budget)
    module = ech.layouts.prepare_module(module, CPU, layout=layout, compile=compiled, recompute=recompute)
    at, way, step = torch.randn(16, 16).double(), torch.randn(16, 16).double(), 1e-5

    def loss(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return (module(x.requires_grad_()) ** 2).sum()

    x = at.clone()
    loss(x).backward()
    change = float((loss(at + step * way) - loss(at - step * way)).detach()) / (2 * step)
    assert x.grad is not None
    return abs(change - float((x.grad * way).sum())) / abs(change)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "layout", "backend", "options", "budget"),
    [
        *((how, "none", "aot_eager", None, 0.0) for how in ("dropout", "rrelu", "attention", "own")),
        *((how, "none", "inductor", None, 0.0) for how in ("dropout", "attention")),
        ("own", "none", "inductor", {"fallback_random": True}, 0.6),
        ("dropout", "fsdp", "inductor", None, 0.6),
    ],
)
def test_a_backward_pass_under_a_budget_sees_the_random_numbers_of_the_forward_pass(
    ranks: Ranks, how: str, layout: str, backend: str, options: Any, budget: float
) -> None:
    assert max(ranks(1 if layout == "none" else 2, _off_by, how, backend, budget, layout, options)) < 1e-6


def test_a_budget_of_the_process_counts_as_one_of_the_model() -> None:
    import torch._functorch.config as config

    with config.patch({"activation_memory_budget": 0.6}):
        torch._dynamo.reset()
        module: Any = nn.Sequential(*(Drawing("dropout") for _ in range(2)))
        ech.layouts.prepare_module(module, CPU, compile=ech.layouts.TorchCompileParams(blocks=True, backend="aot_eager"))
        x = torch.randn(16, 16, requires_grad=True)
        y = module[0](x)
        (slope,) = torch.autograd.grad(y.sum(), module[0].inner.bias)
    assert torch.equal(slope != 0, (y != 0).any(0))


@pytest.mark.full
def test_a_budget_saves_memory_beside_random_numbers_or_says_that_it_cannot(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    ((few, many),) = ranks(1, _kept, "inductor")
    assert few < many
    few, many = _kept("aot_eager")
    assert few == many
    assert "memory_budget has no effect under torch.compile's backend 'aot_eager'" in caplog.text


def _kept(backend: str) -> tuple[int, int]:
    """Elements that a compiled model with dropout keeps for its backward pass, under a budget of 0 and of 1."""
    import torch._functorch.config as config

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 16))

    model, before, found = nn.Sequential(block(), block()), config.activation_memory_budget, []
    for budget in (0.0, 1.0):
        module, kept = copy.deepcopy(model), list[int]()
        torch._dynamo.reset()
        compiled = ech.layouts.TorchCompileParams(blocks=True, backend=backend)
        recompute = ech.layouts.ActivationCheckpointParams(memory_budget=budget)
        ech.layouts.prepare_module(module, CPU, compile=compiled, recompute=recompute)
        keep: Any = lambda tensor, kept=kept: kept.append(tensor.numel()) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module(torch.randn(64, 16)).sum().backward()
        found.append(sum(kept))
    assert config.activation_memory_budget == before, "another unit of the process has its own"
    return found[0], found[1]


def test_compile_true_is_the_whole_and_blocks_without_blocks_too() -> None:
    for module, asked in ((net(), True), (nn.Linear(4, 1).double(), "blocks")):
        made = ech.layouts.prepare_module(module, CPU, compile=asked)
        assert made._compiled_call_impl is not None
    module = net()
    assert ech.layouts.prepare_module(module, CPU, compile=False) is module and module._compiled_call_impl is None
    made = ech.layouts.prepare_module(net(), CPU, compile="blocks")
    assert isinstance(made, Net) and all(isinstance(block.forward, Compiled) for block in made.blocks)


def test_what_is_compiled_can_be_copied_and_pickled() -> None:
    data = batch(4, 0)[0]
    module = ech.layouts.prepare_module(net(), CPU, compile=ech.layouts.TorchCompileParams(blocks=True, backend="eager"))
    want = module(data)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(data), want)


def test_prove_leaves_compile_and_its_budget_out(caplog: pytest.LogCaptureFixture) -> None:
    impose(Overrides(compile=False))
    try:
        unit = Regression(compile="blocks", recompute=ech.layouts.ActivationCheckpointParams(memory_budget=0.5))
        assert not any(isinstance(block.forward, Compiled) for block in unit.module.blocks)
    finally:
        impose(None)
    assert "memory_budget=0.5 has no effect" in caplog.text


# --- recompute: the same numbers, names and random masks under every layout, in less memory


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
