"""Pipeline parallelism: the same numbers as plain PyTorch in one process, whatever the stages, the schedule and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech
from echelon.common.errors import EchelonError
from tests.conftest import Ranks
from tests.kit.models import largest_difference, plain_training, seeded, whole
from tests.kit.refusals import answer, refusal
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

VOCABULARY, WIDTH, CONTEXT = 13, 8, 6
Tokens = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + x.cumsum(1) / 10
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """A language model as people write them: tied weights, a parameter of its own, positions read off a table's weight."""

    def __init__(self, depth: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        x += self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


class Residual(nn.Module):
    """The sum around the blocks is the root's own, and the input comes back at the end: each stage needs several outputs."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = self.words(tokens)
        with torch.no_grad():
            mask = x.sum(-1, keepdim=True) > 0  # of which autograd knows nothing
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * mask + first)


class _TiedWithBias(nn.Module):
    """The head has the words' weight, and a bias of its own, which the first stage does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(12, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 12)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens % 12)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Words,
    "untied": lambda: Words(tied=False),
    "residual": Residual,
    "tied with bias": _TiedWithBias,
    "deep": lambda: Words(depth=9),
}


def built(name: str) -> nn.Module:
    return seeded(MODELS[name])


def tokens(rows: int, seed: int, length: int = CONTEXT) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    targets = made[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100  # so that weights differ
    return made[:, :-1], targets


def windows(updates: int, size: int, rows: Sequence[int] = (2,)) -> list[list[Tokens]]:
    return [[tokens(rows[(u * size + i) % len(rows)], u * size + i) for i in range(size)] for u in range(updates)]


RATES = {"SGD": 0.1, "AdamW": 1e-2}


def plain(name: str, updates: list[list[Tokens]], *, optimizer: str) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """PyTorch alone: parameters, losses and norms after each update on the mean over all tokens of a window."""
    # Of windows whose sequences differ in length, too: targets that count nothing fill them up, behind all that do.
    longest = max(x.shape[1] for window in updates for x, _ in window)
    full = [
        [(F.pad(x, (0, longest - x.shape[1])), F.pad(y, (0, longest - y.shape[1]), value=-100)) for x, y in w] for w in updates
    ]
    return plain_training(full, clip=0.5, optimizer=optimizer, lr=RATES[optimizer], module=built(name), loss_of=loss_of)


def loss_of(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(x).flatten(0, 1), y.flatten())


class Unit(Regression):
    def __init__(self, name: str = "tied", *, optimizer: str = "SGD", **options: Any) -> None:
        super().__init__(optimizer=optimizer, lr=RATES[optimizer], **{"module": built(name), "clip_grad_norm": 0.5, **options})
        self.losses: list[float] = []
        self.told: list[Any] = []

    def compute_loss(self, state: ech.State, data: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = data
        logits = self.module(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits

    def weight(self, data: Tokens) -> float:
        return float((data[1] >= 0).sum())

    def on_train_step_end(self, state: ech.State, data: Tokens, step: int, results: ech.units.TrainStepResults) -> None:
        super().on_train_step_end(state, data, step, results)
        self.told.append((float(results.loss), list(results.outputs.shape)))
        if self.has_updated:
            self.losses.append(float(self.latest_update[0]))


Trained = tuple[dict[str, torch.Tensor], list[float], list[float], list[Any]]


def trained(name: str, updates: list[list[Tokens]], layout: Any, dp: int = 1, **options: Any) -> Trained:
    """Each of `dp` data-parallel ranks has its own micro-batches of a window."""
    mine = [window[torch.distributed.get_rank() % dp :: dp] for window in updates]
    unit = Unit(name, layout=layout, accumulate=len(mine[0]), **options)
    ech.train(unit, [each for window in mine for each in window], max_epochs=1)
    return whole(unit.prepared), unit.losses, unit.norms, unit.told


def together(results: list[Trained]) -> dict[str, torch.Tensor]:
    """Every parameter, from the ranks that have it; copies must be equal bit by bit."""
    found: dict[str, torch.Tensor] = {}
    for values, *_ in results:
        for name, value in values.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def check(results: list[Trained], want: tuple[dict[str, torch.Tensor], list[float], list[float]], *, told: bool = True) -> None:
    assert largest_difference(together(results), want[0]) < 1e-11
    for _, losses, norms, seen in results:
        assert losses == pytest.approx(want[1], rel=1e-11)
        assert norms == pytest.approx(want[2], rel=1e-10)
        assert not told or seen == results[0][3]  # losses and outputs are known on all ranks


SPLIT = {"words": "rowwise", "head": "colwise_gather", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
SHORT = [*windows(4, 5, rows=(2, 2, 2, 1, 3)), [tokens(2, 90), tokens(2, 91, length=4)]]  # and of other lengths
UNEVEN = windows(10, 4, rows=(2, 2, 1, 3, 2))
OF_12 = [[(x, y.clamp(max=11)) for x, y in window] for window in windows(4, 2)]

# The model, the optimizer, the windows, ranks in all and those with data of their own, the schedule, and more of the layout.
RUNS: list[tuple[str, str, list[list[Tokens]], int, int, str, dict[str, Any]]] = [
    *(("tied", "SGD", windows(8, 3), 2, 1, each, {}) for each in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")),
    *(("residual", "AdamW", windows(8, 4), 2, 1, each, {}) for each in ("1f1b", "interleaved", "zbv")),
    *(("untied", "SGD", SHORT, 2, 1, each, {}) for each in ("1f1b", "interleaved", "zbv")),
    ("tied", "SGD", windows(5, 6), 4, 1, "1f1b", {"pp": 4}),
    ("residual", "SGD", windows(5, 6), 4, 1, "zero_bubble", {"pp": 4}),
    *(("deep", "SGD", windows(5, 6), 4, 1, each, {"pp": 4}) for each in ("interleaved", "zbv")),
    ("tied", "AdamW", UNEVEN, 4, 2, "1f1b", {}),
    ("tied", "AdamW", UNEVEN, 4, 2, "interleaved", {"dp_replicate": 2}),
    ("residual", "SGD", UNEVEN, 4, 2, "1f1b", {"dp_replicate": 2}),
    ("residual", "SGD", UNEVEN, 4, 2, "1f1b", {"fsdp": ech.FSDPStrategy(requires_gradient_sync=False)}),
    ("tied with bias", "SGD", OF_12, 4, 1, "1f1b", {"tp": 2, "plan": SPLIT}),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "optimizer", "updates", "size", "dp", "schedule", "more"), RUNS)
def test_stages_train_as_one_process_does(
    ranks: Ranks, name: str, optimizer: str, updates: list[list[Tokens]], size: int, dp: int, schedule: str, more: dict[str, Any]
) -> None:
    """Sums in the root, masks, skips, short tails and other shapes within a window; tied ends; shards of stages."""
    results = ranks(size, trained, name, updates, ech.Layout(**{"pp": 2, "schedule": schedule, **more}), dp, optimizer=optimizer)
    check(results, plain(name, updates, optimizer=optimizer), told=dp == 1)


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (self.x, self.y)

    def __getitem__(self, i: int) -> torch.Tensor:
        return (self.x, self.y)[i]


def test_batches_of_the_users_own_classes_may_differ_in_shape(ranks: Ranks) -> None:
    """torch's pytree takes a dataclass for one leaf, so that all seemed of one shape."""
    updates = windows(4, 3, rows=(2, 1, 3))
    pairs: Any = [[Pair(*each) for each in window] for window in updates]
    check(ranks(2, trained, "untied", pairs, ech.Layout(pp=2)), plain("untied", updates, optimizer="SGD"))


class Late(Unit):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD([p for n, p in module.named_parameters() if n.startswith("head")], lr=0.1), None


def test_a_stage_without_anything_for_its_optimizer_is_refused_on_all_ranks(ranks: Ranks) -> None:
    stages = [["words", "positions", "blocks.0"], ["blocks.1", "blocks.2", "blocks.3", "norm", "head"]]
    for text in ranks(2, lambda: refusal(Late("untied", layout=ech.Layout(pp=2, stages=stages)).configure)):
        assert "empty parameter list" in text and "module.parameters()" in text


# --- without gradients


class Evaluated(Unit):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.logits: list[torch.Tensor] = []

    def on_eval_step_end(self, state: ech.State, data: Tokens, step: int, loss: torch.Tensor, outputs: Any) -> None:
        self.logits.append(outputs.clone())

    def on_predict_step_end(self, state: ech.State, data: Any, step: int, outputs: Any) -> None:
        self.logits.append(outputs.clone())


def evaluated(name: str, layout: Any, batches: list[Tokens]) -> tuple[float, float, list[torch.Tensor]]:
    unit = Evaluated(name=name, layout=layout)
    ech.evaluate(unit, batches)
    ech.units.test(unit, batches)
    ech.predict(unit, [x for x, _ in batches])
    return unit.eval_loss, unit.test_loss, unit.logits


class Predicts(Unit):
    """From batches with targets, by a step of its own."""

    direct = False

    def predict_step(self, state: ech.State, data: Tokens) -> Any:
        logits = self.module(data[0]) if self.direct else super().predict_step(state, data[0])
        self.found = logits.argmax(-1)


def predicted(batch: Tokens, direct: bool) -> torch.Tensor:
    unit = Predicts(layout="pp")
    unit.direct = direct
    ech.predict(unit, [batch])
    return unit.found


def test_a_prediction_of_ones_own_takes_what_the_module_takes(ranks: Ranks) -> None:
    batch = tokens(3, 0)
    want = built("tied").eval()(batch[0]).argmax(-1)
    assert all(torch.equal(got, want) for got in ranks(2, predicted, batch, False))
    for said in ranks(2, answer, predicted, batch, True):
        assert "write super().predict_step(state, inputs) in the place of self.module(inputs)" in said


@pytest.mark.full
@pytest.mark.parametrize("name", ["tied", "residual"])
def test_evaluation_and_prediction_go_through_the_stages_to_all_ranks(ranks: Ranks, name: str) -> None:
    batches = [tokens(3, 0), tokens(2, 1, length=4), tokens(1, 2)]
    module = built(name).eval()
    weights = [int((y >= 0).sum()) for _, y in batches]
    logits = [module(x).detach() for x, _ in batches]
    losses = [F.cross_entropy(z.flatten(0, 1), y.flatten()) for z, (_, y) in zip(logits, batches, strict=True)]
    want = float(sum(w * loss.detach() for w, loss in zip(weights, losses, strict=True)) / sum(weights))
    for schedule in ("1f1b", "zbv"):
        for loss, test, got in ranks(2, evaluated, name, ech.Layout(pp=2, schedule=schedule), batches):
            assert loss == test == pytest.approx(want, rel=1e-12)
            assert len(got) == 6
            for mine, its in zip(got, [*logits, *logits], strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


def fitted(layout: Any) -> tuple[list[float], list[float]]:
    unit = Evaluated(name="tied", layout=layout, accumulate=2)
    data = [tokens(2, i) for i in range(6)]
    ech.fit(unit, data, data[:2], max_epochs=2)
    return unit.losses, [unit.eval_loss]


def evaluated_in_bf16(layout: Any) -> tuple[float, torch.Tensor]:
    unit = Evaluated(module=built("tied").float(), layout=layout, precision="bf16")
    ech.fit(unit, [tokens(2, 0)], [tokens(2, 1)], max_epochs=1)
    ech.predict(unit, [tokens(2, 1)[0]])
    return unit.eval_loss, unit.logits[-1]


def test_weights_cast_for_an_evaluation_are_not_taken_for_something_that_a_stage_keeps(ranks: Ranks) -> None:
    """Autocast is around a whole evaluation, and holds the casts until it ends."""
    ((loss, logits),) = ranks(1, evaluated_in_bf16, "none")
    for found, seen in ranks(2, evaluated_in_bf16, ech.Layout(pp=2)):
        assert found == pytest.approx(loss, rel=1e-3)
        torch.testing.assert_close(seen, logits, rtol=1e-2, atol=1e-2)


def test_training_and_evaluation_take_turns(ranks: Ranks) -> None:
    (alone,) = ranks(1, fitted, "none")
    for losses, evaluations in ranks(2, fitted, ech.Layout(pp=2)):
        assert losses == pytest.approx(alone[0], rel=1e-11)
        assert evaluations == pytest.approx(alone[1], rel=1e-11)


# --- what is refused


class Shapes(nn.Module):
    """A model that does what a pipeline cannot follow, one thing at a time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.head = nn.Linear(WIDTH, VOCABULARY) if how == "head first" else None
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, VOCABULARY) if how != "head first" else None
        self.register_buffer("mean", torch.zeros(()))
        if how == "layer drop":
            self.layerdrop = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        if self.how == "buffer":
            self.mean += x.detach().mean()
        if self.how == "weight":
            x = x + self.blocks[0].down.bias
        if self.how == "twice":
            x = self.blocks[0](x)
        if self.how == "writes":
            with torch.no_grad():
                for block in self.blocks:
                    block.down.weight.div_(2)
        if self.how == "counts":
            self.calls = getattr(self, "calls", 0) + 1
            x = x * self.calls
        return (self.out or self.head)(x)


class Direct(Unit):
    def compute_loss(self, state: ech.State, data: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.module.words(data[0])
        return x.sum(), x


def what_is_said(how: str, layout: Any, hook: bool = False, direct: bool = False) -> str:
    module = seeded(Shapes, how=how)
    if hook:
        module.register_forward_hook(lambda *_: None)
    MODELS["shapes"] = lambda: module

    def train() -> None:
        of_all = ech.layouts.ActivationCheckpointParams(check_fn=lambda part: isinstance(part, Shapes))
        recompute = of_all if how == "recomputed" else None
        unit = (Direct if direct else Unit)("shapes", layout=layout, accumulate=2, recompute=recompute)
        if how == "outside":
            unit.module(tokens(2, 0)[0])
        ech.train(unit, [tokens(2, 0), tokens(2, 1)], max_epochs=1)

    return refusal(train, kind=EchelonError)


REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("", {"pp": 2, "stages": ["blocks.9"]}, ("'blocks.9'", "no module", "words, blocks.0, blocks.1, out")),
    ("", {"pp": 2, "stages": ["out", "blocks.1"]}, ("order", "blocks.1")),
    ("", {"pp": 2, "stages": [["words"], ["blocks.0", "out"]]}, ("blocks.1", "are in none")),
    ("", {"pp": 2, "stages": ["blocks.0", "blocks.1"]}, ("must have 2 stages", "got 3")),
    ("", {"pp": 2, "schedule": "interleaved"}, ("2 repeated blocks", "4 stages")),
    ("", {"pp": 2, "schedule": "zbv", "stages": ["blocks.1"]}, ("must have 4 stages", "got 2")),
    ("head first", {"pp": 2}, ("Shapes.head", "stage 0", "stage 1", "after blocks.1")),
    ("twice", {"pp": 2}, ("Shapes.blocks.0", "stage 0", "after blocks.1")),
    ("weight", {"pp": 2}, ("stage 1", "parameter of another stage")),
    ("buffer", {"pp": 2}, ("Shapes.mean", "1 of 2 stages", "lose")),
    ("layer drop", {"pp": 2}, ("Shapes leaves out layers at random (layerdrop=0.1)", "Set layerdrop=0.")),
    ("writes", {"pp": 2}, ("Shapes writes into a parameter of another stage than stage", "blocks.")),
    ("counts", {"pp": 2}, ("Shapes must give the same for the same batch", "changes from call to call")),
    ("outside", {"pp": 2}, ("Shapes", "2 stages", "compute_loss")),
    ("recomputed", {"pp": 2}, ("lie in one stage of the pipeline, got Shapes, which spans several",)),
]


@pytest.mark.full
def test_what_a_pipeline_cannot_do_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for found in ranks(2, lambda: [what_is_said(how, ech.Layout(**options)) for how, options, _ in REFUSED], timeout_s=180):
        for (how, options, words), text in zip(REFUSED, found, strict=True):
            assert [word for word in words if word not in text] == [], (how, options, text)


def test_hooks_of_split_modules_and_calls_of_submodules_are_refused(ranks: Ranks) -> None:
    for text in ranks(2, what_is_said, "", ech.Layout(pp=2), hook=True):
        assert "Shapes has hooks (forward hooks)" in text
    for text in ranks(2, what_is_said, "", ech.Layout(pp=2), direct=True):
        assert "compute_loss calls a submodule of Shapes directly" in text
