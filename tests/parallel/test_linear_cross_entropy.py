"""The chunked loss of a vocabulary: torch's numbers in value and gradient, in little memory, however the weight is split."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import echelon as ech
from echelon.common.errors import TensorParallelError, UsageError
from echelon.parallel.tensor.linear_cross_entropy import WordShard, liger, unit_of
from tests.conftest import Ranks
from tests.kit.models import largest_difference, plain_training, seeded, whole
from tests.kit.refusals import refused
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

WORDS, WIDTH = 11, 6


def operands(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 5, WIDTH), (WORDS, WIDTH), (WORDS,))
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    target = torch.randint(0, WORDS, (2, 5), generator=generator)
    target[0, 1] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), target


def plain(hidden: Any, weight: Any, target: Any, *, bias: Any = None, **options: Any) -> torch.Tensor:
    options.pop("chunk_tokens", None)
    shape = target.shape if options.get("reduction") == "none" else ()
    return F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, -2), target.flatten(), **options).view(shape)


def loss_and_gradients(fn: Any, dtype: torch.dtype = torch.float64, **options: Any) -> list[torch.Tensor]:
    hidden, weight, bias, target = operands(dtype)
    if options.pop("biased", True):
        options["bias"] = bias
    loss = fn(hidden, weight, target, **options)
    (loss * torch.arange(1.0, 1 + loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
    return [loss.detach(), *(t.grad for t in (hidden, weight, bias) if t.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_torchs_loss_in_value_and_gradient(dtype: torch.dtype) -> None:
    """For each reduction, with and without bias and smoothing, of one chunk, of uneven ones, of one row each."""
    kinds = itertools.product(("mean", "sum", "none"), (0.0, 0.1), (True, False), (None, 1, 3))
    for reduction, smoothing, biased, chunk in kinds:
        options = {"reduction": reduction, "label_smoothing": smoothing, "biased": biased}
        ours = loss_and_gradients(ech.nn.linear_cross_entropy, dtype, chunk_tokens=chunk, **options)
        for a, b in zip(ours, loss_and_gradients(plain, dtype, **options), strict=True):
            torch.testing.assert_close(a, b)


def test_float32_is_exact_to_its_rounding() -> None:
    """Against float64, at a size whose sums round: no worse than four times torch's own error."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(300, 64, generator=generator), torch.randn(2000, 64, generator=generator)
    target = torch.randint(0, 2000, (300,), generator=generator)

    def of(fn: Any, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        loss = fn(h, w, target, **options)
        return [loss.detach(), *torch.autograd.grad(loss, (h, w))]

    exact, usual = of(plain, torch.float64), of(plain, torch.float32)
    for a, b, c in zip(of(ech.nn.linear_cross_entropy, torch.float32, chunk_tokens=37), usual, exact, strict=True):
        assert (a - c).norm() <= 4 * (b - c).norm() + 1e-7 * c.norm()


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation has made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_has_the_logits_of_more_than_a_chunk(reduction: Any) -> None:
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    with _Largest() as seen:
        ech.nn.linear_cross_entropy(hidden, weight, torch.zeros(64).long(), reduction=reduction, chunk_tokens=8).sum().backward()
    assert seen.elements == 8 * 100


def test_only_what_is_asked_for_has_a_gradient() -> None:
    for chosen in range(3):
        hidden, weight, bias, target = operands()
        ours = [t.detach().requires_grad_(i == chosen) for i, t in enumerate((hidden, weight, bias))]
        ech.nn.linear_cross_entropy(ours[0], ours[1], target, bias=ours[2], chunk_tokens=4).backward()
        plain(hidden, weight, target, bias=bias).backward()
        assert [t.grad is not None for t in ours] == [i == chosen for i in range(3)]
        torch.testing.assert_close(ours[chosen].grad, (hidden, weight, bias)[chosen].grad)
    with torch.no_grad():
        assert not ech.nn.linear_cross_entropy(*operands()[:2], operands()[3]).requires_grad


def test_used_twice_backwards_twice_tied_and_recomputed() -> None:
    """Gradients of both calls add up; a second backward pass of one graph gives them again; the embedding shares the weight."""

    def twice(fn: Any, again: bool) -> torch.Tensor:
        _, weight, _, target = operands()
        words = target.clamp(min=0)

        def body(words: torch.Tensor) -> torch.Tensor:
            hidden = F.embedding(words, weight)
            return fn(hidden, weight, target) + 2 * fn(hidden.sin(), weight, target.flip(0))

        loss = checkpoint(body, words, use_reentrant=False) if again else body(words)
        loss.backward(retain_graph=not again)
        if not again:
            loss.backward()
        assert weight.grad is not None
        return weight.grad

    for again in (False, True):
        torch.testing.assert_close(twice(ech.nn.linear_cross_entropy, again), twice(plain, again))
    hidden, weight, _, target = operands()
    with refused(UsageError):
        torch.autograd.grad(ech.nn.linear_cross_entropy(hidden, weight, target), weight, create_graph=True)


def test_nothing_counts_and_nothing_is_there() -> None:
    hidden, weight, _, target = operands()
    loss = ech.nn.linear_cross_entropy(hidden, weight, torch.full_like(target, 5), ignore_index=5)
    loss.backward()
    assert loss.isnan() and hidden.grad is not None and weight.grad is not None
    assert not hidden.grad.any() and not weight.grad.any()
    for reduction, want in (("mean", float("nan")), ("sum", 0.0)):
        none = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
        loss = ech.nn.linear_cross_entropy(none, weight, target.new_zeros(0), reduction=reduction)
        loss.backward()
        torch.testing.assert_close(loss, torch.tensor(want, dtype=torch.float64), equal_nan=True)
        assert none.grad is not None and none.grad.shape == none.shape
    one = ech.nn.linear_cross_entropy(hidden[0, 0], weight, target[0, 0])  # no batch dimension
    torch.testing.assert_close(one, F.cross_entropy(F.linear(hidden[0, 0], weight), target[0, 0]))


def test_types_under_autocast_and_without() -> None:
    """bf16 multiplies; the loss and the sums are float32; gradients have their tensors' types."""
    exact = loss_and_gradients(plain, torch.float32)
    for smoothing in (0.0, 0.1):
        with torch.autocast("cpu", torch.bfloat16):
            usual = loss_and_gradients(plain, torch.float32, label_smoothing=smoothing)
            ours = loss_and_gradients(ech.nn.linear_cross_entropy, torch.float32, label_smoothing=smoothing, chunk_tokens=4)
        for a, b in zip(ours, usual, strict=True):
            assert a.dtype is torch.float32
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    for dtype in (torch.bfloat16, torch.float16):
        ours = loss_and_gradients(ech.nn.linear_cross_entropy, dtype, chunk_tokens=4)
        assert [t.dtype for t in ours] == [torch.float32, dtype, dtype, dtype]
        for a, b in zip(ours, exact, strict=True):
            torch.testing.assert_close(a.float(), b, rtol=3e-2, atol=3e-2)


def test_fp16_gradients_are_scaled_before_they_are_rounded() -> None:
    """As a gradient scaler counts on: of 40,000 rows each has a gradient that float16 would round to zero."""
    hidden = torch.full((40_000, 2), 0.25, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float16, requires_grad=True)
    target = torch.zeros(40_000).long()
    (ech.nn.linear_cross_entropy(hidden, weight, target) * 2.0**16).backward()
    assert hidden.grad is not None
    want = torch.tensor([-0.5, 0.5]) * 2.0**16 / 40_000
    torch.testing.assert_close(hidden.grad[0].float(), want, rtol=1e-3, atol=0)


@pytest.mark.full
def test_it_is_compiled_without_a_break() -> None:
    fn = torch.compile(ech.nn.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for a, b in zip(loss_and_gradients(fn, chunk_tokens=5), loss_and_gradients(plain), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.full((2, 5), 11)}, r"target must be from 0 to 10, or -100 to ignore a token, got 11\. Is the"),
        ({"target": torch.zeros(2, 5)}, "target must be of type int64"),
        ({"target": torch.zeros(2, 4).long()}, r"target must be of shape \(2, 5\), got \(2, 4\)"),
        ({"hidden": torch.zeros(2, 5, 7)}, r"hidden must be of shape \(\.\.\., 6\), as the weight is \(11, 6\), got \(2, 5, 7\)"),
        ({"weight": torch.zeros(66)}, r"weight must be of shape \(words, features\), got \(66,\)"),
        ({"weight": torch.zeros(11, 6).long()}, "weight must be of floating point"),
        ({"bias": torch.zeros(5)}, r"bias must be of shape \(11,\), got \(5,\)"),
        ({"reduction": "avg"}, "reduction must be 'mean', 'sum' or 'none', got 'avg'"),
        ({"label_smoothing": 2}, "label_smoothing must be from 0 to 1, got 2"),
        ({"chunk_tokens": 0}, "chunk_tokens must be a whole number of at least 1"),
        ({"kernel": "triton"}, "kernel must be 'torch' or 'liger', got 'triton'"),
        ({"kernel": "liger"}, "kernel must be 'torch' for a cpu, got 'liger'"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    hidden, weight, _, target = operands()
    given = {"hidden": hidden, "weight": weight, "target": target, **change}
    with pytest.raises(UsageError, match=message):
        ech.nn.linear_cross_entropy(given.pop("hidden"), given.pop("weight"), given.pop("target"), **given)


def test_ligers_kernel_is_called_by_its_names_or_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.empty(1, device="meta")
    monkeypatch.setattr(type(rows), "device", torch.device("cuda", 0), raising=False)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with refused(TensorParallelError):
        liger(rows, WordShard(3))
    with refused(TensorParallelError):
        liger(rows, WordShard(3, 0, None, 2))
    fake: Any = ModuleType("liger_kernel.transformers.functional")
    fake.liger_fused_linear_cross_entropy = plain
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    assert liger(rows, WordShard(3)) is plain


# --- on several ranks


class Language(nn.Module):
    """Embedding, a layer, and a head whose logits nobody computes. x: (B, T) words -> the loss, or the hidden states."""

    tp_plan: ClassVar[dict[str, str]] = {"bytes": "rowwise", "head": "colwise_gather"}

    def __init__(self, tied: bool = False, inside: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.bytes, self.body = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 12, bias=bias)
        if tied:
            self.head.weight = self.bytes.weight
        self.inside = inside

    def forward(self, words: torch.Tensor, loss: Any = ech.nn.linear_cross_entropy) -> torch.Tensor:
        hidden = self.body(self.bytes(words)).tanh() + self.bytes(words)
        return self.loss(hidden, words, loss) if self.inside else hidden

    def loss(self, hidden: torch.Tensor, words: torch.Tensor, fn: Any = ech.nn.linear_cross_entropy) -> torch.Tensor:
        return fn(hidden, self.head.weight, words.roll(1, 1), bias=self.head.bias, chunk_tokens=3)


def language(**options: Any) -> Language:
    return seeded(Language, **options)


class LanguageUnit(Regression):
    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        made = self.module(data)
        inner = self.prepared.unwrapped
        return (made if inner.inside else inner.loss(made, data)), None


def words_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 12, (2, 4), generator=torch.Generator().manual_seed(100 * step + rank))


def reference(shares: int, *frozen: str, steps: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    """One process, torch's own loss, on the batches of all shares: two micro-batches an update."""
    parts = [[words_of(step, rank) for rank in range(shares)] for step in range(steps)]
    windows = [[(x, x) for micro in parts[i : i + 2] for x in micro] for i in range(0, steps, 2)]
    module = language(**{**options, "inside": True})
    for part in frozen:
        module.get_submodule(part).requires_grad_(False)
    return plain_training(windows, module=module, loss_of=lambda module, x, _: module(x, loss=plain))[0]


SHAPES: dict[str, dict[str, Any]] = {
    "in the forward": {},
    "after it": {"inside": False},
    "tied": {"tied": True},
    "tied, after it": {"tied": True, "inside": False},
    "with a bias": {"bias": True},
}


def _trained(layout: Any, *frozen: str, steps: int = 4, **options: Any) -> tuple[LanguageUnit, float]:
    """How far it is from one process."""
    module = language(**options)
    for part in frozen:
        module.get_submodule(part).requires_grad_(False)
    unit = LanguageUnit(module=module, layout=layout, accumulate=2)
    prepared = unit.prepared
    ech.train(unit, [words_of(step, prepared.data.rank) for step in range(steps)], max_epochs=1)
    want = reference(prepared.data.size, *frozen, steps=steps, **options)
    return unit, largest_difference(whole(unit.module), want)


def _differences(layouts: dict[str, Any]) -> dict[str, float]:
    cases = itertools.product(layouts.items(), SHAPES.items())
    return {f"{name}, {shape}": _trained(layout, **options)[1] for (name, layout), (shape, options) in cases}


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (1, {"none": "none", "tp": "tp"}),
        (2, {"ddp": "ddp", "fsdp": "fsdp", "zero2": "zero2", "tp": "tp"}),
        (4, {"tp two, fsdp two": ech.Layout(tp=2), "tp": "tp"}),
    ],
)
def test_training_on_several_ranks_is_torchs(ranks: Ranks, size: int, layouts: dict[str, Any]) -> None:
    """Under each layout, in the module's forward and after it; tied, with a bias, accumulating."""
    for found in ranks(size, _differences, layouts):
        assert {case: far for case, far in found.items() if far > 1e-13} == {}


def _head_alone() -> dict[str, float]:
    """The head as a unit of fully_shard, whose forward nobody calls; the evaluation after it leaves nothing gathered."""
    found = {}
    for inside, keeps in itertools.product((True, False), (True, False)):
        layout = ech.FSDPStrategy(blocks=["head"], reshard_after_forward=not keeps)
        unit, found[f"{inside}, {keeps}"] = _trained(layout, inside=inside, bias=True)
        with torch.no_grad():
            made = unit.module(words_of(9, 0))
            made = made if inside else unit.prepared.unwrapped.loss(made, words_of(9, 0))
        assert made.dim() == 0
        assert inside or isinstance(unit.prepared.unwrapped.head.weight, DTensor)
    return found


@pytest.mark.full
def test_a_head_that_is_a_unit_of_its_own_is_gathered_and_reduced(ranks: Ranks) -> None:
    for found in ranks(2, _head_alone):
        assert max(found.values()) < 1e-13, found


def _operators_by_hand() -> list[str]:
    """DTensors as users make them: words over ranks unevenly and not at all, the bias likewise; hidden, too."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    wrong = []
    places = (Shard(0), Shard(1), Replicate())
    cases = itertools.product(places, (False, True), (0.0, 0.1), ("mean", "none"), (None, Shard(0)))
    for place, split_bias, smoothing, reduction, hidden_place in cases:
        hidden, weight, bias, target = operands()
        of_weight = distribute_tensor(weight.detach(), mesh, [place]).requires_grad_()
        of_bias = distribute_tensor(bias.detach(), mesh, [Shard(0) if place == Shard(0) else Replicate()]).requires_grad_()
        if not split_bias:
            of_bias = bias.detach().clone().requires_grad_()
        of_hidden = hidden.detach().clone().requires_grad_()
        if hidden_place is not None:
            of_hidden = distribute_tensor(hidden.detach(), mesh, [hidden_place]).requires_grad_()
        options = {"label_smoothing": smoothing, "reduction": reduction}
        got = ech.nn.linear_cross_entropy(of_hidden, of_weight, target, bias=of_bias, chunk_tokens=3, **options)
        want = plain(hidden, weight, target, bias=bias, **options)
        for loss in (got, want):
            (loss * torch.arange(1.0, 1 + loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
        for name, a, b in (
            ("loss", got, want),
            *((n, x.grad, y.grad) for n, x, y in (("h", of_hidden, hidden), ("w", of_weight, weight), ("b", of_bias, bias))),
        ):
            full = a.full_tensor() if isinstance(a, DTensor) else a
            if not torch.allclose(full, b, rtol=1e-12, atol=1e-13):
                wrong.append(f"{name}: {place}, {split_bias}, {options}, {hidden_place}")
    return wrong


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_words_split_by_hand_give_torchs_numbers(ranks: Ranks, size: int) -> None:
    """11 words over 4 ranks: 3, 3, 3 and 2."""
    assert ranks(size, _operators_by_hand)[-1] == []


def _few_words() -> float:
    """Three words over four ranks: the last has none."""
    mesh = init_device_mesh("cpu", (4,))
    hidden = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = torch.randn(3, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    target = torch.tensor([0, 1, 2, -100, 1])
    split = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    ech.nn.linear_cross_entropy(hidden, split, target, label_smoothing=0.1).backward()
    usual = weight.clone().requires_grad_()
    plain(hidden, usual, target, label_smoothing=0.1).backward()
    assert usual.grad is not None and isinstance(split.grad, DTensor)
    return float((split.grad.full_tensor() - usual.grad).abs().max())


def _sharded_by_hand() -> tuple[bool, bool, torch.dtype]:
    """Without echelon around it: which module a parameter belongs to, in bf16 by torch's policy."""
    module = language(inside=False).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(module.head, mp_policy=policy)
    fully_shard(module, mp_policy=policy)
    found = unit_of(module.head.weight) is module.head and unit_of(module.body.weight) is module
    loss = module.loss(module(words_of(0, 0)), words_of(0, 0))
    loss.backward()
    return found, isinstance(module.head.weight.grad, DTensor), loss.dtype


def test_the_module_of_a_shard_is_found(ranks: Ranks) -> None:
    """Notices when torch's table of sharded modules changes: `unit_of` reads it."""
    for found, reduced, dtype in ranks(2, _sharded_by_hand):
        assert found and reduced and dtype is torch.float32
    assert unit_of(torch.zeros(1)) is None
    assert max(ranks(4, _few_words)) < 1e-13


def _frozen_body() -> float:
    """Only the head is trained, a unit of its own: hidden has no gradient that would reach a hook of fully_shard."""
    shards = ech.FSDPStrategy(blocks=["head"])
    layouts = (shards, shards.but(sharding_strategy="HYBRID_SHARD"), ech.Layout(tp=2, fsdp=shards))
    cases = itertools.product((True, False), layouts)
    return max(_trained(layout, "bytes", "body", steps=1, inside=inside, bias=True)[1] for inside, layout in cases)


@pytest.mark.full
def test_a_head_alone_is_trained_over_a_frozen_body(ranks: Ranks) -> None:
    assert max(ranks(4, _frozen_body)) < 1e-13
