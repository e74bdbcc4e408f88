"""Options that an older torch spells otherwise, or lacks: torch 2.11 against 2.13, shown with constructors of both shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.common.errors import UsageError
from echelon.parallel.fsdp.sharding import unsplittable
from echelon.parallel.older_torch import ddp_options


def of_2_11(module: Any, device_ids: Any = None, *, broadcast_buffers: bool = True, init_sync: bool = True) -> None: ...


def of_2_13(
    module: Any, *, broadcast_buffers: bool = True, forward_sync_buffers: bool = True, batched_grad_copy: bool = False
) -> None: ...


def test_an_option_is_passed_on_where_torch_has_it() -> None:
    given = {"forward_sync_buffers": False, "batched_grad_copy": True}
    assert ddp_options(of_2_13, given) == given


def test_buffers_are_synchronised_by_the_older_name() -> None:
    assert ddp_options(of_2_11, {"forward_sync_buffers": False, "init_sync": False}) == {
        "broadcast_buffers": False,
        "init_sync": False,
    }


@pytest.mark.parametrize("value", [False, None])
def test_an_option_that_asks_for_nothing_is_left_out(value: Any) -> None:
    assert ddp_options(of_2_11, {"batched_grad_copy": value}) == {}


def test_an_option_that_torch_lacks_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"DDPStrategy\(batched_grad_copy=True\) needs a newer torch"):
        ddp_options(of_2_11, {"batched_grad_copy": True})


def test_the_installed_torch_takes_what_every_version_has() -> None:
    given = {"broadcast_buffers": False, "bucket_cap_mb": 25, "static_graph": True}
    assert ddp_options(DistributedDataParallel, given) == given


@pytest.mark.parametrize(("version", "whole"), [("2.11.0+cpu", True), ("2.12.1", True), ("2.13.0", False), ("2.15.0", False)])
def test_an_older_torch_does_not_split_integers(monkeypatch: pytest.MonkeyPatch, version: str, whole: bool) -> None:
    """`fully_shard` of torch 2.11 makes a parameter with a gradient of every shard, which integers cannot have."""
    module = nn.Linear(2, 2)
    module.codes = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    assert unsplittable(module) == ({module.codes} if whole else set())
