"""`echelon plan` of scripts that make their modules parallel by hand: as they stand, and under no other layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.plans import Command, planned

WIDTH, RANKS = 128, 4
PARAMETERS = 2 * (WIDTH * WIDTH + WIDTH)
HEAD = f"""
import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import echelon as ech

device = ech.init_from_env()
devices = [device.index] if device.type == "cuda" else None
net = nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.BatchNorm1d({WIDTH}, affine=False), nn.Linear({WIDTH}, {WIDTH})).to(device)
loader = ech.Loader(torch.utils.data.TensorDataset(torch.randn(64, {WIDTH})), global_batch=16)
"""

# A step of the optimizer comes every third step, and the step fetches its own batches.
ACCUMULATES = """
class Unit(ech.TrainUnit):
    def __init__(self):
        super().__init__()
        self.net = DistributedDataParallel(net, devices, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def train_step(self, state, data: Iterator[list[torch.Tensor]]):
        self.net(next(data)[0].to(device)).square().mean().backward()
        if self.train_progress.num_steps_completed % 3 == 2:
            self.optimizer.step()
            self.optimizer.zero_grad()

ech.train(Unit(), loader, max_epochs=9)
"""

SEVERAL = """
class Unit(ech.TrainUnit):
    def __init__(self):
        super().__init__()
        self.first, self.second = fully_shard(net[0]), fully_shard(net[2])
        self.of_first, self.of_second = torch.optim.Adam(self.first.parameters()), torch.optim.Adam(self.second.parameters())

    def train_step(self, state, data):
        for optimizer in (self.of_first, self.of_second):
            loss = self.second(self.first(data[0].to(device))).square().mean()
            loss.backward()
            optimizer.step()
            self.first.zero_grad()
            self.second.zero_grad()
        return loss.item()

ech.train(Unit(), loader, max_epochs=1)
"""

LOOP = """
model, optimizer, loader = ech.prepare(DistributedDataParallel(net, devices), torch.optim.AdamW(net.parameters()), loader)
for epoch in ech.epochs(loader, 1):
    for (x,) in loader:
        with ech.window(model) as window:
            window.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def plan(echelon_command: Command, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def run(script: str, *options: str) -> list[dict[str, Any]]:
        asked = ("--gpus", str(RANKS), "--device", "h100-sxm", *options)
        return list(planned(echelon_command, tmp_path, HEAD + script, *asked).values())

    return run


def test_an_update_ends_with_a_step_of_the_optimizer(plan: Callable[..., list[dict[str, Any]]]) -> None:
    (found,) = plan(ACCUMULATES)
    assert (found["layout"], found["by_hand"], found["model"], found["parameters"]) == ("ddp", True, "Sequential", PARAMETERS)
    assert (found["micro_batches"], found["samples"]) == (3, 3 * 16) and found["seconds"] > 0
    kinds = found["by_kind"]
    assert all(4 * PARAMETERS <= kinds[each] < 4 * PARAMETERS + 4096 for each in ("parameters", "gradients", "optimizer"))
    assert "communication" not in kinds, "gradients are views of the buckets"


def test_modules_that_are_sharded_by_hand_are_planned_together(plan: Callable[..., list[dict[str, Any]]]) -> None:
    (found,) = plan(SEVERAL)
    assert (found["layout"], found["parameters"], found["read"]) == ("fsdp", PARAMETERS, 1)
    assert 4 * PARAMETERS / RANKS <= found["by_kind"]["parameters"] < 4 * PARAMETERS / RANKS + 4096


def test_a_wrapped_model_of_a_loop_has_its_own_layout_alone(plan: Callable[..., list[dict[str, Any]]]) -> None:
    own, asked = plan(LOOP, "--layout", "fsdp")
    assert (own["layout"], own["by_hand"]) == ("ddp", True) and own["by_kind"]["communication"] >= 4 * PARAMETERS
    assert asked["layout"] == "fsdp" and "got ddp by hand" in asked["why"]


def test_networks_of_a_loop_are_counted_together(plan: Callable[..., list[dict[str, Any]]]) -> None:
    """The latest alone was what a plan said, and what a search took for the whole."""
    of_two = "ech.prepare(net[0], net[2], *(torch.optim.SGD(net[i].parameters(), lr=0.1) for i in (0, 2)), loader)"
    loop = """
first, second, one, other, loader = OF_TWO
for (x,) in loader:
    with ech.window(first, second) as window:
        window.backward(second(first(x)).square().mean())
        one.step(), other.step()
        one.zero_grad(), other.zero_grad()
"""
    (found,) = plan(loop.replace("OF_TWO", of_two), "--only", "fsdp")
    assert (found["model"], found["parameters"], found["why"]) == ("Linear, Linear", PARAMETERS, "")


def test_gradients_that_a_loop_clips_by_itself_are_there(plan: Callable[..., list[dict[str, Any]]]) -> None:
    """A look at their values said that they had been dropped in the middle of the update."""
    clips = "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n            optimizer.step()"
    script = LOOP.replace("            optimizer.step()", clips).replace("DistributedDataParallel(net, devices)", "net")
    (found,) = plan(script.replace("loader)", "loader, accumulate=2)", 1), "--only", "ddp")
    assert (found["why"], found["micro_batches"]) == ("", 2)


def test_what_flattens_parameters_is_refused_by_name(plan: Callable[..., list[dict[str, Any]]]) -> None:
    (found,) = plan(
        "from torch.distributed.fsdp import FullyShardedDataParallel\nFullyShardedDataParallel(net, device_id=device)\n"
    )
    assert "got a Sequential that FullyShardedDataParallel flattens" in found["why"]
