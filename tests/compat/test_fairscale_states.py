"""FullyShardedDataParallel: when a method may be called, experts, batch norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.compat.fairscale.nn import (
    FullyShardedDataParallel,
)
from echelon.errors import LayoutError
from tests.conftest import Ranks
from tests.kit.models import batch, net
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks


def _nested(**options: Any) -> Any:
    module: Any = net(dtype=torch.float32)
    module.first = FullyShardedDataParallel(module.first, **options)
    module.last = FullyShardedDataParallel(module.last, **options)
    return FullyShardedDataParallel(module, **options)


def _rows() -> torch.Tensor:
    return batch(4, dist.get_rank(), torch.float32)[0]


def _whole() -> None:
    model = _nested()
    model(_rows()).sum().backward()
    with model.summon_full_params():
        for too_early in (model.summon_full_params().__enter__, model.no_sync().__enter__):
            with pytest.raises((AssertionError, ValueError)):
                too_early()
        with refused(LayoutError):
            model(_rows())
    model(_rows())


@pytest.mark.full
def test_no_pass_runs_while_parameters_are_whole(ranks: Ranks) -> None:
    ranks(2, _whole)


def _experts() -> tuple[Any, ...]:
    """A layer that is another one on every rank, in a group of that rank alone."""
    group = [dist.new_group([i]) for i in range(2)][dist.get_rank()]

    def made() -> tuple[Any, torch.optim.Optimizer]:
        module: Any = net(dtype=torch.float32)
        torch.manual_seed(dist.get_rank())
        module.last = FullyShardedDataParallel(nn.Linear(8, 1), process_group=group, process_group_reduce_scatter=group)
        model = FullyShardedDataParallel(module)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = made()
    for _ in range(2):
        optimizer.zero_grad()
        model(_rows()).square().mean().backward()
        optimizer.step()
    full = model.gather_full_optim_state_dict(optimizer)
    own = optimizer.state[model.last.module.weight]["exp_avg"].clone()
    everyones: list[Any] = [full]
    dist.broadcast_object_list(everyones, 0)
    other, loaded = made()
    loaded.load_state_dict(other.get_shard_from_optim_state_dict(everyones[0]))
    assert loaded.state[other.last.module.weight]["exp_avg"].shape == (1, 8), "whole, where one rank has all"
    shared = optimizer.state[model.first.weight], loaded.state[other.first.weight]
    with pytest.raises(NotImplementedError, match="all params share one process group"):
        model.clip_grad_norm_(1.0)
    assert list(model.state_dict()) == list(net().state_dict())
    number = [name for name, _ in net().named_parameters()].index("last.weight")
    whole = None if full is None else full["state"][number]["exp_avg"]
    same = not shared[0] or torch.equal(shared[0]["exp_avg"], shared[1]["exp_avg"])
    return model.last.no_broadcast_optim_state, everyones[0]["uncollected_local_ids"], whole, own.cpu(), same


def test_the_optimizer_state_of_experts(ranks: Ranks) -> None:
    first, second = ranks(2, _experts)
    assert first[:2] == second[:2] == (True, [1]) and first[4] and second[4]
    assert second[2] is None and torch.equal(first[2].flatten(), first[3].flatten())
    assert not torch.equal(first[3], second[3])


def _half_inputs() -> torch.dtype:
    model = FullyShardedDataParallel(nn.Linear(2, 2), force_input_to_fp32=True)
    return model(torch.ones(1, 2, dtype=torch.float16)).dtype  # type: ignore[no-any-return]


def test_half_precision_inputs_are_cast(ranks: Ranks) -> None:
    assert ranks(2, _half_inputs) == [torch.float32, torch.float32]
