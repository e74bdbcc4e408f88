"""Several optimizers: each steps on gradients of its own, as in plain PyTorch on the whole global batch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, softplus
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import LoopError, OwnLoopError, RanksDisagreeError, UsageError
from tests.conftest import Ranks
from tests.kit.gan import (
    CLIP,
    Tensors,
    assert_same,
    dataset,
    mlp,
    networks,
    optimizers,
    plain_temperature,
    plainly_accumulated,
    temperature_losses,
    weights,
)
from tests.kit.models import largest_difference, whole
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks

ZERO1 = pytest.param("zero1", marks=pytest.mark.full)
BATCH = 10


def _gan() -> tuple[nn.Module, nn.Module]:
    made = networks()
    return made["generator"], made["critic"]


def _optimizers(generator: nn.Module, critic: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    made = optimizers({"generator": generator, "critic": critic})
    return made["generator"], made["critic"]


def _batches(size: int = BATCH) -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=size)


def _critic_loss(critic: nn.Module, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return (softplus(-critic(real)) + softplus(critic(made.detach()))).mean()


class _Pair:
    """The two networks in training, and the code of one batch, which is the same in plain PyTorch."""

    def __init__(self, generator: nn.Module, critic: nn.Module, of_each: Any, schedulers: Any = ()) -> None:
        self.generator, self.critic, (self.generators, self.critics) = generator, critic, of_each
        self.schedulers = schedulers
        self.clears: tuple[Any, Any] = of_each  # by whose `zero_grad`

    def step(self, data: Any, update: int, backward: Callable[..., Any], clip: Any, *, first: bool, every: int = 1) -> None:
        """
        Args:
            first: gradients are cleared before their pass, and not after the step.
            every: the generator steps in every so many updates.
        """
        (real, noise), (generators, critics) = data, self.clears
        if first:
            critics.zero_grad()
        made = self.generator(noise)
        backward(_critic_loss(self.critic, real, made))
        clip(self.critics)
        self.critics.step()
        if not first:
            critics.zero_grad()
        if update % every == 0:
            if first:
                generators.zero_grad()
            backward(softplus(-self.critic(made)).mean())  # reaches the critic as well
            clip(self.generators)
            self.generators.step()
        for scheduler in self.schedulers:
            scheduler.step()
        if not first:
            generators.zero_grad()
            critics.zero_grad()

    def weights(self) -> Tensors:
        return weights({"generator": self.generator, "critic": self.critic})


def _rates(of_each: Any) -> list[Any]:
    return [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in of_each]


def _plainly(scheduled: bool = False, batch: int = BATCH, **how: Any) -> Tensors:
    generator, critic = _gan()
    made = _optimizers(generator, critic)
    pair = _Pair(generator, critic, made, _rates(made) if scheduled else ())

    def clip(optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIP)

    for update, data in enumerate(_batches(batch)):
        pair.step(data, update, lambda loss: loss.backward(), clip, **how)
    return pair.weights()


def _prepared(layout: str, *, scheduled: bool = False, loader: Any = None, **options: Any) -> tuple[_Pair, Any]:
    generator, critic = _gan()
    made = _optimizers(generator, critic)
    schedulers = _rates(made) if scheduled else []
    loader = _batches() if loader is None else loader
    generator, critic, *_, loader = ech.prepare(generator, critic, *made, *schedulers, loader, layout=layout, **options)
    return _Pair(generator, critic, made, schedulers), loader


def _trained(layout: str, scheduled: bool = False, batch: int = BATCH, **how: Any) -> Tensors:
    pair, loader = _prepared(layout, scheduled=scheduled, loader=_batches(batch))
    for _ in ech.epochs(loader, 1):
        for data in loader:
            with ech.window(pair.critic, pair.generator) as window:
                pair.step(data, window.update, window.backward, lambda it: window.clip_grad_norm_(CLIP, of=it), **how)
    return pair.weights()


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "size", "first"),
    [("ddp", 2, True), ("fsdp", 2, False), ("zero1", 2, True), ("tp=2", 2, True), ("dp_shard=2,tp=2", 4, True)],
)
def test_each_optimizer_steps_on_the_gradients_of_its_own_loss(ranks: Ranks, layout: str, size: int, first: bool) -> None:
    how = {"first": first, "batch": 12 if size == 4 else BATCH}
    assert_same(ranks(size, _trained, layout, **how), _plainly(**how))


def test_one_that_steps_every_other_update_and_schedules_of_each(ranks: Ranks) -> None:
    how = {"first": True, "every": 2, "scheduled": True}
    assert_same(ranks(2, _trained, "ddp", **how), _plainly(**how))
    assert_same([_trained("none", first=False)], _plainly(first=False))


# --- accumulation


def _accumulated(layout: str, *, by_model: bool) -> tuple[Tensors, list[list[Any]]]:
    """The weights, and this rank's micro-batches of each update.

    Args:
        by_model: gradients are cleared by the models' `zero_grad`, between the passes.
    """
    loader = ech.Loader(dataset(), global_batch=12, accumulate=3, shuffle=False, tail="drop")
    pair, loader = _prepared(layout, loader=loader)
    if by_model:
        pair.clears = pair.generator, pair.critic
    seen: list[list[Any]] = []
    for data in loader:
        with ech.window(loader) as window:
            seen += [[]] * (window.update == len(seen))
            seen[window.update] = [*seen[window.update], data]
            pair.step(data, window.update, window.backward, lambda it: None, first=by_model)
    return pair.weights(), seen


@pytest.mark.full
@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", ZERO1])
def test_accumulation_adds_up_each_optimizers_own_gradients(ranks: Ranks, layout: str, by_model: bool) -> None:
    """Also where sharded models show gathered parameters, whose gradients are not those of the shards, as they are cleared."""
    found = ranks(2, _accumulated, layout, by_model=by_model)
    assert_same([got for got, _ in found], plainly_accumulated([seen for _, seen in found], schedules=False))


class _PolicyAndValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.policy, self.value = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x).tanh()
        return self.policy(hidden), self.value(hidden)


def _in_window(body: Callable[..., None], model: Any, data: Any, is_plain: bool) -> None:
    """One batch, in plain PyTorch or in a window."""
    if is_plain:
        body(*data, lambda loss, **options: loss.backward(**options))
        return
    with ech.window(model) as window:
        body(*data, window.backward)


def _heads(layout: str | None) -> Tensors:
    """A model of which two optimizers train parts. `layout` None is plain PyTorch."""
    model: Any = _PolicyAndValue()
    values = torch.optim.SGD(model.value.parameters(), 0.3)
    policies = torch.optim.Adam([*model.trunk.parameters(), *model.policy.parameters()], 1e-2)
    loader: Any = _batches(8)
    if layout is not None:  # the last batch is one sample: the other rank, and the second micro-batch, have padding
        loader = ech.Loader(dataset(), global_batch=8, accumulate=2, shuffle=False)
        model, _, _, loader = ech.prepare(model, values, policies, loader, layout=layout)

    def body(y: torch.Tensor, x: torch.Tensor, backward: Callable[..., Any]) -> None:
        policy, value = model(x)
        backward(mse_loss(policy, y), retain_graph=True)
        backward(mse_loss(value, y.sum(1, keepdim=True)))
        for optimizer in (policies, values):
            optimizer.step()
            optimizer.zero_grad()

    for data in loader:
        _in_window(body, values, data, layout is None)
    return whole(model)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_optimizers_over_parts_of_one_model_with_accumulation(ranks: Ranks, layout: str) -> None:
    assert_same(ranks(2, _heads, layout), _heads(None))


# --- one optimizer of two networks, and a teacher


def _sparse(layout: str | None) -> Tensors:
    """SparseAdam takes sparse gradients alone, and moves the rows that they have."""
    torch.manual_seed(5)
    model: Any = nn.Sequential(nn.Embedding(12, 3, sparse=True), nn.Linear(3, 1)).double()
    table, head = torch.optim.SparseAdam(model[0].parameters(), 0.1), torch.optim.SGD(model[1].parameters(), 0.1)
    rows = torch.tensor([0, 1, 1, 3, 4, 4, 0, 8, 3, 3, 9, 1])
    loader: Any = DataLoader(TensorDataset(rows, rows.double()[:, None].cos()), batch_size=4)
    if layout is not None:
        model, table, head, loader = ech.prepare(model, table, head, loader, layout=layout)

    def body(row: torch.Tensor, y: torch.Tensor, backward: Callable[..., Any]) -> None:
        loss = mse_loss(model(row), y)
        table.zero_grad()
        head.zero_grad()
        backward(loss)
        table.step()
        head.step()

    for data in loader:
        _in_window(body, model, data, layout is None)
    return whole(model)


def _distilled(layout: str | None) -> Tensors:
    """One optimizer of two networks, and a frozen teacher."""
    student, projection = _gan()
    teacher: Any = mlp(4, 2, seed=5).requires_grad_(False).eval()
    both = torch.optim.SGD([*student.parameters(), *projection.parameters()], 0.1)
    loader: Any = _batches()
    if layout is not None:
        student, projection, teacher, _, loader = ech.prepare(student, projection, teacher, both, loader, layout=layout)

    def body(y: torch.Tensor, x: torch.Tensor, backward: Callable[..., Any]) -> None:
        with torch.no_grad():
            target = teacher(x)
        out = student(x)
        backward(mse_loss(out, target) + mse_loss(projection(out), y.sum(1, keepdim=True)))
        both.step()
        both.zero_grad()

    for data in loader:
        _in_window(body, student, data, layout is None)
    return weights({"student": student, "projection": projection})


@pytest.mark.parametrize(("kind", "layout"), [(_sparse, "ddp"), (_distilled, "ddp"), (_distilled, "fsdp")])
def test_sparse_gradients_and_one_optimizer_of_two_networks(ranks: Ranks, kind: Any, layout: str) -> None:
    assert_same(ranks(2, kind, layout), kind(None))


# --- an optimizer of what is no model's


def _temperature(layout: str, folder: str, epochs: int) -> tuple[Tensors, float]:
    policy: nn.Module = mlp(4, 2, seed=0)
    log_alpha = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    made = {"policy": torch.optim.SGD(policy.parameters(), 0.1), "alpha": torch.optim.Adam([log_alpha], 0.1)}
    policy, *_, loader = ech.prepare(policy, *made.values(), _batches(8), layout=layout, checkpoints=folder)
    for _ in ech.epochs(loader, epochs):
        for data in loader:
            with ech.window(made["policy"]) as window:
                for name, loss in temperature_losses(policy, log_alpha, data):
                    window.backward(loss)
                    made[name].step()
                for optimizer in made.values():
                    optimizer.zero_grad()
    return whole(policy), float(log_alpha.detach())


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp", ZERO1])
def test_an_optimizer_of_a_parameter_outside_the_models(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    want, alpha = plain_temperature(2)
    ranks(2, _temperature, layout, str(tmp_path), 1)
    found = ranks(2, _temperature, layout, str(tmp_path), 2)
    assert_same([got for got, _ in found], want)
    assert [got for _, got in found] == pytest.approx([alpha] * 2, abs=1e-12)


def _not_prepared(layout: str) -> None:
    (generator, critic), others = _gan(), _gan()
    model = _PolicyAndValue()
    for kind, models, of in (
        (UsageError, others, (generator, critic)),  # the optimizers are of a copy's parameters
        (UsageError, (generator, critic), (generator, others[1])),
        (LoopError, (model,), (model, model.value)),  # a parameter of two
    ):
        with refused(kind):
            ech.prepare(*models, *(torch.optim.SGD(each.parameters(), 0.1) for each in of), _batches(), layout=layout)


def test_optimizers_of_a_copys_parameters_or_of_the_same_are_refused(ranks: Ranks) -> None:
    ranks(2, _not_prepared, "ddp")


# --- what is saved


def _saved(layout: str, folder: str, epochs: int) -> tuple[Tensors, list[float]]:
    pair, loader = _prepared(layout, scheduled=True, checkpoints=folder)
    for _ in ech.epochs(loader, epochs):
        for data in loader:
            with ech.window(pair.generator) as window:
                pair.step(data, window.update, window.backward, lambda it: window.clip_grad_norm_(CLIP, of=it), first=False)
    return pair.weights(), [each.param_groups[0]["lr"] for each in (pair.generators, pair.critics)]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp", ZERO1])
def test_a_resumed_run_ends_with_the_same_bits(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    straight = ranks(2, _saved, layout, str(tmp_path / "a"), 2)
    ranks(2, _saved, layout, str(tmp_path / "b"), 1)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    updates = [max(int(each.name[-8:]) for each in (tmp_path / folder).glob("step-*")) for folder in "ab"]
    assert updates[0] == 2 * updates[1] > 2, "each update is counted, and the second start has one epoch to train"
    for got, want in zip(ranks(2, _saved, layout, str(tmp_path / "b"), 2), straight, strict=True):
        assert largest_difference(got[0], want[0]) == 0 and got[1] == want[1]
    assert_same([ranks(1, _saved, "ddp", str(tmp_path / "c"), 2)[0][0]], straight[0][0])  # on one rank as well


# --- what is refused


def _refused(layout: str, body: Callable[..., Any]) -> str:
    loader = ech.Loader(dataset(), global_batch=8, accumulate=2, shuffle=False, tail="drop")
    pair, loader = _prepared(layout, loader=loader)
    with pytest.raises((UsageError, RanksDisagreeError)) as caught:
        for data in loader:
            with ech.window(pair.critic) as window:
                body(pair, window, *data)
    return f"{type(caught.value).__name__}: {caught.value}"


def _only_in_the_last(pair: _Pair, window: Any, real: torch.Tensor, noise: torch.Tensor) -> None:
    window.backward(_critic_loss(pair.critic, real, pair.generator(noise)))
    if window.is_last:
        pair.critics.step()
        pair.critics.zero_grad()


def _never(pair: _Pair, window: Any, real: torch.Tensor, noise: torch.Tensor) -> None:
    window.backward(_critic_loss(pair.critic, real, pair.generator(noise)))


def _by_batches(pair: _Pair, window: Any, real: torch.Tensor, noise: torch.Tensor) -> None:
    made = pair.generator(noise)
    window.backward(_critic_loss(pair.critic, real, made))
    pair.critics.step()
    window.backward(softplus(-pair.critic(made)).mean())
    if not window.is_last:
        pair.generators.step()


def _by_rank(pair: _Pair, window: Any, real: torch.Tensor, noise: torch.Tensor) -> None:
    window.backward(_critic_loss(pair.critic, real, pair.generator(noise)))
    (pair.critics if dist.get_rank() == 0 else pair.generators).step()


REFUSED: list[tuple[Callable[..., None], str]] = [
    (_only_in_the_last, "must be called in each batch of an update"),
    (_never, "an update must have the step() of an optimizer"),
    (_by_batches, "must be called in the last batch of an update, too"),
    (_by_rank, "RanksDisagreeError: the ranks must step the same optimizers in the same order"),
]


@pytest.mark.full
def test_steps_that_do_not_make_an_update_are_refused_on_all_ranks(ranks: Ranks) -> None:
    for found in ranks(2, lambda: [_refused("ddp", body) for body, _ in REFUSED]):
        for (_, said), text in zip(REFUSED, found, strict=True):
            assert said in text


def test_what_is_for_one_optimizer_and_a_window_around_what_was_prepared_apart_are_refused() -> None:
    with refused(LoopError):
        _prepared("none", precision="fp16")
    (one, _), (other, _) = _prepared("none"), _prepared("none")
    with refused(OwnLoopError):
        ech.window(one.generator, other.critic)
