"""Pipelines in a plan: traced as a rank of each stage, and simulated together."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import echelon as ech
from echelon.common.errors import PlanError
from echelon.planner.devices import device_named
from echelon.planner.links import Links
from echelon.planner.timeline import Message, Timeline, run_together
from tests.kit.refusals import refused

LINKS = Links(device_named("h100-sxm"), 8)
WIDTH, BLOCKS, ROWS = 64, 4, 32


def _timeline(stage: int, stages: int, micro_batches: int) -> Timeline:
    """A stage whose passes take a second forward and two backward, in the order of 1F1B."""
    made, now, ahead = Timeline(), 0.0, min(stages - stage - 1, micro_batches)

    def forward(number: int) -> None:
        nonlocal now
        if stage:
            made.messages.append(Message(now, False, stage - 1, number, 0))
        now += 1
        if stage < stages - 1:
            made.messages.append(Message(now, True, stage + 1, number, 0))

    def backward(number: int) -> None:
        nonlocal now
        if stage < stages - 1:
            made.messages.append(Message(now, False, stage + 1, number, 0))
        now += 2
        if stage:
            made.messages.append(Message(now, True, stage - 1, number, 0))

    for number in range(ahead):
        forward(number)
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            forward(number + ahead)
        backward(number)
    made.seconds = made.passes = now
    return made


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 9), (8, 8)])
def test_a_pipeline_waits_for_its_first_and_last_micro_batch(stages: int, micro_batches: int) -> None:
    """(m + p - 1) forward and backward passes for m micro-batches in p stages (Narayanan et al., arXiv 2104.04473)."""
    timelines = {stage: _timeline(stage, stages, micro_batches) for stage in range(stages)}
    assert run_together(timelines, LINKS) == pytest.approx(3 * (micro_batches + stages - 1), rel=1e-4)


def test_a_message_that_nobody_sends_is_named() -> None:
    with refused(PlanError):
        run_together({0: Timeline(messages=[Message(0.0, False, 1, 0, 8)]), 1: Timeline()}, LINKS)


UNIT = f"""
import sys
import torch
import echelon as ech

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear({WIDTH}, 4 * {WIDTH}), torch.nn.Linear(4 * {WIDTH}, {WIDTH})
        self.register_buffer("scale", torch.linspace(0.5, 1, {WIDTH}))

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x))) * self.scale

class Fit(ech.AutoUnit):
    def compute_loss(self, state, data):
        return torch.nn.functional.mse_loss(self.module(data[0]), data[1]), None

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.AdamW(module.parameters()), None

if __name__ == "__main__":
    ech.init_from_env()
    blocks = torch.nn.Sequential(*(Block() for _ in range({BLOCKS})))
    data = torch.utils.data.TensorDataset(torch.randn(256, {WIDTH}), torch.randn(256, {WIDTH}))
    loader = ech.Loader(data, global_batch={ROWS}, accumulate=int(sys.argv[1]))
    ech.train(Fit(module=blocks, layout="ddp"), loader, max_updates=3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(UNIT)
    return file


Command = Callable[..., subprocess.CompletedProcess[str]]


def _planned(echelon_command: Command, script: Path, *words: str, accumulate: int) -> dict[str, Any]:
    done = echelon_command("plan", "--json", *words, str(script), str(accumulate))
    assert done.stdout, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)["layouts"][0]
    assert not made["why"], made
    return made


def test_a_stage_holds_its_own_layers_and_sends_what_lies_between(echelon_command: Command, script: Path) -> None:
    """Four blocks on two ranks; of each micro-batch its activations go one way and their gradients the other."""
    whole = _planned(echelon_command, script, "--gpus", "1", "--only", "yours", accumulate=4)
    half = _planned(echelon_command, script, "--gpus", "2", "--only", "pp=2", accumulate=4)
    parameters = sum(4 * (WIDTH * WIDTH * 8 + WIDTH * 5) for _ in range(BLOCKS))
    assert whole["by_kind"]["parameters"] == pytest.approx(parameters, rel=0.01)  # allocations are multiples of 512 bytes
    assert half["by_kind"]["parameters"] == pytest.approx(parameters / 2, rel=0.01)
    assert half["by_kind"]["optimizer"] == pytest.approx(parameters, rel=0.1)
    products = 6 * ROWS * (BLOCKS // 2) * 2 * WIDTH * 4 * WIDTH  # forward and backward
    assert half["flops"] == products and whole["flops"] == 2 * products - 2 * ROWS * WIDTH * 4 * WIDTH  # no gradient of the data
    assert (half["samples"], half["micro_batches"], len(half["stages"])) == (ROWS, 4, 2)
    # Each stage sends ROWS x WIDTH numbers of four bytes in an update; losses and flags are a few bytes.
    assert half["sent"] == pytest.approx(ROWS * WIDTH * 4, rel=0.02)


def test_more_micro_batches_than_are_traced_leave_less_to_wait(echelon_command: Command, script: Path) -> None:
    few, many = (
        _planned(echelon_command, script, "--cluster", "1x4xh100-sxm", "--only", "pp=4", accumulate=each) for each in (4, 32)
    )
    assert few["micro_batches"] == 4 and many["micro_batches"] == 32 and many["flops"] == pytest.approx(few["flops"], rel=0.01)

    def waiting(plan: dict[str, Any]) -> float:
        return plan["waits"]["other stages"] / plan["seconds"]

    # (p - 1) / (m + p - 1), and more where the last stage, which has the loss, takes longer than the others.
    assert waiting(few) == pytest.approx(3 / 7, abs=0.1)
    assert 3 / 35 < waiting(many) < waiting(few) * 0.7


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp=2,dp_shard=2", "pp=2,tp=2"])
def test_stages_that_are_sharded_or_split_are_traced_too(echelon_command: Command, script: Path, layout: str) -> None:
    made = _planned(echelon_command, script, "--gpus", "4", "--only", layout, accumulate=2)
    parameters = sum(4 * (WIDTH * WIDTH * 8 + WIDTH * 5) for _ in range(BLOCKS))
    assert parameters // 4 <= made["by_kind"]["parameters"] <= parameters // 4 * 1.2


def test_another_precision_is_that_of_the_products(echelon_command: Command, script: Path) -> None:
    one, two = (
        _planned(echelon_command, script, "--gpus", "1", "--only", "yours", *words, accumulate=1)
        for words in ((), ("--precision", "bf16"))
    )
    assert (one["dtype"], two["dtype"]) == ("float32", "bfloat16") and one["flops"] == two["flops"]
    assert two["by_kind"]["parameters"] == one["by_kind"]["parameters"]  # autocast keeps them as they are


def test_two_functions_are_planned_as_a_script_is() -> None:
    found = ech.plan(_unit, _data, gpus=2, device="h100-sxm", layouts=["ddp"], goal="1M samples", price=2.0)
    assert [each.layout for each in found.layouts] == ["fsdp", "ddp"] and found.layouts[0].is_own
    assert found.best is not None and found.best.rate == max(each.rate for each in found.layouts)
    assert found.bill is not None and found.bill.updates == 1_000_000 // ROWS
    assert str(found).count("fits") == 2
    assert found.to_json()["layouts"][1]["layout"] == "ddp" and "picture" not in found.to_json()["layouts"][1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gpus": 0},
        {"gpus": 2, "nodes": 0},
        {"gpus": 2, "goal": "1 epoch"},
        {"gpus": 2, "precision": "int8"},
        {"gpus": 2, "search": True},
        {"gpus": 3, "nodes": 2},
        {"cluster": "1x8xH100", "gpus": 8},
        {"gpus": 2, "price": -1.0},
    ],
)
def test_what_plan_cannot_be_asked_is_refused(options: dict[str, Any]) -> None:
    with refused(PlanError):
        ech.plan(_unit, _data, **options)


@pytest.mark.full
def test_a_function_that_raises_is_what_could_not_be_traced() -> None:
    with refused(PlanError):
        ech.plan(_unit, _broken, gpus=2)


def _unit() -> ech.AutoUnit[object]:
    import torch

    class Fit(ech.AutoUnit[object]):
        def compute_loss(self, state: ech.State, data: object) -> tuple[torch.Tensor, None]:
            x, y = data  # type: ignore[misc]
            return torch.nn.functional.mse_loss(self.module(x), y), None

        def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
            return torch.optim.AdamW(module.parameters()), None

    return Fit(module=torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)), layout="fsdp")


def _data() -> ech.Loader:
    import torch

    return ech.Loader(torch.utils.data.TensorDataset(torch.randn(256, WIDTH), torch.randn(256, WIDTH)), global_batch=ROWS)


def _broken() -> ech.Loader:
    raise ValueError("no data here")
