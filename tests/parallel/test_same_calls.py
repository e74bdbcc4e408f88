"""Ranks that do not use a sharded module alike, or do not draw alike where they share layers: else wrong without any error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import RanksDisagreeError
from tests.conftest import Ranks
from tests.kit.models import largest_difference, seeded, whole
from tests.kit.own_loops import own_loop
from tests.kit.refusals import refusal
from tests.kit.units import Hooks, Regression

pytestmark = pytest.mark.standing_ranks

UPDATES, FIRST = 6, 3  # from which on the ranks part ways
Way = Callable[[int, int], tuple[list[int], list[int]]]  # (rank, update) -> the blocks, in order, and the heads


class Paths(nn.Module):
    """Blocks of one size, and heads in the root, of one size, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, blocks: list[int], heads: list[int]) -> torch.Tensor:
        for block in blocks:
            x = x + self.blocks[block](x)
        return sum(self.heads[head](x) for head in heads)


class Walks(Regression):
    def __init__(self, way: str, **options: Any) -> None:
        super().__init__(module=seeded(Paths), **options)
        self.way, self.micro_batches, self.updated = WAYS[way], 0, 0

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        update = self.micro_batches // self.gradient_accumulation_steps
        self.micro_batches += 1
        out = self.module(data[0], *self.way(dist.get_rank(), update))
        return nn.functional.mse_loss(out, data[1]), out

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        made = super().configure_optimizers_and_lr_scheduler(module)
        made[0].register_step_post_hook(lambda *_: setattr(self, "updated", self.updated + 1))
        return made


def _data(count: int) -> list[Any]:
    torch.manual_seed(dist.get_rank())
    return [(torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)) for _ in range(count)]


ALL, HEADS = [0, 1, 2, 3], [0, 1, 2]
HALVES = [[0, 1], [2, 3]]
WAYS: dict[str, Way] = {
    "same": lambda rank, update: (ALL, HEADS),
    "drawn alike": lambda rank, update: (ALL, HEADS) if update % 2 else ([0, 2], [1]),
    "other order": lambda rank, update: (ALL if rank or update < FIRST else [1, 0, 2, 3], HEADS),
    "other blocks": lambda rank, update: (ALL if update < FIRST else HALVES[rank % 2], HEADS),
    # Both ways are known to all ranks before these part.
    "drawn apart": lambda rank, update: (HALVES[(update if update < FIRST else update + rank) % 2], HEADS),
    "other heads": lambda rank, update: (ALL, HEADS if update < FIRST else [0, 1 + rank % 2]),
    "other heads at last": lambda rank, update: (ALL, HEADS if update < UPDATES - 1 else [0, 1 + rank % 2]),
}


def _walked(way: str, layout: Any, accumulation: int = 1, folder: Path | None = None, **options: Any) -> Any:
    unit = Walks(way, layout=layout, accumulate=accumulation, **options)
    savers = [] if folder is None else [ech.DistributedCheckpointSaver(folder, save_every_n_epochs=1)]
    try:
        ech.train(unit, _data(UPDATES * accumulation), max_epochs=1, callbacks=savers)
    except RanksDisagreeError as error:
        return unit.updated, str(error)
    return unit.updated, whole(unit.module)


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "layout", "accumulation", "said"),
    [
        ("other order", "fsdp", 1, "call 2 of update 3 rank 0 called blocks.1 and rank 1 called blocks.0"),
        ("other blocks", "fsdp", 1, "update 3 rank 0 called blocks."),
        ("drawn apart", "fsdp", 1, "update 3 rank 0 called blocks."),
        *(("other order", each, 2, "rank 0 called blocks.1 and rank 1 called") for each in ("zero2", "hsdp", "dp_shard=4")),
    ],
)
def test_ranks_that_call_other_blocks_are_told_before_the_update(
    ranks: Ranks, way: str, layout: str, accumulation: int, said: str
) -> None:
    for updated, text in ranks(2 if accumulation == 1 else 4, _walked, way, layout, accumulation):
        assert updated == FIRST
        assert said in text and "The update was not made" in text and "the same seed" in text


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_with_gradients_of_other_parameters_are_told_after_the_update(ranks: Ranks, accumulation: int) -> None:
    for updated, text in ranks(2, _walked, "other heads", "fsdp", accumulation):
        assert updated == FIRST + 1
        assert "in update 3 rank 0 had a gradient of heads.1.bias and rank 1 had none" in text
        assert "Continue from an earlier checkpoint" in text


def test_of_the_last_update_they_are_told_at_the_end(ranks: Ranks, tmp_path: Path) -> None:
    """And nothing is saved of it."""

    for _, text in ranks(2, _walked, "other heads at last", "fsdp", 1, tmp_path):
        assert "in update 5 rank 0 had a gradient of heads.1.bias and rank 1 had none" in text
    assert not list(tmp_path.rglob("manifest*"))


def _under_each() -> dict[str, Any]:
    recomputed = ech.layouts.ActivationCheckpointParams(check_fn=lambda module: isinstance(module, nn.Sequential))
    return {
        "ddp": _walked("drawn alike", ech.DDPStrategy(find_unused_parameters=True), 2),
        "fsdp": _walked("drawn alike", "fsdp", 2),
        "hsdp": _walked("drawn alike", "hsdp", 2),
        "recomputed": _walked("drawn alike", "fsdp", 2, activation_checkpoint_params=recomputed),
    }


@pytest.mark.full
def test_what_all_ranks_leave_out_together_is_right(ranks: Ranks) -> None:
    for found in ranks(4, _under_each):
        for name, (updated, values) in found.items():
            assert updated == UPDATES, values
            assert largest_difference(values, found["ddp"][1]) < 1e-11, name


class Exits(Walks):
    """Leaves early in evaluations, as a network may that is sure of its answer."""

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        blocks = ALL if self.module.training or dist.get_rank() else [0, 1, 3, 3]
        out = self.module(data[0], blocks, [0, 1, 2])
        return nn.functional.mse_loss(out, data[1]), out


def _evaluated(layout: Any, entry: str) -> str:
    unit = Exits("same", layout=layout)
    try:
        if entry == "fit":
            ech.fit(unit, _data(2), _data(3), max_epochs=1)
        else:
            ech.evaluate(unit, _data(3))
    except RanksDisagreeError as error:
        return str(error)
    return "no error"


@pytest.mark.full
@pytest.mark.parametrize("entry", ["fit", "evaluate"])
def test_evaluations_that_mix_blocks_are_refused(ranks: Ranks, entry: str) -> None:
    for said in ranks(2, _evaluated, "fsdp", entry):
        assert "as call 4 of the evaluation rank 0 called blocks.3 and rank 1 called blocks.2. Its numbers are wrong" in said
    assert ranks(2, _evaluated, "ddp", entry) == ["no error"] * 2


def _dropping() -> None:
    unit = Regression(module=Paths().double(), layout="fsdp")
    unit.module.layerdrop = 0.1
    ech.train(unit, _data(1), max_epochs=1)


def test_layers_that_each_rank_leaves_out_at_random_are_refused_before_training(ranks: Ranks) -> None:
    for said in ranks(2, refusal, _dropping):
        assert "Paths skips layers at random (layerdrop=0.1)" in said and "Set layerdrop=0" in said


def _messages(way: str) -> list[int]:
    sent: list[int] = []
    reduce = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype is torch.float64 and tensor.ndim == 1 and not hasattr(tensor, "device_mesh"):
            sent.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counting):
        _walked(way, "fsdp")
    return sent


@pytest.mark.full
def test_a_window_like_the_one_before_sends_nothing_more(ranks: Ranks) -> None:
    for sent in ranks(2, _messages, "same"):
        assert sent == [2, 11, 2, 11, *[2] * (UPDATES - 2)]  # the first calls, then the first gradients
    for sent in ranks(2, _messages, "drawn alike"):
        assert sent == [2, 11] * UPDATES


# --- ranks that share layers must draw alike

_SAID = "ranks that share layers (tp) must draw the same random numbers, got different ones in update "


def _with_dropout(drop: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Dropout(drop))


def _rows() -> torch.Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(1))


def _squares(module: nn.Module, data: torch.Tensor) -> torch.Tensor:
    return (module(data) - data).square().mean()


def _drawing(drop: float, drawing: int, layout: Any) -> int:
    """Somebody draws in each update's hook, for a picture: rank 0 alone, or all."""
    unit = Regression(module=_with_dropout(drop), layout=layout, accumulate=2, loss=_squares)
    draw = Hooks(on_train_step_end=lambda *_: torch.randn(1) if dist.get_rank() < drawing else None)
    ech.train(unit, ech.Loader(_rows(), 8, accumulate=2), max_epochs=1, callbacks=[draw])
    return unit.window.updates


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp", "tp=2,dp_shard=2"])
def test_a_rank_that_draws_for_itself_is_found_where_dropout_would_differ(ranks: Ranks, layout: str) -> None:
    for said in ranks(2 if layout == "tp" else 4, refusal, _drawing, 0.3, 1, layout, kind=RanksDisagreeError):
        assert said.startswith(_SAID)


@pytest.mark.parametrize(("drop", "drawing"), [(0.0, 1), (0.3, 0), (0.3, 2)])
def test_draws_that_part_nothing_are_nobodys_business(ranks: Ranks, drop: float, drawing: int) -> None:
    assert ranks(2, _drawing, drop, drawing, "tp") == [4, 4]
    if drawing == 1:
        assert ranks(2, _drawing, 0.3, drawing, "ddp") == [4, 4]


def _own_loop(drop: float) -> None:
    def draw(model: nn.Module) -> None:
        if dist.get_rank() == 0:
            torch.randn(1)

    own_loop(
        _with_dropout(drop),
        ech.Loader(_rows(), 8),
        lambda model, *data: _squares(model, torch.stack(data)),
        after=draw,
        layout="tp",
    )


@pytest.mark.full
def test_a_loop_of_ones_own_is_told_too(ranks: Ranks) -> None:
    assert all(said.startswith(_SAID) for said in ranks(2, refusal, _own_loop, 0.3, kind=RanksDisagreeError))
    assert ranks(2, _own_loop, 0.0) == [None, None]
