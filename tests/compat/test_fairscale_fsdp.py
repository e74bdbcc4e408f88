"""FairScale's FullyShardedDataParallel and its wrapping, on torch's."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import UsageError
from echelon.compat.fairscale.nn import FullyShardedDataParallel, auto_wrap, auto_wrap_bn, enable_wrap, wrap
from echelon.compat.fairscale.wrap import ConfigAutoWrap, config_auto_wrap_policy, default_auto_wrap_policy
from tests.compat.fairscale import far, loss, mine, updates
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, plain_training
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks


def _fsdp() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {
        "default": {},
        "zero2": {"reshard_after_forward": False, "bucket_cap_mb": 0, "flatten_parameters": False},
        "offload": {"cpu_offload": True},
    }.items():
        module = net(seed=dist.get_rank())  # starts from rank 0's values
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **options):
            for i, block in enumerate(module.blocks):
                module.blocks[i] = wrap(block)
            model = wrap(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for data in mine(updates(2, steps=5)):
            loss(model, data).backward()
            model.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        found[name] = {k: v.clone() for k, v in model.state_dict().items()}
        found[f"{name} instances"] = sum(isinstance(each, FullyShardedDataParallel) for each in model.modules())
    with model.summon_full_params():
        found["summoned"] = sum(p.numel() for p in model.parameters())
    full = model.gather_full_optim_state_dict(optimizer)
    found["optimizer state"] = None if full is None else full["state"]
    everyones: list[Any] = [full]
    dist.broadcast_object_list(everyones)
    own = model.get_shard_from_optim_state_dict(everyones[0])
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    again.load_state_dict(own)
    found["restored"] = max(
        float((again.state[p]["exp_avg"] - optimizer.state[p]["exp_avg"]).abs().max()) for p in model.parameters() if p.numel()
    )
    return found


@pytest.mark.full
def test_fsdp_trains_what_one_process_trains(ranks: Ranks) -> None:
    want = plain_training(updates(2, steps=5), optimizer="AdamW", clip=0.5)[0]
    first, second = ranks(2, _fsdp)
    for found in (first, second):
        for name in ("default", "zero2", "offload"):
            assert largest_difference(found[name], want) < 1e-12, name
            assert found[f"{name} instances"] == 3
        assert found["summoned"] == sum(v.numel() for v in want.values()) and found["restored"] == 0
    assert second["optimizer state"] is None
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for window in updates(2, steps=5):
        for data in window:
            (loss(module, data) / 2).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert far(first["optimizer state"], optimizer.state_dict()["state"]) < 1e-12


def _fsdp_options() -> dict[str, Any]:
    found: dict[str, Any] = {}
    low = FullyShardedDataParallel(net(dtype=torch.float32), mixed_precision=True, compute_dtype=torch.bfloat16)
    found["low"] = low(batch(2, 0, torch.float32)[0]).dtype
    on_0 = FullyShardedDataParallel(net(), state_dict_on_rank_0_only=True, state_dict_device=torch.device("cpu"))
    found["keys"] = len(on_0.state_dict())
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    found["batch norms"] = [type(m).__name__ for m in auto_wrap_bn(module)]
    return found


def test_fsdps_options_and_what_has_a_successor(ranks: Ranks) -> None:
    first, second = ranks(2, _fsdp_options)
    assert first["low"] == torch.bfloat16
    assert (first["keys"], second["keys"]) == (12, 0)
    assert first["batch norms"] == ["Linear", "FullyShardedDataParallel", "Linear"]


class Boxed(nn.Module):
    """A wrapper that remembers what it was given."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options


def _boxes(module: nn.Module) -> dict[str, Any]:
    return {n.replace("module.", "").removesuffix("module"): m.options for n, m in module.named_modules() if isinstance(m, Boxed)}


def test_wrapping_by_size_by_mark_and_by_hand() -> None:
    assert auto_wrap(net(), config_auto_wrap_policy).state_dict().keys() == net().state_dict().keys()  # nothing outside
    by_size = partial(default_auto_wrap_policy, min_num_params=100)
    with enable_wrap(by_size, wrapper_cls=Boxed, depth=1):
        assert _boxes(auto_wrap(net())) == {"blocks.0": {"depth": 1}, "blocks.1": {"depth": 1}}
        never = partial(by_size, exclude_wrap_modules={nn.Sequential})
        assert list(_boxes(auto_wrap(net(), never))) == ["blocks"]
        leaves = partial(by_size, force_leaf_modules={nn.ModuleList})
        assert list(_boxes(auto_wrap(net(), leaves))) == [""]
        module = net()
        module.first.wrapper_config = {"depth": 2}  # type: ignore[assignment]
        assert _boxes(auto_wrap(module, config_auto_wrap_policy)) == {"first": {"depth": 2}}
        assert wrap(net(), depth=3).options == {"depth": 3}
        with refused(UsageError), enable_wrap():
            pass
        assert ConfigAutoWrap.in_autowrap_context and ConfigAutoWrap.wrapper_cls is Boxed
        assert ConfigAutoWrap.kwargs == {"depth": 1}
    assert not ConfigAutoWrap.in_autowrap_context and ConfigAutoWrap.kwargs == {}
    with contextlib.suppress(KeyError), enable_wrap(wrapper_cls=Boxed):
        raise KeyError
    assert not isinstance(wrap(net()), Boxed)
