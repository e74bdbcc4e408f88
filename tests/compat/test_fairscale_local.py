"""FairScale's FullyShardedDataParallel as its programs look at it: local states, orders of passes, shared weights, experts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError, NotHereError
from echelon.compat.fairscale.nn import FullyShardedDataParallel
from tests.compat.fairscale import loss
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.inner = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.inner(self.norm(self.first(x))))
        return out


def _nested(**options: Any) -> FullyShardedDataParallel:
    module: Any = Normed()
    module.inner = FullyShardedDataParallel(module.inner, **options)
    return FullyShardedDataParallel(module, **options)


def _x(update: int = 0) -> torch.Tensor:
    return batch(4, 10 * update + dist.get_rank(), torch.float32)[0]


LOW = {"mixed_precision": True, "compute_dtype": torch.bfloat16}
OPTIONS: list[dict[str, Any]] = [{}, {"flatten_parameters": False}, LOW, {"reshard_after_forward": False}]


def _local() -> list[Any]:
    found = []
    for options in OPTIONS:
        model = _nested(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(_x()).float().sum().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            before = model(_x())
        local = {name: tensor.clone() for name, tensor in model.local_state_dict().items()}
        whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        everyones: list[Any] = [None, None]
        dist.all_gather_object(everyones, (local, model.local_metadata_dict()))
        for parameter in model.parameters():
            parameter.data.zero_()
        assert model.load_local_state_dict(local).missing_keys == []
        with torch.no_grad():
            assert torch.equal(model(_x()), before)
        first = next(iter(local))
        for broken in (
            {k: v for k, v in local.items() if k != first},
            {**local, first: torch.cat([local[first], torch.zeros(1)])},
            {**local, "x": before},
        ):
            with pytest.raises(RuntimeError, match="in loading state_dict"):
                model.load_local_state_dict(broken)
        assert model.load_local_state_dict({}, strict=False).missing_keys == list(local)
        consolidated = FullyShardedDataParallel.consolidate_shard_weights(*map(list, zip(*everyones, strict=True)))
        found.append((list(local), whole, consolidated))
    tied: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    model = FullyShardedDataParallel(tied)
    dist.all_gather_object(everyones, (model.local_state_dict(), model.local_metadata_dict()))
    found.append((["0.weight"], model.state_dict(), model.consolidate_shard_weights(*map(list, zip(*everyones, strict=True)))))
    return found


@pytest.mark.full
def test_local_state_dicts_come_back_and_make_the_whole(ranks: Ranks) -> None:
    for everyone in ranks(2, _local):
        for options, (keys, whole, consolidated) in zip([*OPTIONS, {}], everyone, strict=True):
            assert not options or "first.weight" in keys
            assert consolidated.keys() == whole.keys()
            weights = [{k: v for k, v in each.items() if "running" not in k} for each in (consolidated, whole)]
            assert largest_difference(*weights) == 0  # of buffers, rank 0's


def _shared() -> list[str]:
    """One of two layers with one weight is wrapped, then the other, or what is around them."""
    said = []
    for wrap_around in (False, True):
        tied: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight = tied[0].weight
        tied[0] = FullyShardedDataParallel(tied[0])
        with refused(LayoutError) as error:
            FullyShardedDataParallel(tied if wrap_around else tied[1])
        said.append(str(error.value))
    return said


def test_weights_that_wrappers_would_share_are_refused(ranks: Ranks) -> None:
    for said in ranks(2, _shared):
        assert [text.split(":")[0] for text in said] == ["weight", "1.weight"]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.used(x))
        return out


def _unused() -> list[Any]:
    found = []
    for wrapped in (True, False):
        module: Any = Unused()
        if wrapped:
            module.used, module.unused = FullyShardedDataParallel(module.used), FullyShardedDataParallel(module.unused)
        model = FullyShardedDataParallel(module)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        loss(model, batch(4, dist.get_rank(), torch.float32)).backward()
        optimizer.step()
        full = model.gather_full_optim_state_dict(optimizer)
        everyones = [full]
        dist.broadcast_object_list(everyones)
        optimizer.load_state_dict(model.get_shard_from_optim_state_dict(everyones[0]))  # type: ignore[arg-type]
        found.append(full and (sorted(full["state"]), full["param_id_map"], full["state"][0]["exp_avg"]))
    return found


def test_optimizer_states_of_models_with_unused_parameters(ranks: Ranks) -> None:
    first, second = ranks(2, _unused)
    assert second == [None, None]
    (numbers, owners, mean), (_, _, other) = first
    assert numbers == [0, 1, 4, 5] and owners == {0: 1, 1: 1, 2: None, 3: None, 4: 0, 5: 0}
    assert mean.shape == (4, 4) and torch.allclose(mean, other)


def _left_out() -> None:
    model: Any = _nested()
    for use in (
        lambda: pickle.dumps(model),
        lambda: copy.deepcopy(model),
        model.reset_parameters,
        lambda: model.append_shared_param(model.last.weight),
        lambda: model.set_gradient_divide_factors(4.0, 0.5, True),
        lambda: FullyShardedDataParallel(nn.Linear(1, 1), gradient_predivide_factor=1.0),
    ):
        with refused(NotHereError):
            use()
    model(_x()).sum().backward()
    with refused(LayoutError):
        model.inner.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="no_sync"), model.inner.no_sync():
        pass


def test_what_is_left_out_says_what_to_take(ranks: Ranks) -> None:
    ranks(2, _left_out)


def _whole() -> None:
    model = _nested()
    model(_x()).sum().backward()
    with model.summon_full_params():
        for too_early in (model.summon_full_params().__enter__, model.no_sync().__enter__):
            with pytest.raises((AssertionError, ValueError)):
                too_early()
        with refused(LayoutError):
            model(_x())
    model(_x())


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
        model(_x()).square().mean().backward()
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
