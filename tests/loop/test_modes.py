"""Train and eval mode: what arrives in eval mode is trained in train mode, and what somebody set on purpose stays so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import batch, whole
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

DATA = TensorDataset(*batch(16, 0))


class Pretrained(nn.Module):
    """As transformers' models: it comes in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    @classmethod
    def from_pretrained(cls) -> Pretrained:
        return cls().eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Pretrained.from_pretrained()
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.encoder(x)))


class Loaded(Headed):
    """Its encoder comes in eval mode, as a loader of its author's returns it, and says so by no name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).double().eval()  # type: ignore[assignment]


class Refreezing(Headed):
    """An author who freezes a layer's statistics whenever it is put in train mode."""

    def train(self, mode: bool = True) -> Refreezing:
        super().train(mode)
        self.norm.eval()
        return self


def _as_it_comes(model: nn.Module) -> None:
    pass


def _all_in_eval(model: nn.Module) -> None:
    model.eval()


def _frozen_encoder(model: Any) -> None:
    model.encoder.requires_grad_(False).eval()


def _one_norm(model: Any) -> None:
    model.norm.eval()


# What was done before training, and which modules are in eval mode then.
ENCODER = {"encoder", "encoder.body", *(f"encoder.body.{i}" for i in range(3))}
ARRIVALS = [
    (Headed, _as_it_comes, set()),
    (Headed, _all_in_eval, set()),
    (Headed, _frozen_encoder, ENCODER),
    (Headed, _one_norm, {"norm"}),
    (Refreezing, _all_in_eval, {"norm"}),
]


def _in_eval(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_modules() if not each.training}


def _loop(kind: type[Headed], arrival: Any, layout: str) -> tuple[set[str], bool, dict[str, torch.Tensor]]:
    built = kind()
    arrival(built)
    optimizer = torch.optim.SGD([p for p in built.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, loader = ech.prepare(built, optimizer, DataLoader(DATA, 8), layout=layout)
    seen: set[str] = set()
    for x, y in loader:
        with ech.window(model) as window:
            seen = _in_eval(built)
            window.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return seen, model.training, {n: b.clone() for n, b in built.named_buffers()}


@pytest.mark.parametrize(("kind", "arrival", "wanted"), ARRIVALS)
def test_a_loop_trains_what_arrives_in_eval_mode(ranks: Ranks, kind: type[Headed], arrival: Any, wanted: set[str]) -> None:
    fresh = dict(kind().named_buffers())
    for layout in ("ddp", "fsdp"):
        for seen, training, buffers in ranks(2, _loop, kind, arrival, layout):
            assert seen == wanted and training
            moved = {n.rpartition(".")[0] for n, b in buffers.items() if not torch.equal(b, fresh[n])}
            assert moved == {"norm", "encoder.body.1"} - wanted


class Fits(Regression):
    seen: set[str]

    def on_train_epoch_start(self, state: ech.State) -> None:
        self.seen = _in_eval(self.prepared.unwrapped)


@pytest.mark.parametrize(("kind", "arrival", "wanted"), ARRIVALS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_unit_does_the_same(kind: type[Headed], arrival: Any, wanted: set[str], wrapped: bool) -> None:
    model: Any = kind()
    arrival(model)
    before = _in_eval(model)
    unit = Fits(module=nn.Sequential(model) if wrapped else model)
    held_out = [batch(4, 5)]
    ech.fit(unit, [batch(4, i) for i in range(2)], held_out, max_epochs=2)
    assert {n.removeprefix("0.") for n in unit.seen} - {"0"} == wanted and _in_eval(model) == before


@pytest.mark.parametrize(("kind", "arrival", "is_told"), [*((k, a, False) for k, a, _ in ARRIVALS), (Loaded, _as_it_comes, True)])
def test_what_is_trained_in_eval_mode_for_no_clear_reason_is_told(
    kind: type[Headed], arrival: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = kind()
    arrival(model)
    ech.train(Regression(module=model), [batch(4, 0)], max_epochs=1)
    assert ("such as encoder, and stay so" in caplog.text) == is_told


class Distilled(Fits):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = Headed().requires_grad_(False).eval()
        self.modes: set[bool] = set()

    def on_train_epoch_start(self, state: ech.State) -> None:
        super().on_train_epoch_start(state)
        self.modes |= {each.training for each in self.teacher.modules()}


def test_a_frozen_teacher_stays_in_eval_mode() -> None:
    """Its dropout drew, and its statistics moved."""
    unit = Distilled()
    ech.fit(unit, [batch(4, i) for i in range(2)], [batch(4, 5)], max_epochs=2)
    assert unit.modes == {False} and unit.seen == set()


def test_the_wrapper_of_ddp_says_the_mode_of_what_it_wraps(ranks: Ranks) -> None:
    assert ranks(2, _mode_of_wrapper) == [False, False]


def _mode_of_wrapper() -> bool:
    return bool(Regression(module=Headed().eval(), layout="ddp").module.training)


Steps = list[tuple[int, int, bool]]  # epoch, step, train mode


def _sets_modes(
    first: str, behind: str, middle: str = "", layout: str = "none"
) -> tuple[Steps, set[str], dict[str, torch.Tensor]]:
    """A loop whose script sets modes before the first window, behind an epoch's batches, and after its first one."""
    built = Headed().train()
    built.norm.eval()
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    model, optimizer, loader = ech.prepare(built, optimizer, DataLoader(DATA, 8), layout=layout)
    seen: Steps = []
    if first:
        getattr(model, first)()
    for epoch in ech.epochs(loader, 2):
        for step, (x, y) in enumerate(loader):
            with ech.window(model) as window:
                seen.append((epoch, step, model.training and built.head.training))
                window.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if middle and step == 0:
                getattr(built, middle)()
        in_eval = _in_eval(built)
        if behind:
            getattr(built, behind)()
    return seen, in_eval, whole(model)


def test_an_epoch_after_an_evaluation_is_in_train_mode_again(ranks: Ranks) -> None:
    for seen, in_eval, _ in ranks(2, _sets_modes, "", "eval", "", "ddp"):
        assert all(training for *_, training in seen) and in_eval == {"norm"}


def test_a_loop_that_is_put_in_eval_mode_before_it_begins_stays_so(ranks: Ranks) -> None:
    for seen, _, _ in ranks(2, _sets_modes, "eval", "eval", "", "fsdp"):
        assert not any(training for *_, training in seen)


def test_eval_mode_left_in_the_middle_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        seen, _, _ = _sets_modes("", "", "eval")
    assert [training for *_, training in seen] == [True, False, True, False]
    assert caplog.text.count("is in eval mode now") == 1


def test_modes_that_are_put_back_by_the_script_are_none_of_our_business(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        seen, *_ = _sets_modes("train", "train")
    assert all(training for *_, training in seen) and "eval mode" not in caplog.text
