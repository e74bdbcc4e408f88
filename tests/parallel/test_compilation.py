"""Compilation block by block: the same numbers under every layout, and how many graphs are made when."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.common.errors import CompileError, RecomputeError, UsageError
from echelon.contracts.overrides import Overrides, impose
from echelon.parallel.recipe.compilation import Compiled
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, plain_training, seeded, whole
from tests.kit.refusals import refused
from tests.kit.units import Regression

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
        *((how, "none", "inductor", {"fallback_random": True}, 0.6) for how in ("rrelu", "own")),
        *(("dropout", layout, "inductor", None, 0.6) for layout in ("ddp", "fsdp")),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "block"}, r"compile must be 'blocks', True, False or TorchCompileParams\(\.\.\.\), got 'block'"),
        ({"compile": True, "torch_compile_params": ech.layouts.TorchCompileParams()}, "which are the same"),
        ({"recompute": "full"}, r"must be 'none', 'blocks', 'selective' or Activ.*memory_budget=0\.6.*got 'full'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Regression(**options)


def test_values_that_exclude_each_other_are_refused() -> None:
    with refused(RecomputeError, name="memory_budget", got="2"):
        ech.layouts.ActivationCheckpointParams(memory_budget=2)
    with refused(RecomputeError):
        ech.layouts.ActivationCheckpointParams(memory_budget=0.5, every=2)
    with refused(CompileError):
        ech.layouts.TorchCompileParams(blocks=True, recursive_module_types=["Linear"])
