"""Before training under context parallelism: models and losses that parts of sequences would change, where nothing shows yet.

A parameter that begins at zero hides what it multiplies; losses of all kinds look alike where they are means over equal tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.kit.context_models import LM, VOCABULARY, Language, Tokenwise, lm, loss_of, plain, tokens
from tests.kit.models import largest_difference, seeded, whole
from tests.kit.own_loops import step
from tests.kit.refusals import answer, refusal
from tests.kit.units import under_each

pytestmark = pytest.mark.standing_ranks

WIDTH = 16


def _zeroed(part: Any) -> Any:
    for parameter in part.parameters():
        nn.init.zeros_(parameter)
    return part


def _gated(branch: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> nn.Module:
    """A branch that mixes tokens, behind a gate that begins at zero."""
    return Tokenwise(lambda m, h: h + m.gate * branch(h), gate=nn.Parameter(torch.zeros(shape)))


def _shifted(h: torch.Tensor) -> torch.Tensor:
    return F.pad(h, (0, 0, 1, 0))[:, :-1]


def _places() -> nn.Module:
    """As minGPT's and a ViT's: learned positions that begin at zero, of a rank's first tokens."""
    return Tokenwise(lambda m, h: h + m.places[: h.shape[1]], places=nn.Parameter(torch.zeros(64, WIDTH)))


def _modulates(m: Any, h: torch.Tensor) -> torch.Tensor:
    """The condition of an adaptive norm is the mean of a sequence."""
    scale, shift = m.by(h.mean(1, keepdim=True)).chunk(2, -1)
    return h + F.layer_norm(h, (WIDTH,)) * scale + shift


HIDDEN: dict[str, Callable[[], nn.Module]] = {
    "positions": _places,
    "an embedding of positions": lambda: Tokenwise(
        lambda m, h: h + m.places.weight[: h.shape[1]], places=_zeroed(nn.Embedding(64, WIDTH))
    ),
    "token shift": lambda: _gated(_shifted, WIDTH),
    "a gate of one number": lambda: _gated(_shifted),
    "cumulative sum": lambda: _gated(lambda h: h.cumsum(1), WIDTH),
    "mean": lambda: _gated(lambda h: h.mean(1, keepdim=True), WIDTH),
    # As low-rank adapters: the last matrix of a branch begins at zero.
    "a projection of zero": lambda: Tokenwise(lambda m, h: h + m.out(h.cumsum(1).tanh()), out=_zeroed(nn.Linear(WIDTH, WIDTH))),
    "an adaptive norm": lambda: Tokenwise(_modulates, by=_zeroed(nn.Linear(WIDTH, 2 * WIDTH))),
    "a convolution": lambda: Tokenwise(
        lambda m, h: h + m.near(h.mT).mT, near=_zeroed(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH))
    ),
}


def _said(make: Callable[[], nn.Module], loss: Any = loss_of, layout: str = "cp=2", ignored: float = 0.0, **options: Any) -> str:
    """What is said before the first update; parameters and gradients are as before."""
    unit = Language(module=seeded(make), layout=layout, loss=loss, **options)
    before = whole(unit.module)
    assert all(p.grad is None for p in unit.module.parameters())
    said = refusal(ech.train, unit, [tokens(3, 32, seed, ignored=ignored) for seed in range(2)], max_epochs=1)
    assert unit.window.updates == 0 and all(p.grad is None for p in unit.module.parameters())
    assert largest_difference(before, whole(unit.module)) == 0.0
    return said


@pytest.mark.full
def test_what_begins_at_zero_is_seen(ranks: Ranks) -> None:
    for found in ranks(2, under_each, [*HIDDEN], lambda name: _said(HIDDEN[name]), timeout_s=180):
        assert {name: said for name, said in found.items() if "would change the model" not in said} == {}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp_shard=2,cp=2", "tp=2,cp=2"])
def test_of_shards_too_on_all_ranks(ranks: Ranks, layout: str) -> None:
    said = ranks(4, _said, _places, layout=layout)
    assert len(set(said)) == 1 and "would change the model" in said[0], said


# --- losses


def _per_token(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(module(batch["inputs"]).mT, batch["targets"], reduction="none")


def _contrastive(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    vectors = F.normalize(module(batch["inputs"]).flatten(0, 1), dim=-1)
    return F.cross_entropy(vectors @ vectors.roll(1, 0).T / 0.1, torch.arange(len(vectors)))


def _by_sequence(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    counted = batch["targets"] != -100
    return (_per_token(module, batch).sum(1) / counted.sum(1)).mean()


def _of_first_tokens(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    counted = ech.nn.positions(batch["inputs"]) < 4
    return ((_per_token(module, batch) * counted).sum(1) / counted.sum()).mean()  # 0 / 0 where a part has none of them


class LastInside(LM):
    """Computes a loss of the last token by itself."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = super().forward(x)
        return logits, F.cross_entropy(logits[:, -1], y[:, -1])


def _step_between_neighbours(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = module(batch["inputs"])
    return logits[:, 1:] - logits[:, :-1]


LOSSES: dict[str, Any] = {
    "last token": lambda m, b: F.cross_entropy(m(b["inputs"])[:, -1], b["targets"][:, -1]),
    "first token": lambda m, b: F.cross_entropy(m(b["inputs"])[:, 0], b["targets"][:, 0]),
    "of the mean": lambda m, b: F.cross_entropy(m(b["inputs"]).mean(1), b["targets"][:, 0] * 0),
    "neighbours": lambda m, b: loss_of(m, b) + _step_between_neighbours(m, b).pow(2).mean(),
    "total variation": lambda m, b: loss_of(m, b) + 0.1 * _step_between_neighbours(m, b).abs().mean(),
    "perplexity": lambda m, b: loss_of(m, b).exp(),
    "hardest tokens": lambda m, b: _per_token(m, b).flatten().topk(4).values.mean(),
    "greatest of each sequence": lambda m, b: _per_token(m, b).amax(1).mean(),
    "contrastive": _contrastive,
    "sum": lambda m, b: _per_token(m, b).sum(1).mean(),
    "ignored by another number": lambda m, b: F.cross_entropy(m(b["inputs"]).mT, b["targets"] // 16, ignore_index=0),
    "first tokens": _of_first_tokens,
    "last token, by the model": lambda m, b: m(b["inputs"], b["targets"])[1],
}


def _loss_refused(name: str) -> str:
    return _said(LastInside if name.endswith("by the model") else LM, LOSSES[name])


@pytest.mark.full
def test_losses_that_are_no_means_over_tokens_are_refused(ranks: Ranks) -> None:
    for found in ranks(2, under_each, [*LOSSES], _loss_refused, timeout_s=180):
        wrong = {name: said for name, said in found.items() if not re.search(r"would change the loss: .*mean over tokens", said)}
        assert wrong == {}


class Shaped(LM):
    """Gives (B, V, T), as cross_entropy takes it, or (B * T, V)."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, x: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x, documents)
        return out.flatten(0, 1) if self.flat else out.mT


def _shaped(flat: bool) -> None:
    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(module(batch["inputs"]), batch["targets"].flatten() if flat else batch["targets"])

    ech.train(Language(module=seeded(Shaped, flat=flat), layout="cp=2", loss=loss), [tokens(3, 64, 0)], max_epochs=1)


@pytest.mark.full
@pytest.mark.parametrize("flat", [False, True])
def test_outputs_of_other_shapes_are_taken(ranks: Ranks, flat: bool) -> None:
    assert ranks(2, _shaped, flat) == [None, None]


def _in_16_bits(shifts: bool) -> None:
    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        targets = F.pad(batch["inputs"], (0, 1), value=-100)[:, 1:]  # a part's last token has no next one there
        return F.cross_entropy(module(batch["inputs"]).flatten(0, 1), targets.flatten())

    unit = Language(module=lm().bfloat16(), layout="cp=2", loss=loss if shifts else loss_of)
    ech.train(unit, [tokens(3, 32, 0)], max_epochs=1)


@pytest.mark.full
def test_rounding_hides_no_loss(ranks: Ranks) -> None:
    assert all("would change the loss" in said for said in ranks(2, refusal, _in_16_bits, True))
    assert ranks(2, _in_16_bits, False) == [None, None]


def _evaluates() -> None:
    ech.evaluate(Language(module=lm(), layout="cp=2", loss=LOSSES["last token"]), [tokens(2, 32, 0)])


@pytest.mark.full
def test_an_evaluation_is_refused_too(ranks: Ranks) -> None:
    assert all("would change the loss" in said for said in ranks(2, refusal, _evaluates))


@pytest.mark.full
@pytest.mark.parametrize("by_tokens", [False, True])
def test_a_mean_for_each_sequence_is_refused_where_targets_are_ignored(ranks: Ranks, by_tokens: bool) -> None:
    for said in ranks(2, _said, LM, _by_sequence, ignored=0.4, by_tokens=by_tokens):
        assert "would change the loss" in said


# --- what is right stays right


def _by_mask(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    counts = (batch["targets"] != -100).double()
    return (_per_token(module, batch) * counts).sum() / counts.sum().clamp(min=1)


FINE: dict[str, tuple[Any, float]] = {
    "label smoothing": (lambda m, b: F.cross_entropy(m(b["inputs"]).mT, b["targets"], label_smoothing=0.1), 0.0),
    "z-loss": (lambda m, b: loss_of(m, b) + 1e-2 * m(b["inputs"]).logsumexp(-1).pow(2).mean(), 0.0),
    "a mask": (_by_mask, 0.5),
    "most targets ignored": (loss_of, 0.9),
}


def _trains(name: str) -> float:
    loss, ignored = FINE[name]
    batches = [tokens(2, 32, seed, ignored=ignored) for seed in range(3)]
    torch.manual_seed(5)
    unit = Language(module=lm(), layout="cp=2", loss=loss, by_tokens=True)
    ech.train(unit, batches, max_epochs=1)
    return largest_difference(whole(unit.module), plain(lm(), [[b] for b in batches], loss=loss, by_tokens=True)[0])


@pytest.mark.full
def test_means_over_tokens_are_taken(ranks: Ranks) -> None:
    for found in ranks(2, under_each, [*FINE], _trains):
        assert max(found.values()) < 1e-11, found


class Counts(Language):
    """Notices each call, and logs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls, self.seen = 0, torch.zeros(())
        self.kept: list[float] = []

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        self.calls += 1
        self.seen += data["inputs"].shape[1]
        loss, outputs = super().compute_loss(state, data)
        self.kept.append(float(loss.detach()))
        state.log("calls", 1.0, reduce="sum")
        return loss, outputs


def _calls() -> tuple[int, float, int, int, bool, bool]:
    torch.manual_seed(0)
    module: Any = lm()
    module.passes = 0
    module.register_forward_pre_hook(lambda module, args: setattr(module, "passes", module.passes + 1))
    unit = Counts(module=module, layout="cp=2")
    ech.train(unit, [tokens(2, 32, 0)] * 2, max_epochs=1)
    return unit.calls, float(unit.seen), len(unit.kept), module.passes, unit.module.training, torch.is_grad_enabled()


@pytest.mark.full
def test_nothing_stays_of_the_comparison(ranks: Ranks) -> None:
    assert ranks(2, _calls) == [(2, 32.0, 2, 2, True, True)] * 2


class Teaches(Language):
    """A teacher follows within `compute_loss`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.teachers = [copy.deepcopy(lm()).requires_grad_(False)]

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        with torch.no_grad():
            for kept in self.teachers[0].parameters():
                kept.mul_(0.5)
        return super().compute_loss(state, data)


def _taught(check: bool) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    unit = Teaches(module=lm(dropout=0.3), layout=ech.Layout(cp=2, check_context=check), recompute="blocks")
    ech.train(unit, [tokens(2, 32, seed) for seed in range(2)], max_epochs=1)
    return [whole(unit.module), whole(unit.teachers[0])]


@pytest.mark.full
def test_training_with_the_comparison_is_bit_equal_to_training_without(ranks: Ranks) -> None:
    for checked, unchecked in zip(ranks(2, _taught, True), ranks(2, _taught, False), strict=True):
        assert [largest_difference(*both) for both in zip(checked, unchecked, strict=True)] == [0.0, 0.0]


class Noisy(Language):
    """Adds noise to what it is given, a token at a time."""

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        drawn = torch.randint(VOCABULARY, data["inputs"].shape)
        inputs = torch.where(torch.rand(drawn.shape) < 0.2, drawn, data["inputs"])
        return self.loss(self.module, {**data, "inputs": inputs}), None


def _noise() -> int:
    unit = Noisy(module=lm(), layout="cp=2")
    ech.train(unit, [tokens(2, 32, seed) for seed in range(2)], max_epochs=1)
    return unit.window.updates


@pytest.mark.full
def test_a_loss_that_draws_for_each_token_is_taken(ranks: Ranks) -> None:
    assert ranks(2, _noise) == [2, 2]


# --- loops of one's own, whose loss is not called again


def _own_loop(name: str) -> Any:
    loss = {**LOSSES, **{name: loss for name, (loss, _) in FINE.items()}}[name]
    module, batches = lm(), [tokens(2, 32, seed) for seed in range(2)]
    made = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    model, optimizer, loader = ech.prepare(module, made, batches, layout="cp=2")

    def train() -> None:
        for batch in loader:
            step(model, optimizer, batch, loss=loss)

    return answer(train) or largest_difference(whole(model), plain(lm(), [[b] for b in batches], loss=loss)[0])


SEEN_IN_A_LOOP = [
    "last token",
    "first token",
    "of the mean",
    "neighbours",
    "perplexity",
    "contrastive",
    "ignored by another number",
]


@pytest.mark.full
def test_in_a_loop_of_ones_own_derivatives_tell_and_means_over_tokens_are_taken(ranks: Ranks) -> None:
    for found in ranks(2, under_each, [*SEEN_IN_A_LOOP, "label smoothing", "z-loss"], _own_loop, timeout_s=180):
        for name, said in found.items():
            if name in SEEN_IN_A_LOOP:
                assert "would change the loss: it must be a mean over tokens" in str(said), (name, said)
            else:
                assert said < 1e-11, (name, said)
