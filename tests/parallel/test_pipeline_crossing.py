"""What crosses the stages of a pipeline: found by its use in each pass, whatever is done with it; else refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import Batch, batch, largest_difference, whole

pytestmark = pytest.mark.standing_ranks

WIDTH = 8
DATA = [batch(3, seed) for seed in range(8)]
RAGGED = [batch(2 + seed % 3, seed) for seed in range(8)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Base(nn.Module):
    """`between` is what its author does after each block, `after` what is done when all have run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(self.block() for _ in range(4))
        self.last, self.epoch, self.flag = nn.Linear(WIDTH, 1), 0, False

    def block(self) -> nn.Module:
        return Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = y = self.first(x)
        for block in self.blocks:
            y = self.between(block, y)
        out: torch.Tensor = self.after(y, early)
        return out

    def between(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = block(x)
        return out

    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(y)
        return out


class AddedInPlace(Base):
    def between(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = block(x)
        y += x
        return y


class ActivatedInPlace(Base):
    def between(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.silu(block(x), inplace=True)


class ViewsWritten(Base):
    def between(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = block(x)
        y[:, :3].mul_(0.5)
        return y


class UnitsWriteTheirInputs(Base):
    """As blocks that begin with an activation in place; their inputs are used again, some of them made between the blocks."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.LeakyReLU(0.2, inplace=True), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [self.first(x) * 2]
        for block in self.blocks:
            kept.append(block(kept[-1]))
        out: torch.Tensor = self.last(sum(kept))
        return out


class Compared(Base):
    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(y * (early > 0))
        return out


class Chosen(Base):
    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        _, at = early.topk(3, -1)
        out: torch.Tensor = self.last(y) + y.gather(-1, at).sum(-1, keepdim=True) * early.argmax(-1, keepdim=True)
        return out


class Read(Base):
    """By Python: a number, a branch, a list, an array."""

    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        scale = early.detach().abs().mean().item() + early.tolist()[0][0] + float(early.detach().numpy().max())
        out: torch.Tensor = self.last(y * scale)
        return out * 3 if bool(early.mean() > 0) else out


class Detached(Base):
    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(y * early.detach().abs() + early.data.sum())
        return out


class Selected(Base):
    """Shapes that follow from values."""

    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(early.sum(-1) > 0).flatten()
        out: torch.Tensor = self.last(y)
        return out.index_add(0, rows, out[rows])


class Gathered(Base):
    """Written into a tensor of the author's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        kept = torch.zeros(4, *y.shape, dtype=y.dtype)
        for number, block in enumerate(self.blocks):
            y = block(y)
            kept[number] = y
        out: torch.Tensor = self.last(kept.mean(0))
        return out


class ByMode(Base):
    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(y + 0.1 * early if self.training else y * (early > 0))
        return out


class ByFlag(Base):
    """That a callback sets in mid-training."""

    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(y + early if self.flag else y)
        return out


class ByShape(Base):
    def between(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = block(x)
        if len(x) == 3:
            y += x
        return y

    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(y + early if len(y) == 4 else y)
        return out


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, penalties: list[torch.Tensor], seen: dict[str, torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        penalties.append(y.pow(2).mean())
        seen["sum"] = seen.get("sum", 0) + y.detach()
        return y


class Collected(Base):
    """What blocks put into a list and a dict that they are given."""

    def block(self) -> nn.Module:
        return Collecting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalties: list[torch.Tensor] = []
        seen: dict[str, torch.Tensor] = {}
        y = self.first(x)
        for block in self.blocks:
            y = block(y, penalties, seen)
        out: torch.Tensor = self.last(y + seen["sum"]) + 0.1 * sum(penalties)
        return out


RIGHT: list[type[Base]] = [
    *(AddedInPlace, ActivatedInPlace, ViewsWritten, UnitsWriteTheirInputs, Compared, Chosen, Read, Detached, Selected, Gathered),
    *(ByMode, ByFlag, ByShape, Collected),
]


class ByCount(Base):
    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(y * (early > 0) if self.epoch else y)
        return out


class WrittenByCount(Base):
    def between(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = block(x)
        if self.epoch:
            y += 1
        return y


class Measuring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        y = self.block(x)
        return y, float(y.detach().mean())


class Measured(Base):
    """A number that is no tensor, made of values."""

    def block(self) -> nn.Module:
        return Measuring()

    def between(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y, mean = block(x)
        out: torch.Tensor = y * (1 + mean)
        return out


class Noting(Block):
    note: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.note = (y > 0).to(y.dtype)
        return y


class Noted(Base):
    """What a block notes without gradients, for the root to read."""

    def block(self) -> nn.Module:
        return Noting()

    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        note: Any = self.blocks[0].note
        out: torch.Tensor = self.last(y if note is None else y * note)
        return out


class NotingNumbers(Block):
    note = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.note = float(y.detach().mean())
        return y


class NotedNumbers(Base):
    def block(self) -> nn.Module:
        return NotingNumbers()

    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(y) * (1 + self.blocks[0].note)  # type: ignore[operator]
        return out


class Listing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.notes.append((y > 0).to(y.dtype))
        return y


class Listed(Base):
    def block(self) -> nn.Module:
        return Listing()

    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(y * sum(self.blocks[0].notes))  # type: ignore[arg-type]
        for block in self.blocks:
            block.notes.clear()  # type: ignore[union-attr, operator]
        return out


class CountingLate(Base):
    """Where only the last stage comes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x * (1 + self.epoch))
        self.epoch += 1
        return out


class Averaging(Base):
    """A buffer of its own, which each pass of a rank with two stages would change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        return super().forward(x - self.mean)


class PastTorch(Base):
    def between(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = block(x)
        y.data.mul_(0.5)
        return y


class Counting(Base):
    """Passes, of which a rank with two stages makes two."""

    def between(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.epoch += 1
        out: torch.Tensor = block(x)
        return out * 0.9 if self.epoch > 20 else out


REFUSED: list[tuple[type[Base], str, str]] = [
    (ByCount, "1f1b", "stage 1 of ByCount uses what first gave"),
    (WrittenByCount, "1f1b", "WrittenByCount writes into what"),
    (Measured, "1f1b", "returned"),
    (Noted, "1f1b", "blocks.0.note"),
    (NotedNumbers, "1f1b", "blocks.0.note"),
    (Listed, "1f1b", "blocks.0.notes"),
    (CountingLate, "1f1b", "counts its passes in epoch, in 1 of 2 stages"),
    (Averaging, "interleaved", "the buffer Averaging.mean"),
    (PastTorch, "1f1b", "past torch"),
    (Counting, "interleaved", "counts its passes in epoch"),
]


def _goes_on(module: Any) -> None:
    """As a schedule does in mid-training."""
    if isinstance(module, ByFlag):
        module.flag = True
    else:
        module.epoch += 1


class Unit(ech.AutoUnit[Batch]):
    def __init__(self, make: Callable[[], Base], layout: Any) -> None:
        torch.manual_seed(0)
        super().__init__(module=make().double(), layout=layout, accumulate=2, device=torch.device("cpu"))
        self.losses: list[float] = []

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        return F.mse_loss(self.module(data[0]), data[1]), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.01), None

    def on_train_step_end(self, state: ech.State, data: Batch, step: int, results: ech.units.TrainStepResults) -> None:
        self.losses.append(float(results.loss))
        if len(self.losses) == 4:
            _goes_on(self.prepared.unwrapped)


Told = tuple[dict[str, torch.Tensor], list[float], float]


def _trained(make: Callable[[], Base], layout: Any) -> Told:
    unit = Unit(make, layout)
    data = RAGGED if make is ByShape else DATA
    ech.train(unit, data, max_epochs=1)
    ech.evaluate(unit, data[:3])
    return {name: p.detach().clone() for name, p in unit.prepared.named_parameters()}, unit.losses, unit.eval_loss


def _plain(make: Callable[[], Base]) -> Told:
    torch.manual_seed(0)
    module = make().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses: list[float] = []
    data = RAGGED if make is ByShape else DATA
    for window in zip(data[::2], data[1::2], strict=True):
        for x, y in window:
            loss = F.mse_loss(module(x), y)
            losses.append(float(loss.detach()))
            (loss * len(x) / sum(len(each) for each, _ in window)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == 4:
            _goes_on(module)
    module.eval()
    with torch.no_grad():
        total = sum(float(F.mse_loss(module(x), y)) * len(x) for x, y in data[:3])
    return {name: p.detach() for name, p in module.named_parameters()}, losses, total / sum(len(x) for x, _ in data[:3])


def _each(makes: list[type[Base]], layout: Any) -> list[Told]:
    return [_trained(make, layout) for make in makes]


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_what_a_stage_uses_of_an_earlier_one_is_found_by_its_use(ranks: Ranks, schedule: str) -> None:
    """Writes in place were made twice, or in one stage only; what stood behind a comparison was nan."""
    told = ranks(2, _each, RIGHT, ech.Layout(pp=2, schedule=schedule))
    for make, *of_ranks in zip(RIGHT, *told, strict=True):
        want = _plain(make)
        got = {name: value for values, _, _ in of_ranks for name, value in values.items()}
        assert got.keys() == want[0].keys()
        for name, value in want[0].items():
            torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=f"{make.__name__}: {name}")
        for _, losses, evaluated in of_ranks:
            assert losses == pytest.approx(want[1], rel=1e-10), make.__name__
            assert evaluated == pytest.approx(want[2], rel=1e-10), make.__name__


def _refused(cases: list[tuple[type[Base], str, str]]) -> list[str]:
    found = []
    for make, schedule, _ in cases:
        with pytest.raises(ech.EchelonError) as caught:
            _trained(make, ech.Layout(pp=2, schedule=schedule))
        found.append(str(caught.value))
    return found


@pytest.mark.full
def test_a_pass_that_needs_what_was_not_sent_is_refused_on_all_ranks(ranks: Ranks) -> None:
    """It went on with nan, or with finite numbers that were wrong, and saved them."""
    told = ranks(2, _refused, REFUSED)
    for (make, _, words), *of_ranks in zip(REFUSED, *told, strict=True):
        for said in of_ranks:
            assert words in said, make.__name__


class Failing(Unit):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        loss, out = super().compute_loss(state, data)
        if len(self.losses) == 4 and self.prepared.unwrapped.training:
            raise ValueError("a label is missing")
        return loss, out


def _failing() -> tuple[str, str]:
    unit = Failing(Base, "pp=2")
    try:
        ech.train(unit, DATA, max_epochs=1)
    except (ValueError, ech.EchelonError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_error_in_a_loss_ends_all_stages(ranks: Ranks) -> None:
    """The first stage waited for gradients that did not come."""
    first, last = ranks(2, _failing)
    assert last == ("ValueError", "a label is missing")
    assert first[0] == "EchelonError" and "ValueError: a label is missing" in first[1]


class _Walks(ech.AutoUnit[Batch]):
    """How often compute_loss ran to its end without anything staying of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(module=Base().double(), layout="pp=2", device=torch.device("cpu"))
        self.trials = 0

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        loss = F.mse_loss(self.module(data[0]), data[1])
        self.trials += self.prepared.batches.is_trying
        return loss, None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.01), None


def _tried(lengths: list[int]) -> int:
    unit = _Walks()
    ech.train(unit, [batch(rows, 0) for rows in lengths], max_epochs=1)
    return unit.trials


@pytest.mark.full
def test_a_batch_of_another_shape_needs_no_trial_pass(ranks: Ranks) -> None:
    _, few = ranks(2, _tried, [2])
    _, many = ranks(2, _tried, [2, 3, 4, 5, 6, 7])
    assert many == few


class Telling(_Walks):
    """One rank alone changes a bool of the module's, as code does that prints now and then."""

    def _tell(self, flag: bool) -> None:
        self.prepared.unwrapped.flag = flag and dist.get_rank() == 0

    def on_train_step_end(self, state: ech.State, data: Batch, step: int, results: ech.units.TrainStepResults) -> None:
        self._tell(step % 3 == 1)

    def on_eval_step_end(self, state: ech.State, data: Batch, step: int, loss: torch.Tensor, outputs: Any) -> None:
        self._tell(not self.prepared.unwrapped.flag)


def _telling(unit: type[_Walks]) -> dict[str, torch.Tensor]:
    made = unit()
    ech.fit(made, [*DATA, *RAGGED], DATA[:3], max_epochs=2)
    return whole(made.module)


@pytest.mark.full
def test_ranks_whose_flags_differ_learn_together(ranks: Ranks) -> None:
    """They waited for each other: one took the batch for a new kind, and the others for a known one."""
    plain, telling = ranks(2, _telling, _Walks), ranks(2, _telling, Telling)
    assert largest_difference(plain[0], telling[0]) == 0
