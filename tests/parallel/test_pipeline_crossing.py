"""What crosses the stages of a pipeline: found by its use in each pass, whatever is done with it; else refused on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import Batch, batch, largest_difference, seeded, whole
from tests.kit.refusals import refusal
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

WIDTH = 8
DATA = [batch(3, seed) for seed in range(8)]
RAGGED = [batch(2 + seed % 3, seed) for seed in range(8)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


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
        return self.after(y, early)

    def between(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    def after(self, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        return self.last(y)


class UnitsWriteTheirInputs(Base):
    """As blocks that begin with an activation in place; their inputs are used again, some of them made between the blocks."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.LeakyReLU(0.2, inplace=True), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [self.first(x) * 2]
        for block in self.blocks:
            kept.append(block(kept[-1]))
        return self.last(sum(kept))


class Gathered(Base):
    """Written into a tensor of the author's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        kept = torch.zeros(4, *y.shape, dtype=y.dtype)
        for number, block in enumerate(self.blocks):
            y = block(y)
            kept[number] = y
        return self.last(kept.mean(0))


class Collecting(Block):
    def forward(self, x: torch.Tensor, penalties: list[torch.Tensor], seen: dict[str, torch.Tensor]) -> torch.Tensor:
        y = super().forward(x)
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
        return self.last(y + seen["sum"]) + 0.1 * sum(penalties)


class Noting(Block):
    """Leaves something on itself, without gradients, for the root to read."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.note = what, {"tensor": None, "number": 0.0, "list": []}[what]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.what == "list":
            self.note.append((y > 0).to(y.dtype))
        else:
            self.note = (y > 0).to(y.dtype) if self.what == "tensor" else float(y.detach().mean())
        return y


class Measuring(Block):
    """Gives a number that is no tensor, made of values."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        y = super().forward(x)
        return y, float(y.detach().mean())


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


def _writes_a_view(self: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = block(x)
    y[:, :3].mul_(0.5)
    return y


def _writes_past_torch(self: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = block(x)
    y.data.mul_(0.5)
    return y


def _counts_passes(self: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of which a rank with two stages makes two."""
    self.epoch += 1
    return block(x) * 0.9 if self.epoch > 20 else block(x)


def _multiplies_by_the_mean(self: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y, mean = block(x)
    return y * (1 + mean)


def _chooses(self: Any, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    _, at = early.topk(3, -1)
    return self.last(y) + y.gather(-1, at).sum(-1, keepdim=True) * early.argmax(-1, keepdim=True)


def _reads(self: Any, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    """By Python: a number, a branch, a list, an array."""
    scale = early.detach().abs().mean().item() + early.tolist()[0][0] + float(early.detach().numpy().max())
    return self.last(y * scale) * (3 if bool(early.mean() > 0) else 1)


def _selects(self: Any, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    """Shapes that follow from values."""
    rows, out = torch.nonzero(early.sum(-1) > 0).flatten(), self.last(y)
    return out.index_add(0, rows, out[rows])


def _reads_a_list(self: Any, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    out = self.last(y * sum(self.blocks[0].note))
    for block in self.blocks:
        block.note.clear()
    return out


def _model(name: str, **methods: Any) -> type[Base]:
    return type(name, (Base,), methods)


RIGHT = [
    _model("AddedInPlace", between=lambda self, block, x: block(x).add_(x)),
    _model("ActivatedInPlace", between=lambda self, block, x: F.silu(block(x), inplace=True)),
    _model("ViewsWritten", between=_writes_a_view),
    UnitsWriteTheirInputs,
    _model("Compared", after=lambda self, y, early: self.last(y * (early > 0))),
    _model("Chosen", after=_chooses),
    _model("Read", after=_reads),
    _model("Detached", after=lambda self, y, early: self.last(y * early.detach().abs() + early.data.sum())),
    _model("Selected", after=_selects),
    Gathered,
    _model("ByMode", after=lambda self, y, early: self.last(y + 0.1 * early if self.training else y * (early > 0))),
    _model("ByFlag", after=lambda self, y, early: self.last(y + early if self.flag else y)),  # a callback sets it
    _model(
        "ByShape",
        between=lambda self, block, x: block(x).add_(x) if len(x) == 3 else block(x),
        after=lambda self, y, early: self.last(y + early if len(y) == 4 else y),
    ),
    Collected,
    _model("PastTorch", between=_writes_past_torch),
]


def _by_note(self: Any, y: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    note = self.blocks[0].note
    return self.last(y) if note is None else self.last(y * note)


REFUSED: list[tuple[type[Base], str]] = [
    (
        _model("ByCount", after=lambda self, y, early: self.last(y * (early > 0) if self.epoch else y)),
        "stage 1 of ByCount uses outputs of first",
    ),
    (
        _model("WrittenByCount", between=lambda self, block, x: block(x).add_(1) if self.epoch else block(x)),
        "WrittenByCount writes in place into an output of",
    ),
    (_model("Measured", block=lambda self: Measuring(), between=_multiplies_by_the_mean), "returned"),
    (_model("Noted", block=lambda self: Noting("tensor"), after=_by_note), "blocks.0.note"),
    (_model("NotedNumbers", block=lambda self: Noting("number"), after=_by_note), "blocks.0.note"),
    (_model("Listed", block=lambda self: Noting("list"), after=_reads_a_list), "blocks.0.note"),
    (CountingLate, "epoch, which lies in no stage, is changed in 1 of 2 stages"),
    (Averaging, "Averaging.mean, which lies in no stage, is changed by each pass"),
    (_model("Counting", between=_counts_passes), "Counting.epoch, which lies in no stage, is changed by each pass"),
]
INTERLEAVED = ("Averaging", "Counting")  # each rank makes two passes; the others are refused under 1f1b
MODELS = {make.__name__: make for make in [*RIGHT, *(make for make, _ in REFUSED)]}


def _goes_on(module: Any) -> None:
    """As a schedule does in mid-training."""
    module.flag = type(module).__name__ == "ByFlag"
    module.epoch += not module.flag


def _data(name: str) -> list[Batch]:
    return RAGGED if name == "ByShape" else DATA


class Unit(Regression):
    def __init__(self, name: str, layout: Any) -> None:
        super().__init__(module=seeded(MODELS.get(name, Base)), layout=layout, accumulate=2, lr=0.01)
        self.losses: list[float] = []

    def on_train_step_end(self, state: ech.State, data: Batch, step: int, results: ech.units.TrainStepResults) -> None:
        self.losses.append(float(results.loss))
        if len(self.losses) == 4:
            _goes_on(self.prepared.unwrapped)


Told = tuple[dict[str, torch.Tensor], list[float], float]


def _trained(name: str, layout: Any) -> Told:
    unit = Unit(name, layout)
    ech.train(unit, _data(name), max_epochs=1)
    ech.evaluate(unit, _data(name)[:3])
    return whole(unit.prepared), unit.losses, unit.eval_loss


def _plain(name: str) -> Told:
    module, data, losses = seeded(MODELS[name]), _data(name), list[float]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
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
    return whole(module), losses, total / sum(len(x) for x, _ in data[:3])


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_what_a_stage_uses_of_an_earlier_one_is_found_by_its_use(ranks: Ranks, schedule: str) -> None:
    """Writes in place were made twice, or in one stage only; what stood behind a comparison was nan."""
    names = [make.__name__ for make in RIGHT]
    told = ranks(2, lambda: [_trained(name, ech.Layout(pp=2, schedule=schedule)) for name in names])
    for name, *of_ranks in zip(names, *told, strict=True):
        want = _plain(name)
        got = {parameter: value for values, _, _ in of_ranks for parameter, value in values.items()}
        assert got.keys() == want[0].keys()
        for parameter, value in want[0].items():
            torch.testing.assert_close(got[parameter], value, rtol=1e-10, atol=1e-12, msg=f"{name}: {parameter}")
        for _, losses, evaluated in of_ranks:
            assert losses == pytest.approx(want[1], rel=1e-10), name
            assert evaluated == pytest.approx(want[2], rel=1e-10), name


def _refused() -> list[str]:
    found = []
    for name in (make.__name__ for make, _ in REFUSED):
        layout = ech.Layout(pp=2, schedule="interleaved" if name in INTERLEAVED else "1f1b")
        found.append(refusal(_trained, name, layout, kind=ech.EchelonError))
    return found


@pytest.mark.full
def test_a_pass_that_needs_what_was_not_sent_is_refused_on_all_ranks(ranks: Ranks) -> None:
    """It went on with nan, or with finite numbers that were wrong, and saved them."""
    for (make, words), *of_ranks in zip(REFUSED, *ranks(2, _refused), strict=True):
        assert all(words in said for said in of_ranks), make.__name__


class Failing(Unit):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        made = super().compute_loss(state, data)
        if len(self.losses) == 4 and self.prepared.unwrapped.training:
            raise ValueError("a label is missing")
        return made


def _failing() -> tuple[str, str]:
    try:
        ech.train(Failing("", "pp=2"), DATA, max_epochs=1)
    except (ValueError, ech.EchelonError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_error_in_a_loss_ends_all_stages(ranks: Ranks) -> None:
    """The first stage waited for gradients that did not come."""
    first, last = ranks(2, _failing)
    assert last == ("ValueError", "a label is missing")
    assert first[0] == "EchelonError" and "ValueError: a label is missing" in first[1]


class _Walks(Regression):
    """How often compute_loss ran to its end without anything staying of it."""

    def __init__(self) -> None:
        super().__init__(module=seeded(Base), layout="pp=2", lr=0.01)
        self.trials = 0

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        made = super().compute_loss(state, data)
        self.trials += self.prepared.batches.dry_run
        return made


def _tried(lengths: list[int]) -> int:
    unit = _Walks()
    ech.train(unit, [batch(rows, 0) for rows in lengths], max_epochs=1)
    return unit.trials


@pytest.mark.full
def test_a_batch_of_another_shape_takes_one_plain_pass(ranks: Ranks) -> None:
    _, few = ranks(2, _tried, [2])
    _, many = ranks(2, _tried, [2, 3, 4, 5, 6, 7])
    assert many == few + 5


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
