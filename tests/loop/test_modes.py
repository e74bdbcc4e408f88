"""Train and eval mode: what arrives in eval mode is trained in train mode, and what somebody set on purpose stays so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import RanksDisagreeError
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import squares, step, told
from tests.kit.units import SEVERAL, Regression, under_each

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


# What was done before training, and which modules are in eval mode then.
ENCODER = {"encoder", "encoder.body", *(f"encoder.body.{i}" for i in range(3))}
ARRIVALS: list[tuple[type[Headed], Callable[[Any], object], set[str]]] = [
    (Headed, lambda model: None, set()),
    (Headed, lambda model: model.eval(), set()),
    (Headed, lambda model: model.encoder.requires_grad_(False).eval(), ENCODER),
    (Headed, lambda model: model.norm.eval(), {"norm"}),
    (Refreezing, lambda model: model.eval(), {"norm"}),
]


def _in_eval(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_modules() if not each.training}


def _loop(kind: type[Headed], arrival: Any, layout: str) -> tuple[set[str], bool, dict[str, torch.Tensor]]:
    built = kind()
    arrival(built)
    optimizer = torch.optim.SGD([p for p in built.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, loader = ech.prepare(built, optimizer, DataLoader(DATA, 8), layout=layout)
    seen: set[str] = set()

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.update(_in_eval(built))
        return squares(model, x, y)

    for x, y in loader:
        step(model, optimizer, x, y, loss=loss)
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


@pytest.mark.parametrize(
    ("kind", "arrival", "wanted"), [*ARRIVALS, (Loaded, lambda model: None, {"encoder", "encoder.0", "encoder.1"})]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_unit_does_the_same(
    kind: type[Headed], arrival: Any, wanted: set[str], wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What is trained in eval mode for no clear reason is told."""
    model: Any = kind()
    arrival(model)
    before = _in_eval(model)
    unit = Fits(module=nn.Sequential(model) if wrapped else model)
    ech.fit(unit, [batch(4, i) for i in range(2)], [batch(4, 5)], max_epochs=2)
    assert {n.removeprefix("0.") for n in unit.seen} - {"0"} == wanted and _in_eval(model) == before
    assert ("encoder, and stay so" in caplog.text) == (kind is Loaded)


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


def _sets_modes(first: str, behind: str, middle: str = "", layout: str = "none") -> tuple[list[bool], set[str], list[str]]:
    """A loop whose script sets modes before the first window, behind an epoch's batches, and after its first one: which of its
    steps were in train mode, what was in eval mode at the end, and what was said."""
    built = Headed().train()
    built.norm.eval()
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    model, optimizer, loader = ech.prepare(built, optimizer, DataLoader(DATA, 8), layout=layout)
    seen: list[bool] = []

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(model.training and built.head.training)
        return squares(model, x, y)

    if first:
        getattr(model, first)()
    with told() as texts:
        for _ in ech.epochs(loader, 2):
            for at, (x, y) in enumerate(loader):
                step(model, optimizer, x, y, loss=loss)
                if middle and at == 0:
                    getattr(built, middle)()
            in_eval = _in_eval(built)
            if behind:
                getattr(built, behind)()
    return seen, in_eval, [text for text in texts if "eval mode" in text]


def test_modes_that_a_script_sets_before_or_behind_its_batches(ranks: Ranks) -> None:
    """An epoch after an evaluation is in train mode again; a loop that is put in eval mode before it begins stays so."""
    for seen, in_eval, _ in ranks(2, _sets_modes, "", "eval", "", "ddp"):
        assert all(seen) and in_eval == {"norm"}
    for seen, _, _ in ranks(2, _sets_modes, "eval", "eval", "", "fsdp"):
        assert not any(seen)
    seen, _, said = _sets_modes("train", "train")
    assert all(seen) and not said


def test_eval_mode_left_in_the_middle_is_said_once() -> None:
    seen, _, (said,) = _sets_modes("", "", "eval")
    assert seen == [True, False, True, False] and "is in eval mode now" in said


class ByHand(ech.TrainUnit[Any], ech.EvalUnit[Any], ech.PredictUnit[Any]):
    """Holds a module that the script has sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.distributed.fsdp.fully_shard(net())
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, state: ech.State, data: Any) -> None:
        torch.nn.functional.mse_loss(self.net(data[0]), data[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def eval_step(self, state: ech.State, data: Any) -> torch.Tensor:
        out: torch.Tensor = self.net(data[0])
        return out

    predict_step = eval_step


def _predicts_first() -> tuple[int, str]:
    unit, batches = ByHand(), [batch(4, i) for i in range(3)]
    ech.predict(unit, batches)
    ech.evaluate(unit, batches)
    ech.train(unit, batches, max_epochs=1)
    try:
        ech.evaluate(unit, batches[dist.get_rank() :])
    except RanksDisagreeError as error:
        return unit.train_progress.num_steps_completed, error.code
    return 0, ""


def test_a_module_that_a_plain_unit_has_sharded_predicts_and_trains_and_its_ranks_meet(ranks: Ranks) -> None:
    assert ranks(2, _predicts_first) == [(3, RanksDisagreeError.code)] * 2


# --- what an evaluation leaves: `fully_shard` may keep whole parameters in the shards' place, until the next backward pass


def _moments(unit: Regression) -> list[torch.Tensor]:
    local = [getattr(s["exp_avg"], "to_local", lambda s=s: s["exp_avg"])() for s in unit.optimizer.state.values()]
    return [t.detach().clone() for t in local]


def _saved_after_an_evaluation(layout: str, folder: str) -> tuple[int, float, float]:
    batches = [batch(4, 10 * dist.get_rank() + i) for i in range(3)]
    unit = Regression(layout=layout, optimizer="AdamW")
    saver = ech.DistributedCheckpointSaver(f"{folder}/{layout}")
    ech.fit(unit, batches, batches[:1], max_epochs=1, evaluate_every_n_updates=1, callbacks=[saver])
    again = Regression(layout=layout, optimizer="AdamW")
    ech.DistributedCheckpointSaver.restore_from_latest(f"{folder}/{layout}", again)
    pairs = list(zip(_moments(unit), _moments(again), strict=True))
    different = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
    return len(pairs), different, largest_difference(whole(unit.module), whole(again.module))


@pytest.mark.full
@pytest.mark.parametrize("layouts", SEVERAL)
def test_a_checkpoint_written_after_an_evaluation_holds_the_optimizer(ranks: Ranks, tmp_path: Path, layouts: list[str]) -> None:
    for rank in ranks(2, under_each, layouts, _saved_after_an_evaluation, str(tmp_path)):
        for layout, (moments, moment, parameter) in rank.items():
            assert moments > 0 and moment == 0.0 and parameter == 0.0, layout
