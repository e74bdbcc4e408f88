"""Layouts as users meet them: which blocks are sharded, modules prepared for one's own unit, options, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.parallel.recipe.blocks import blocks_to_shard
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, plain_training, whole
from tests.kit.refusals import refusal
from tests.kit.units import Hooks, Own, Regression

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
        (ech.DDPStrategy(mixed_precision=torch.bfloat16), "AutoUnit(precision='bf16')"),
        (
            ech.FSDPStrategy(reshard_after_forward={"block.*": False}),
            "reshard_after_forward has 'block.*', which matches nothing that is sharded one by one: blocks.0, blocks.1.",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(ranks: Ranks, layout: Any, message: str) -> None:
    assert all(message in text for text in ranks(2, lambda: refusal(Regression, layout=layout)))


def _unfreezes(module: nn.Module, updates: int) -> None:
    """Gradual unfreezing, as in fine-tuning: the last layers train from the beginning, all from the second epoch on."""
    if updates in (0, 2):
        (module if updates else module.last).requires_grad_(True)


def _unfrozen(layout: str, frozen: str) -> dict[str, torch.Tensor]:
    module = net()
    module.get_submodule(frozen).requires_grad_(False)
    unit = Regression(module=module, layout=layout, accumulate=2)
    mine = [batch(4, 10 * i + dist.get_rank()) for i in range(4)]
    unfreezes = Hooks(on_train_epoch_start=lambda _, u: _unfreezes(u.prepared.unwrapped, u.window.updates))
    ech.train(unit, mine, max_epochs=2, callbacks=[unfreezes])
    return whole(unit.prepared)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "frozen"), [("ddp", "first"), ("ddp", ""), ("fsdp", "first")])
def test_layers_that_are_unfrozen_during_training_are_averaged(ranks: Ranks, layout: str, frozen: str) -> None:
    module = net()
    module.get_submodule(frozen).requires_grad_(False)
    _unfreezes(module, 0)
    windows = [[batch(4, 10 * i + r) for i in (start, start + 1) for r in range(2)] for start in (0, 2)] * 2
    want, _, _ = plain_training(windows, module=module, after=lambda module, updates: _unfreezes(module, updates))
    for trained in ranks(2, _unfrozen, layout, frozen):
        assert largest_difference(trained, want) < 1e-12


def _freezes(module: nn.Module, step: int) -> None:
    """After a step: one in the middle of a window of two, one at its end, and trained again."""
    module.get_submodule("first").requires_grad_(step not in (3, 4, 5))
    module.get_submodule("blocks.1").requires_grad_(step != 2)


def _frozen_later(layout: str) -> dict[str, torch.Tensor]:
    unit = Regression(module=net(), layout=layout, accumulate=2)
    freezes = Hooks(on_train_step_end=lambda _, unit: _freezes(unit.prepared.unwrapped, unit.train_progress.num_steps_completed))
    ech.train(unit, [batch(4, 10 * i + dist.get_rank()) for i in range(8)], max_epochs=1, callbacks=[freezes])
    return whole(unit.prepared)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp"])
def test_layers_that_are_frozen_during_training_stay_and_the_others_are_averaged(ranks: Ranks, layout: str) -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(8):
        (x, y), (more_x, more_y) = batch(4, 10 * step), batch(4, 10 * step + 1)
        (nn.functional.mse_loss(module(torch.cat([x, more_x])), torch.cat([y, more_y])) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        _freezes(module, step + 1)
    for trained in ranks(2, _frozen_later, layout):
        assert largest_difference(trained, whole(module)) < 1e-12
