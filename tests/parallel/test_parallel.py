"""Layouts as users meet them: which blocks are sharded, modules prepared for one's own unit, options, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.parallel import LAYOUTS
from echelon.parallel.recipe.blocks import blocks_to_shard
from tests.conftest import Ranks
from tests.kit.averaged import Averaged
from tests.kit.models import batch, largest_difference, net, plain_training, whole
from tests.kit.refusals import refusal
from tests.kit.units import KINDS, Hooks, Own, Regression

pytestmark = pytest.mark.standing_ranks


def _prepared(how: str) -> dict[str, torch.Tensor]:
    device = ech.init_from_env()
    prepare: Any = {"ddp": ech.layouts.prepare_ddp, "fsdp": ech.layouts.prepare_fsdp}.get(how)
    module = prepare(net(), device) if prepare else ech.layouts.prepare_module(net(), device, layout="ddp")
    assert isinstance(module, nn.parallel.DistributedDataParallel) == (how != "fsdp")
    ech.train(Own(module), [batch(4, 10 * dist.get_rank() + i) for i in range(3)], max_epochs=1)
    return whole(module)


@pytest.mark.full
@pytest.mark.parametrize("how", ["ddp", "fsdp", "module"])
def test_ones_own_unit_trains_on_a_prepared_module(ranks: Ranks, how: str) -> None:
    want, _, _ = plain_training([[batch(4, i), batch(4, 10 + i)] for i in range(3)])
    assert largest_difference(ranks(2, _prepared, how)[0], want) < 1e-12


def test_repeated_blocks_are_sharded_and_single_layers_are_not() -> None:
    assert [name for name, _ in blocks_to_shard(net())] == ["blocks.0", "blocks.1"]
    assert blocks_to_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []  # layers alone: a collective each is dear
    nested = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([net(), net()]))
    assert [name for name, _ in blocks_to_shard(nested)] == ["1.0", "1.1"]  # outermost
    lists = nn.ModuleList(nn.ModuleList(net().blocks) for _ in range(2))  # stages of blocks, as in a funnel
    assert [name for name, _ in blocks_to_shard(lists)] == ["0.0", "0.1", "1.0", "1.1"]
    pairs = [nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), net(), nn.Linear(2, 2)]) for _ in range(2)]  # a layer is a list
    assert [name for name, _ in blocks_to_shard(nn.ModuleList(pairs))] == ["0.0", "0.1", "1.0", "1.1"]
    layer = net()
    twice = nn.ModuleList(nn.ModuleList([layer, net()]) for _ in range(2))
    assert [name for name, _ in blocks_to_shard(twice)] == ["0.0", "0.1", "1.1"]


def _chosen_blocks(blocks: Any) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    unit = Regression(layout=ech.FSDPStrategy(blocks=blocks))
    return [name for name, m in unit.module.named_modules() if isinstance(m, FSDPModule)]


def test_blocks_can_be_chosen_by_name_and_class(ranks: Ranks) -> None:
    assert ranks(2, _chosen_blocks, ["blocks.1", "last"])[0] == ["", "blocks.1", "last"]
    assert ranks(2, _chosen_blocks, [nn.Sequential])[0] == ["", "blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ech.FSDPStrategy(blocks=["blocks.7"]), "no submodule named 'blocks.7'"),
        (
            ech.FSDPStrategy(reshard_after_forward={"block.*": False}),
            "reshard_after_forward has 'block.*', which matches no module that is sharded one by one: blocks.0, blocks.1.",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(ranks: Ranks, layout: Any, message: str) -> None:
    assert all(message in text for text in ranks(2, lambda: refusal(Regression, layout=layout)))


# Of each way, what is trained after so many micro-batches, in windows of two: from one of its keys to the next.
FREEZING: dict[str, dict[int, list[str]]] = {
    # Gradual unfreezing, as in fine-tuning.
    "all but one": {0: ["blocks", "last"], 4: ["first", "blocks", "last"]},
    "all": {0: ["last"], 4: ["first", "blocks", "last"]},
    # In the middle of a window, at its end, and trained again.
    "later": {
        0: ["first", "blocks", "last"],
        2: ["first", "blocks.0", "last"],
        3: ["blocks", "last"],
        6: ["first", "blocks", "last"],
    },
}


def _freezes(module: nn.Module, way: str, step: int) -> None:
    for name, parameter in module.named_parameters() if step in FREEZING[way] else ():
        parameter.requires_grad_(name.startswith(tuple(FREEZING[way][step])))


def _trained_in_part(layout: str, way: str) -> dict[str, torch.Tensor]:
    module = net()
    _freezes(module, way, 0)
    unit = Regression(module=module, layout=layout, accumulate=2)
    freezes = Hooks(on_train_step_end=lambda _, u: _freezes(u.prepared.unwrapped, way, u.train_progress.num_steps_completed))
    ech.train(unit, [batch(4, 10 * i + dist.get_rank()) for i in range(8)], max_epochs=1, callbacks=[freezes])
    return whole(unit.prepared)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "way"), [("ddp", "all but one"), ("ddp", "all"), ("fsdp", "all but one"), *((each, "later") for each in KINDS)]
)
def test_layers_that_are_frozen_and_unfrozen_during_training_are_averaged_while_they_train(
    ranks: Ranks, layout: str, way: str
) -> None:
    module = net()
    _freezes(module, way, 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(8):
        (x, y), (more_x, more_y) = batch(4, 10 * step), batch(4, 10 * step + 1)
        (nn.functional.mse_loss(module(torch.cat([x, more_x])), torch.cat([y, more_y])) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        _freezes(module, way, step + 1)
    for trained in ranks(2, _trained_in_part, layout, way):
        assert largest_difference(trained, whole(module)) < 1e-12


# --- a layout of the future is one file and one line: what it needs is in the seam

ROWS_OF_RANKS = [(4, 3), (2, 4), (3, 5), (5, 3), (4, 1)]  # of each micro-batch, by rank; the last of three updates is short


def _averaged() -> tuple[dict[str, torch.Tensor], list[float], float]:
    LAYOUTS["averaged"] = Averaged  # the one line
    unit, rank = Regression(layout="averaged", accumulate=2, clip_grad_norm=0.3), dist.get_rank()
    ech.train(unit, [batch(rows[rank], 10 * i + rank) for i, rows in enumerate(ROWS_OF_RANKS)], max_epochs=1)
    norms = list(unit.norms)
    ech.evaluate(unit, [batch(4 - rank, 100 + rank)])
    return whole(unit.module), norms, unit.eval_loss


def test_a_layout_of_ones_own_trains_and_evaluates_as_one_process_does(ranks: Ranks) -> None:
    made = [[batch(rows, 10 * i + rank) for rank, rows in enumerate(both)] for i, both in enumerate(ROWS_OF_RANKS)]
    windows = [[each for micro in made[start : start + 2] for each in micro] for start in (0, 2, 4)]
    want, _, norms = plain_training(windows, clip=0.3)
    alone = Regression()
    alone.module.load_state_dict(want)
    ech.evaluate(alone, [batch(4, 100), batch(3, 101)])
    for got, seen, evaluated in ranks(2, _averaged):
        assert largest_difference(got, want) < 1e-12 and seen == pytest.approx(norms, rel=1e-11)
        assert evaluated == pytest.approx(alone.eval_loss, rel=1e-11)
