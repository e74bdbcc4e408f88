"""Several optimizers: each steps on gradients of its own, as in plain PyTorch on the whole global batch."""

from __future__ import annotations

import contextlib
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
from tests.kit.models import largest_difference, whole
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks

ZERO1 = pytest.param("zero1", marks=pytest.mark.full)
SAMPLES = 25  # the last batch is short, and the ranks share it unevenly
BATCH = 10
CLIP = 0.05

Tensors = dict[str, torch.Tensor]


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def _gan() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return _mlp(4, 2), _mlp(2, 1)


def _optimizers(generator: nn.Module, critic: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.Adam(generator.parameters(), 1e-2), torch.optim.SGD(critic.parameters(), 0.1, momentum=0.9)


def _data() -> TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(SAMPLES, width, generator=numbers, dtype=torch.float64) for width in (2, 4)))


def _batches(size: int = BATCH) -> DataLoader[Any]:
    return DataLoader(_data(), batch_size=size)


def _critic_loss(critic: nn.Module, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return (softplus(-critic(real)) + softplus(critic(made.detach()))).mean()


class _Pair:
    """The two networks in training, and the code of one batch, which is the same in plain PyTorch."""

    def __init__(self, generator: nn.Module, critic: nn.Module, optimizers: Any, schedulers: Any = ()) -> None:
        self.generator, self.critic, (self.generators, self.critics) = generator, critic, optimizers
        self.schedulers = schedulers

    def step(self, data: Any, update: int, backward: Callable[..., Any], clip: Any, *, first: bool, every: int = 1) -> None:
        """
        Args:
            first: gradients are cleared before their pass, and not after the step.
            every: the generator steps in every so many updates.
        """
        real, noise = data
        if first:
            self.critics.zero_grad()
        made = self.generator(noise)
        backward(_critic_loss(self.critic, real, made))
        clip(self.critics)
        self.critics.step()
        if not first:
            self.critics.zero_grad()
        if update % every == 0:
            if first:
                self.generators.zero_grad()
            backward(softplus(-self.critic(made)).mean())  # reaches the critic as well
            clip(self.generators)
            self.generators.step()
        for scheduler in self.schedulers:
            scheduler.step()
        if not first:
            self.generators.zero_grad()
            self.critics.zero_grad()

    def weights(self) -> tuple[Tensors, Tensors]:
        return whole(self.generator), whole(self.critic)


def _rates(optimizers: Any) -> list[Any]:
    return [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in optimizers]


def _plainly(scheduled: bool = False, batch: int = BATCH, **how: Any) -> tuple[Tensors, Tensors]:
    generator, critic = _gan()
    optimizers = _optimizers(generator, critic)
    pair = _Pair(generator, critic, optimizers, _rates(optimizers) if scheduled else ())

    def clip(optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIP)

    for update, data in enumerate(_batches(batch)):
        pair.step(data, update, lambda loss: loss.backward(), clip, **how)
    return pair.weights()


def _prepared(layout: str, *, scheduled: bool = False, loader: Any = None, **options: Any) -> tuple[_Pair, Any]:
    generator, critic = _gan()
    optimizers = _optimizers(generator, critic)
    schedulers = _rates(optimizers) if scheduled else []
    loader = _batches() if loader is None else loader
    generator, critic, *_, loader = ech.prepare(generator, critic, *optimizers, *schedulers, loader, layout=layout, **options)
    return _Pair(generator, critic, optimizers, schedulers), loader


def _trained(layout: str, scheduled: bool = False, batch: int = BATCH, **how: Any) -> tuple[Tensors, Tensors]:
    pair, loader = _prepared(layout, scheduled=scheduled, loader=_batches(batch))
    for _ in ech.epochs(loader, 1):
        for data in loader:
            with ech.window(pair.critic, pair.generator) as window:
                pair.step(data, window.update, window.backward, lambda it: window.clip_grad_norm_(CLIP, of=it), **how)
    return pair.weights()


def _agree(got: Any, want: Any) -> None:
    assert all(largest_difference(*each) < 1e-12 for each in zip(got, want, strict=True))


@pytest.mark.full
@pytest.mark.parametrize(("layout", "first"), [("ddp", True), ("fsdp", False), ("zero1", True)])
def test_each_optimizer_steps_on_the_gradients_of_its_own_loss(ranks: Ranks, layout: str, first: bool) -> None:
    want = _plainly(first=first)
    for got in ranks(2, _trained, layout, first=first):
        _agree(got, want)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "ranks_of_it"),
    [("tp=2", 2), ("dp_shard=2,tp=2", 4)],
)
def test_where_ranks_share_samples_or_layers(ranks: Ranks, layout: str, ranks_of_it: int) -> None:
    want = _plainly(first=True, batch=12)
    for got in ranks(ranks_of_it, _trained, layout, first=True, batch=12):
        _agree(got, want)


def test_one_that_steps_every_other_update_and_schedules_of_each(ranks: Ranks) -> None:
    how = {"first": True, "every": 2, "scheduled": True}
    want = _plainly(**how)
    for got in ranks(2, _trained, "ddp", **how):
        _agree(got, want)


def test_without_launched_ranks() -> None:
    _agree(_trained("none", first=False), _plainly(first=False))


# --- accumulation


def _accumulated(layout: str) -> tuple[tuple[Tensors, Tensors], list[list[Any]]]:
    """The weights, and this rank's micro-batches of each update."""
    loader = ech.Loader(_data(), global_batch=12, accumulate=3, shuffle=False, tail="drop")
    pair, loader = _prepared(layout, loader=loader)
    seen: list[list[Any]] = []
    for data in loader:
        with ech.window(loader) as window:
            seen += [[]] * (window.update == len(seen))
            seen[window.update] = [*seen[window.update], data]
            pair.step(data, window.update, window.backward, lambda it: None, first=False)
    return pair.weights(), seen


def _accumulated_plainly(batches: list[list[Any]]) -> tuple[Tensors, Tensors]:
    """By hand: the critic's gradient is that of the whole batch; the generator's meets the critic of before its step in all
    micro-batches but the last."""
    generator, critic = _gan()
    optimizers = _optimizers(generator, critic)
    for micro_batches in batches:
        total = sum(len(real) for real, _ in micro_batches)
        sums: list[dict[Any, torch.Tensor]] = [{}, {}]
        for i, (real, noise) in enumerate(micro_batches):
            for module, at in ((critic, 1), (generator, 0)):
                made = generator(noise)
                loss = _critic_loss(critic, real, made) if at else softplus(-critic(made)).mean()
                for p, g in zip(module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True):
                    sums[at][p] = sums[at].get(p, 0) + g * (len(real) / total)
                if i == len(micro_batches) - 1:
                    for p, g in sums[at].items():
                        p.grad = g
                    optimizers[at].step()
    return whole(generator), whole(critic)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp", ZERO1])
def test_accumulation_adds_up_each_optimizers_own_gradients(ranks: Ranks, layout: str) -> None:
    found = ranks(2, _accumulated, layout)
    batches = [
        [tuple(map(torch.cat, zip(*of_ranks, strict=True))) for of_ranks in zip(*update, strict=True)]
        for update in zip(*(seen for _, seen in found), strict=True)
    ]
    assert [len(each) for each in batches] == [3, 3]
    want = _accumulated_plainly(batches)
    for got, _ in found:
        _agree(got, want)


class _PolicyAndValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.policy, self.value = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x).tanh()
        return self.policy(hidden), self.value(hidden)


def _heads(layout: str | None) -> Tensors:
    """A model of which two optimizers train parts. `layout` None is plain PyTorch."""
    model: Any = _PolicyAndValue()
    values = torch.optim.SGD(model.value.parameters(), 0.3)
    policies = torch.optim.Adam([*model.trunk.parameters(), *model.policy.parameters()], 1e-2)
    loader: Any = _batches(8)
    if layout is not None:  # the last batch is one sample: the other rank, and the second micro-batch, have padding
        loader = ech.Loader(_data(), global_batch=8, accumulate=2, shuffle=False)
        model, _, _, loader = ech.prepare(model, values, policies, loader, layout=layout)
    for y, x in loader:

        def step(backward: Callable[..., Any], y: torch.Tensor = y, x: torch.Tensor = x) -> None:
            policy, value = model(x)
            backward(mse_loss(policy, y), retain_graph=True)
            backward(mse_loss(value, y.sum(1, keepdim=True)))
            policies.step()
            values.step()
            policies.zero_grad()
            values.zero_grad()

        if layout is None:
            step(lambda loss, **options: loss.backward(**options))
        else:
            with ech.window(values) as window:
                step(window.backward)
    made: Tensors = whole(model)
    return made


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_optimizers_over_parts_of_one_model_with_accumulation(ranks: Ranks, layout: str) -> None:
    want = _heads(None)
    for got in ranks(2, _heads, layout):
        assert largest_difference(got, want) < 1e-12


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
    for row, y in loader:
        with contextlib.nullcontext() if layout is None else ech.window(model) as window:
            loss = mse_loss(model(row), y)
            table.zero_grad()
            head.zero_grad()
            loss.backward() if window is None else window.backward(loss)
            table.step()
            head.step()
    made: Tensors = whole(model)
    return made


def test_sparse_gradients_stay_sparse(ranks: Ranks) -> None:
    want = _sparse(None)
    for got in ranks(2, _sparse, "ddp"):
        assert largest_difference(got, want) < 1e-12


def _distilled(layout: str | None) -> tuple[Tensors, Tensors]:
    student, projection = _gan()
    torch.manual_seed(5)
    teacher = _mlp(4, 2).requires_grad_(False).eval()
    both = torch.optim.SGD([*student.parameters(), *projection.parameters()], 0.1)
    loader: Any = _batches()
    if layout is not None:
        student, projection, teacher, _, loader = ech.prepare(student, projection, teacher, both, loader, layout=layout)
    for y, x in loader:

        def step(backward: Callable[..., Any], y: torch.Tensor = y, x: torch.Tensor = x) -> None:
            with torch.no_grad():
                target = teacher(x)
            out = student(x)
            backward(mse_loss(out, target) + mse_loss(projection(out), y.sum(1, keepdim=True)))
            both.step()
            both.zero_grad()

        if layout is None:
            step(lambda loss: loss.backward())
        else:
            with ech.window(student) as window:
                step(window.backward)
    return whole(student), whole(projection)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_one_optimizer_of_two_networks_and_a_frozen_teacher(ranks: Ranks, layout: str) -> None:
    want = _distilled(None)
    for got in ranks(2, _distilled, layout):
        _agree(got, want)


# --- an optimizer of what is no model's


def _temperature(layout: str | None, folder: str = "", epochs: int = 1) -> tuple[Tensors, float]:
    """A policy and the logarithm of its temperature, as of soft actor-critic. `layout` None is plain PyTorch."""
    policy: nn.Module = _gan()[0]
    log_alpha = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    policies, alphas = torch.optim.SGD(policy.parameters(), 0.1), torch.optim.Adam([log_alpha], 0.1)
    loader: Any = _batches()
    if layout is not None:
        checkpoints = folder or None
        policy, _, _, loader = ech.prepare(policy, policies, alphas, loader, layout=layout, checkpoints=checkpoints)

    def step(data: Any, backward: Callable[..., Any]) -> None:
        error = (policy(data[1]) - data[0]).square().mean(1)
        backward((log_alpha.exp().detach() * error).mean())
        policies.step()
        backward((log_alpha * (error.detach() - 1)).mean())
        alphas.step()
        policies.zero_grad()
        alphas.zero_grad()

    for _ in range(epochs) if layout is None else ech.epochs(loader, epochs):
        for data in loader:
            if layout is None:
                step(data, lambda loss: loss.backward())
                continue
            with ech.window(policies) as window:
                step(data, window.backward)
    return whole(policy), float(log_alpha.detach())


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp", ZERO1])
def test_an_optimizer_of_a_parameter_outside_the_models(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    want, alpha = _temperature(None, epochs=2)
    ranks(2, _temperature, layout, str(tmp_path), 1)
    for got, found in ranks(2, _temperature, layout, str(tmp_path), 2):
        assert largest_difference(got, want) < 1e-12 and abs(found - alpha) < 1e-12


def _of_a_copy(layout: str) -> str:
    generator, critic = _gan()
    _, optimizer = _optimizers(generator, critic)
    with pytest.raises(UsageError) as caught:
        ech.prepare(*_gan(), torch.optim.SGD(generator.parameters(), 0.1), optimizer, _batches(), layout=layout)
    stale = str(caught.value)
    with pytest.raises(UsageError) as caught:
        ech.prepare(
            generator, critic, torch.optim.SGD(generator.parameters(), 0.1), _optimizers(*_gan())[1], _batches(), layout=layout
        )
    return stale + str(caught.value)


def test_an_optimizer_of_a_copys_parameters_is_refused(ranks: Ranks) -> None:
    for text in ranks(2, _of_a_copy, "ddp"):
        assert text.count("the optimizer must hold parameters of the") == 2


# --- what is saved


def _saved(layout: str, folder: str, epochs: int) -> Any:
    pair, loader = _prepared(layout, scheduled=True, checkpoints=folder)
    for _ in ech.epochs(loader, epochs):
        for data in loader:
            with ech.window(pair.generator) as window:
                pair.step(data, window.update, window.backward, lambda it: window.clip_grad_norm_(CLIP, of=it), first=False)
    rates = [each.param_groups[0]["lr"] for each in (pair.generators, pair.critics)]
    return *pair.weights(), rates


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp", ZERO1])
def test_a_resumed_run_ends_with_the_same_bits(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    straight = ranks(2, _saved, layout, str(tmp_path / "a"), 2)
    ranks(2, _saved, layout, str(tmp_path / "b"), 1)
    updates = [max(int(each.name[-8:]) for each in (tmp_path / folder).glob("step-*")) for folder in "ab"]
    assert updates[0] == 2 * updates[1] > 2, "each update is counted, and the second start has one epoch to train"
    for got, want in zip(ranks(2, _saved, layout, str(tmp_path / "b"), 2), straight, strict=True):
        assert [largest_difference(*each) for each in zip(got[:2], want[:2], strict=True)] == [0, 0]
        assert got[2] == want[2]


@pytest.mark.full
def test_a_run_goes_on_with_fewer_ranks_and_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    straight = ranks(2, _saved, "ddp", str(tmp_path / "a"), 2)[0]
    ranks(2, _saved, "fsdp", str(tmp_path / "b"), 1)
    (got,) = ranks(1, _saved, "ddp", str(tmp_path / "b"), 2)
    _agree(got[:2], straight[:2])


# --- what is refused


def _refused(layout: str, body: Callable[..., Any]) -> str:
    loader = ech.Loader(_data(), global_batch=8, accumulate=2, shuffle=False, tail="drop")
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
    (_never, "the update must end with the step() of an optimizer"),
    (_by_batches, "must be called in the last batch of an update, too"),
    (_by_rank, "RanksDisagreeError: the ranks must step the same optimizers in the same order"),
]


@pytest.mark.full
def test_steps_that_do_not_make_an_update_are_refused_on_all_ranks(ranks: Ranks) -> None:
    for found in ranks(2, lambda: [_refused("ddp", body) for body, _ in REFUSED]):
        for (_, said), text in zip(REFUSED, found, strict=True):
            assert said in text


def _shares(layout: str) -> str:
    model = _PolicyAndValue()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, model.value)]
    with pytest.raises(UsageError) as caught:
        ech.prepare(model, *optimizers, _batches(), layout=layout)
    return str(caught.value)


def test_a_parameter_of_two_optimizers_is_refused(ranks: Ranks) -> None:
    for text in ranks(2, _shares, "ddp"):
        assert "each parameter must be in one optimizer" in text and "value.weight" in text


def test_what_is_for_one_optimizer_is_refused_by_name() -> None:
    with refused(LoopError):
        _prepared("none", precision="fp16")


def test_a_window_is_around_what_was_prepared_together() -> None:
    (one, _), (other, _) = _prepared("none"), _prepared("none")
    with refused(OwnLoopError):
        ech.window(one.generator, other.critic)
