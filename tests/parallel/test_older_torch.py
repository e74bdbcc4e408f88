"""Options that an older torch spells otherwise, or lacks: torch 2.11 against 2.13, shown with constructors of both shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.parallel.fsdp.units import unsplittable
from echelon.parallel.older_torch import ddp_options


def of_2_11(module: Any, device_ids: Any = None, *, broadcast_buffers: bool = True, init_sync: bool = True) -> None: ...


def of_2_13(
    module: Any, *, broadcast_buffers: bool = True, forward_sync_buffers: bool = True, batched_grad_copy: bool = False
) -> None: ...


NEWER = {"forward_sync_buffers": False, "batched_grad_copy": True}
EVERYWHERE = {"broadcast_buffers": False, "bucket_cap_mb": 25, "static_graph": True}


@pytest.mark.parametrize(
    ("constructor", "given", "passed"),
    [
        (of_2_13, NEWER, NEWER),
        (of_2_11, {"forward_sync_buffers": False, "init_sync": False}, {"broadcast_buffers": False, "init_sync": False}),
        (of_2_11, {"batched_grad_copy": False}, {}),
        (of_2_11, {"batched_grad_copy": None}, {}),
        (DistributedDataParallel, EVERYWHERE, EVERYWHERE),  # the installed torch
    ],
)
def test_an_option_is_passed_on_where_torch_has_it(constructor: Any, given: dict[str, Any], passed: dict[str, Any]) -> None:
    """By the name that it has there, or left out if it asks for nothing."""
    assert ddp_options(constructor, given) == passed


@pytest.mark.parametrize(("version", "whole"), [("2.11.0+cpu", True), ("2.12.1", True), ("2.13.0", False), ("2.15.0", False)])
def test_an_older_torch_does_not_split_integers(monkeypatch: pytest.MonkeyPatch, version: str, whole: bool) -> None:
    """`fully_shard` of torch 2.11 makes a parameter with a gradient of every shard, which integers cannot have."""
    module = nn.Linear(2, 2)
    module.codes = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    assert unsplittable(module) == ({module.codes} if whole else set())
