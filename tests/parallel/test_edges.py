"""Embedding and head as units of their own: which are, what the root is left, and models that read their weights elsewhere."""

from __future__ import annotations

import functools
import warnings
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.parallel.fsdp import units as edges
from echelon.parallel.fsdp.units import edges_of
from echelon.parallel.parallelize import prepare_module
from echelon.parallel.recipe.blocks import blocks_to_shard
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, seeded, whole
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")
WORDS, WIDTH = 40, 8


class Speaker(nn.Module):
    """A language model in little, with names of its own.

    Args:
        head: "own"; "tied", one parameter with two names; "read", by a function with the embedding's weight; "before", which also
            reads the head's weight before any layer runs; "outside", whose head is applied by the unit, in chunks; "fused", whose
            loss is computed in the forward pass with the head's weight, taken before the norm runs.
    """

    tp_plan: ClassVar[dict[str, str]] = {"lexicon": "rowwise", "speak": "colwise_gather"}

    def __init__(self, head: str = "own") -> None:
        super().__init__()
        self.kind = head
        self.lexicon = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(3, WIDTH)
        self.tower = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)
        )
        self.calm = nn.LayerNorm(WIDTH)
        if head != "read":
            self.speak = nn.Linear(WIDTH, WORDS, bias=False)
        if head == "tied":
            self.speak.weight = self.lexicon.weight
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        extra = self.speak.weight[ids] if self.kind == "before" else 0.0
        x = self.lexicon(ids) + extra + self.places(torch.arange(ids.shape[1]))
        for block in self.tower:
            x = x + block(x)
        if self.kind == "fused":
            weight = self.speak.weight
            return ech.nn.linear_cross_entropy(self.calm(x), weight, ids.roll(1, 1), chunk_tokens=2)
        x = self.calm(x)
        if self.kind == "outside":
            return x
        return x @ self.lexicon.weight.T if self.kind == "read" else self.speak(x)


def _whatever_their_bytes() -> Any:
    """Context in which the layers of these small models are not too small."""
    return mock.patch.object(edges, "_WORTH_BYTES", 0)


def _names(model: nn.Module) -> tuple[list[str], list[str]]:
    with _whatever_their_bytes():
        embeddings, head = edges_of(model, blocks_to_shard(model))
    return [n for n, _ in embeddings], [n for n, _ in head]


def test_edges_are_found_by_structure() -> None:
    assert _names(seeded(Speaker, head="own")) == (["lexicon"], ["calm", "speak"])
    assert _names(seeded(Speaker, head="tied")) == ([], [])
    assert _names(seeded(Speaker, head="read")) == (["lexicon"], [])
    assert _names(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))) == ([], [])  # no blocks: all at once
    few = seeded(Speaker, head="own")
    assert edges_of(few, blocks_to_shard(few)) == ([], [])  # has few bytes
    few.lexicon = nn.Embedding((1 << 20) // WIDTH // 4, WIDTH)  # float32: as many as are worth a collective
    assert [name for name, _ in edges_of(few, blocks_to_shard(few))[0]] == ["lexicon"]
    small = seeded(Speaker, head="own")
    small.lexicon = nn.Embedding(2, WIDTH)  # not worth a collective
    assert _names(small) == ([], ["calm", "speak"])

    class Nested(nn.Module):
        """As causal models of transformers are nested."""

        def __init__(self) -> None:
            super().__init__()
            self.model = seeded(Speaker, head="read")
            self.score = nn.Linear(WIDTH, WORDS)

    assert _names(Nested()) == (["model.lexicon"], ["model.calm", "score"])


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(WORDS, (4, 3), generator=generator), torch.randint(WORDS, (4, 3), generator=generator)) for _ in range(3)
    ]


def _speaks(module: Any, data: Any) -> torch.Tensor:
    out = module(data[0])
    if module.kind == "fused":
        return out
    if module.kind == "outside":
        out = torch.cat([chunk @ module.speak.weight.T for chunk in out.chunk(2)])
    return nn.functional.cross_entropy(out.flatten(0, 1), data[1].flatten())


def _trained(head: str, layout: Any, **options: Any) -> dict[str, torch.Tensor]:
    with _whatever_their_bytes():
        module = seeded(Speaker, head=head)
        training: dict[str, Any] = {"loss": _speaks, "optimizer": "AdamW", "lr": 0.01, "clip_grad_norm": 0.5}
        unit = Regression(module=module, layout=layout, **training, **options)
    rank, size = (unit.prepared.data.rank, unit.prepared.data.size) if layout != "none" else (0, 1)
    data = [tuple(t.chunk(size)[rank] for t in each) for each in _batches()]
    ech.train(unit, data, max_epochs=1)
    ech.evaluate(unit, data)
    ech.train(unit, data, max_epochs=2)
    return whole(unit.module)


HEADS = ("own", "tied", "read", "before", "outside", "fused")


# Of each way: the layout, and options of the unit.
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fsdp": ("fsdp", {}),
    "zero2": ("zero2", {}),
    "prefetch": (ech.FSDPStrategy(forward_prefetch=2, backward_prefetch=2), {}),
    "recomputed": ("fsdp", {"activation_checkpoint_params": ech.layouts.ActivationCheckpointParams()}),
    "compiled": ("fsdp", {"torch_compile_params": ech.layouts.TorchCompileParams(backend="aot_eager")}),
    "windows": ("fsdp", {"gradient_accumulation_steps": 2}),
}
# The two that fully_shard treats differently go every way.
CASES = [(head, way) for head in HEADS for way in WAYS if head in ("own", "read") or way in ("fsdp", "zero2")]


@pytest.mark.full
def test_they_train_as_one_process_does(ranks: Ranks) -> None:
    found = ranks(2, lambda: [_trained(head, WAYS[way][0], **WAYS[way][1]) for head, way in CASES], timeout_s=240)[0]
    for (head, way), values in zip(CASES, found, strict=True):
        alone = _alone(head, 2 if way == "windows" else 1)
        assert largest_difference(values, alone) < 1e-9, (head, way)


def _gathered_in_a_compiled_forward() -> list[bool]:
    with _whatever_their_bytes():
        training: dict[str, Any] = {"loss": _speaks, "optimizer": "SGD", "lr": 0.01}
        unit = Regression(module=seeded(Speaker, head="read"), layout=WAYS["compiled"][0], **WAYS["compiled"][1], **training)
    lexicon: Any = unit.prepared.unwrapped.lexicon
    unshard, traced = lexicon.unshard, list[bool]()

    def look() -> Any:
        traced.append(torch.compiler.is_compiling())
        return unshard()

    lexicon.unshard = look
    ech.train(unit, _batches()[:1], max_epochs=1)
    return traced


@pytest.mark.full
def test_no_gathering_is_traced(ranks: Ranks) -> None:
    """Torch's compiler would read torch's table of all modules, of which the collector may free one meanwhile."""
    for traced in ranks(2, _gathered_in_a_compiled_forward):
        assert traced and not any(traced)


@pytest.mark.full
def test_a_head_split_by_words_is_gathered_over_the_other_ranks_alone(ranks: Ranks) -> None:
    for values in ranks(4, lambda: _trained("fused", ech.Layout(dp_shard=2, tp=2), gradient_accumulation_steps=2)):
        assert largest_difference(values, _alone("fused", 2)) < 1e-9


@functools.cache
def _alone(head: str, window: int) -> dict[str, torch.Tensor]:
    return _trained(head, "none", gradient_accumulation_steps=window)


class _GivesViews(nn.Module):
    """Blocks whose outputs are views, to which the module around them adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.Flatten()) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            before, x = x, block(x)
            x += before
        out = self.head(x).view(-1, 1)
        out *= 2
        return out


def _adds_in_place(layout: str, **options: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unit = Regression(module=seeded(_GivesViews), layout=layout, lr=0.01, **options)
        ech.train(unit, ech.Loader(list(zip(*batch(16, 0), strict=True)), 4, shuffle=False), max_epochs=2)
    return whole(unit.module), [str(each.message) for each in caught if "view" in str(each.message)]


def test_views_that_blocks_give_may_be_changed_in_place(ranks: Ranks) -> None:
    """Torch's hook on them was lost with the change, and the block's parameters were not there in the backward pass."""
    alone, _ = _adds_in_place("none")
    ways: list[tuple[str, dict[str, Any]]] = [("fsdp", {}), ("zero2", {}), ("fsdp", {"recompute": "blocks"})]
    for values, said in ranks(2, lambda: [_adds_in_place(layout, **options) for layout, options in ways])[0]:
        assert largest_difference(values, alone) < 1e-12 and not said


class _Pair:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


_GIVES: dict[str, tuple[Any, Any]] = {
    "an object": (_Pair, lambda given: given.value),
    "a distribution": (lambda value: torch.distributions.Normal(value, 1.0), lambda given: given.mean),
    "a set": (lambda value: {value}, lambda given: next(iter(given))),
}


class _GivesObjects(nn.Module):
    """Blocks and a module around them that give their tensors in something in which torch does not look for them.

    Args:
        kind: of `_GIVES`; "kept": beside their outputs, for the loss; "a closure": of the module alone.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(_Block(kind) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        wrap, unwrap = _GIVES.get(self.kind, (_as_it_is, _as_it_is))
        for block in self.blocks:
            x = unwrap(block(x))
        out = self.head(x)
        return (lambda: out) if self.kind == "a closure" else wrap(out)


class _Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.wrap = _GIVES[kind][0] if kind in _GIVES else _as_it_is
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2) if kind == "kept" else nn.Identity()
        self.kept = list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> Any:
        out = x + torch.tanh(self.first(x))
        self.kept = [self.second(x).square().mean()]  # what the backward pass reaches before the output
        return self.wrap(out)


def _as_it_is(value: Any) -> Any:
    return value


class _ReadsObjects(Regression):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        module = self.prepared.unwrapped
        given = self.module(data[0])
        out = given() if module.kind == "a closure" else _GIVES.get(module.kind, (None, _as_it_is))[1](given)
        loss = nn.functional.mse_loss(out, data[1])
        if module.kind == "kept":
            loss = loss + sum(block.kept[0] for block in module.blocks)
        return loss, out


def _of_objects(kind: str, layout: Any, **options: Any) -> dict[str, torch.Tensor]:
    unit = _ReadsObjects(module=seeded(lambda: _GivesObjects(kind)), layout=layout, lr=0.05, **options)
    ech.train(unit, ech.Loader(list(zip(*batch(16, 0), strict=True)), 4, shuffle=False), max_epochs=2)
    return whole(unit.module)


def test_outputs_in_which_torch_looks_for_no_tensors(ranks: Ranks) -> None:
    """The backward pass went around fully_shard's hooks: gradients that nobody reduced, or parameters that were not there; and
    DistributedDataParallel took all parameters for unused ones."""
    unused = ech.DDPStrategy(find_unused_parameters=True)
    ways: list[tuple[str, Any, dict[str, Any]]] = [("an object", layout, {}) for layout in ("fsdp", "zero2", unused)]
    ways += [("a distribution", "zero2", {}), ("a set", "fsdp", {}), ("kept", unused, {}), ("a closure", "fsdp", {})]
    ways += [("kept", "fsdp", {"recompute": "blocks"}), ("a distribution", "fsdp", {"accumulate": 2})]
    found = ranks(2, lambda: [_of_objects(kind, layout, **options) for kind, layout, options in ways])[0]
    for (kind, layout, options), values in zip(ways, found, strict=True):
        alone = _of_objects(kind, "none", **{name: given for name, given in options.items() if name != "recompute"})
        assert largest_difference(values, alone) < 1e-12, (kind, layout, options)


def _of_two_networks(layout: str) -> dict[str, torch.Tensor]:
    maker: Any = seeded(lambda: _GivesObjects("a closure"))
    judge: Any = seeded(lambda: nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    made: Any = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (maker, judge)]
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(16, 0)), 4)
    maker, judge, *made, loader = ech.prepare(maker, judge, *made, loader, layout=layout)
    for _ in ech.epochs(loader, 2):
        for x, y in loader:
            with ech.window(maker, judge) as window:
                given = maker(x)()
                made[1].zero_grad()
                window.backward((judge(given.detach()) - judge(y)).tanh().mean())
                made[1].step()
                made[0].zero_grad()
                window.backward((y - given).square().mean() - 0.1 * judge(given).mean())
                made[0].step()
    return {f"{i}.{name}": value for i, model in enumerate((maker, judge)) for name, value in whole(model).items()}


def test_such_outputs_of_several_networks(ranks: Ranks) -> None:
    """The critic's backward pass comes between the generator's forward and backward pass."""
    alone = _of_two_networks("none")
    for layout, values in zip(
        ("fsdp", "zero2"), ranks(2, lambda: list(map(_of_two_networks, ("fsdp", "zero2"))))[0], strict=True
    ):
        assert largest_difference(values, alone) < 1e-12, layout


def _left_to_the_root() -> dict[str, Any]:
    with _whatever_their_bytes():
        module: Any = prepare_module(seeded(Speaker, head="own"), CPU, layout="fsdp")
    seen: dict[str, list[str]] = {}

    def look(place: str) -> Any:
        return lambda *_: seen.update({place: [n for n, p in module.named_parameters() if not hasattr(p, "device_mesh")]})

    module.tower[1].register_forward_hook(look("block"))
    module.speak.register_forward_hook(look("head"))
    loss = module(_batches()[0][0]).sum()
    outside = hasattr(module.lexicon.weight, "device_mesh")  # as the optimizer and the user see it
    loss.backward()
    return {"seen": seen, "outside": outside, "class": isinstance(module.lexicon, nn.Embedding)}


@pytest.mark.full
def test_the_root_gathers_what_is_left(ranks: Ranks) -> None:
    found = ranks(2, _left_to_the_root)[0]
    assert found["seen"]["block"][:1] == ["places.weight"]
    assert all(not n.startswith(("lexicon", "speak", "calm")) for n in found["seen"]["block"])
    assert {"calm.weight", "speak.weight"} <= set(found["seen"]["head"])
    assert found["outside"] and found["class"]
