"""What an optimizer keeps besides the state of its parameters is there again in a resumed run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import CheckpointError
from echelon.parallel.state import optimizer_state
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import step
from tests.kit.refusals import refused
from tests.kit.saving import goes_on, of_all
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


class ByKey(torch.optim.SGD):
    """Its rate falls with a count of its own, which lies in its state under a name."""

    def count(self) -> float:
        self.state["steps"] = self.state["steps"] + 1 if "steps" in self.state else 1
        return float(self.state["steps"])

    def step(self, closure: Any = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        count = self.count()
        for group in self.param_groups:
            group["lr"] /= count
        super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


class ByTensors(ByKey):
    """Several counts, deep in its state."""

    def count(self) -> float:
        held = self.state["held"]
        if not held:
            held |= {"counts": [torch.zeros(()), (torch.zeros(2, dtype=torch.int64), "name")]}
        held["counts"][0] += 1
        held["counts"][1][0].add_(1)
        return float(held["counts"][0] + held["counts"][1][0].sum()) / 3


class ByOverride(ByKey):
    """Its `state_dict` has a further key, without which it cannot be loaded."""

    steps = 0

    def count(self) -> float:
        self.steps += 1
        return self.steps

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        given = dict(state_dict)
        self.steps = given.pop("steps")
        super().load_state_dict(given)


class ByHooks(ByKey):
    """The same by hooks."""

    steps = 0
    count = ByOverride.count

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_state_dict_post_hook(lambda optimizer, state: {**state, "steps": self.steps})
        self.register_load_state_dict_pre_hook(lambda optimizer, state: setattr(self, "steps", state["steps"]))


class Around(torch.optim.Optimizer):
    """Steps by another one, whose groups are its own; as timm's Lookahead it leaves `Optimizer.__init__` out."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        self.base = torch.optim.SGD(parameters, **options)
        self.param_groups, self.defaults, self.state = self.base.param_groups, self.base.defaults, defaultdict(dict)

    def step(self, closure: Any = None) -> Any:
        self.both_steps()

    def both_steps(self) -> None:
        self.base.step()
        for parameter in (p for group in self.base.param_groups for p in group["params"] if p.grad is not None):
            slow = self.base.state[parameter].setdefault("slow", parameter.detach().clone())
            parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class Over(torch.optim.Optimizer):
    """The same as SAM does it, with a state of its own besides."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, options)
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        self.base.step()
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))


class Divided(torch.optim.Optimizer):
    """Each rank keeps the momentum of its part of all parameters and steps it, as nanochat's does; some parameters are left out
    by a function among the options, as in LARS."""

    def __init__(self, parameters: Any, lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "left_out": lambda p: p.ndim == 1})

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        parameters = [p for p in group["params"] if not group["left_out"](p)]
        gradients = torch.cat([p.grad.flatten() for p in parameters])
        size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        mine = torch.nn.functional.pad(gradients, (0, -len(gradients) % size)).chunk(size)[rank]
        momentum = self.state[parameters[0]].setdefault("momentum", torch.zeros_like(mine))
        momentum.mul_(group["momentum"]).add_(mine)
        parts = [momentum.clone() for _ in range(size)]
        if size > 1:
            dist.all_gather(parts, momentum)
        steps = torch.cat(parts)[: len(gradients)].split([p.numel() for p in parameters])
        for parameter, change in zip(parameters, steps, strict=True):
            parameter.data.sub_(change.view_as(parameter), alpha=group["lr"])


class Unlike(torch.optim.SGD):
    """Keeps what no checkpoint can give back."""

    how = ""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.how == "factors":
            for state in self.state.values():
                state["factors"] = [torch.ones(2), torch.ones(3)]

    def state_dict(self) -> Any:
        state = super().state_dict()
        if self.how == "a number":
            self.state[0] = {}  # type: ignore[index]
        parameters = [p for group in self.param_groups for p in group["params"]]
        mine = {str(i): p.detach() for i, p in enumerate(parameters) if p in self.state}
        return {
            "list": [state],
            "by tensors": {**state, "slow": dict.fromkeys(parameters, 1.0)},
            "parts": {**state, "slow": [p.detach() for p in parameters]},
            "owned": {**state, "slow": mine},
            "function": {**state, "made by": len},
        }.get(self.how, state)


KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "key": ByKey,
    "tensors": ByTensors,
    "override": ByOverride,
    "hooks": ByHooks,
    "around": Around,
    "over": Over,
    "divided": Divided,
    "plain": torch.optim.SGD,
}


class Counting(Regression):
    def __init__(self, which: str, layout: str) -> None:
        self.which = which
        if layout == "fsdp1":  # wrapped by hand
            super().__init__(module=FSDP(net(), device_id=torch.device("cpu"), use_orig_params=True))
        else:
            super().__init__(module=net(), layout=layout)

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        kind = KINDS.get(self.which) or type("Unlike", (Unlike,), {"how": self.which})
        return kind(module.parameters(), lr=0.1, momentum=0.9), None  # type: ignore[call-arg]


def _run(folder: Path | None, kind: str, layout: str, until: int) -> dict[str, torch.Tensor]:
    unit = goes_on(folder, Counting(kind, layout), until, batch=12)
    return of_all(unit)


def _each(folder: Path | None, kinds: list[str], layout: str, until: int) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: _run(folder and folder / kind, kind, layout, until) for kind in kinds}


PAIRS = [
    pytest.param((1, "none"), (1, "none"), id="alone"),
    pytest.param((2, "zero1"), (3, "fsdp"), id="other ranks"),
    pytest.param((2, "pp=2"), (2, "zero1"), id="of stages"),
    pytest.param((2, "ddp"), (2, "pp=2"), id="to stages", marks=pytest.mark.full),
    pytest.param((2, "fsdp1"), (2, "fsdp1"), id="of older shards", marks=pytest.mark.full),
    pytest.param((2, "fsdp"), (1, "none"), id="of shards", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("first", "then"), PAIRS)
def test_what_belongs_to_no_parameter_goes_on(ranks: Ranks, tmp_path: Path, first: Any, then: Any) -> None:
    kinds = ["key", "tensors", "override", "hooks", "around", *([] if first[1] == "fsdp1" else ["over"])]  # torch saves that
    want = ranks(1, _each, None, kinds, "none", 9)[0]
    ranks(first[0], _each, tmp_path, kinds, first[1], 4)
    parts = ranks(then[0], _each, tmp_path, kinds, then[1], 9)
    got = {kind: {name: value for part in parts for name, value in part[kind].items()} for kind in kinds}
    assert {kind: largest_difference(got[kind], want[kind]) for kind in kinds} == pytest.approx(
        dict.fromkeys(kinds, 0), abs=1e-12
    )


def _in_a_loop(folder: Path | None, epochs: int, scheduled: bool) -> tuple[dict[str, torch.Tensor], int]:
    module, (x, y) = net(), batch(12, 0)
    # A class of its own each time, since the first run gives a class its hooks for good.
    kind = type("Around", (Around,), {"step": lambda optimizer, closure=None: optimizer.both_steps()})
    optimizer: Any = kind(module.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=4)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2)] if scheduled else []  # it wraps the class's `step`
    checkpoints = folder and ech.Checkpoints(folder, every="epoch")
    model, optimizer, loader, *schedulers = ech.prepare(
        module, optimizer, loader, *schedulers, layout="zero1", checkpoints=checkpoints
    )
    for _ in ech.epochs(loader, epochs):
        for data in loader:
            step(model, optimizer, *data)
        for scheduler in schedulers:
            scheduler.step()
    return whole(model), len(optimizer.base.state)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_loop_divides_an_optimizer_that_calls_no_hooks(ranks: Ranks, tmp_path: Path, scheduled: bool) -> None:
    """Every rank stepped all parameters, and a restart gave each rank the state of its own part only, and no others' steps."""
    want = ranks(2, _in_a_loop, None, 3, scheduled)
    assert sum(held for _, held in want) == len(want[0][0])
    ranks(2, _in_a_loop, tmp_path, 1, scheduled)
    for got, _ in ranks(2, _in_a_loop, tmp_path, 3, scheduled):
        assert largest_difference(got, want[0][0]) == 0


def test_what_each_rank_keeps_for_itself_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    want = ranks(1, _run, None, "divided", "none", 9)[0]
    ranks(2, _run, tmp_path, "divided", "ddp", 4)
    for got in ranks(2, _run, tmp_path, "divided", "ddp", 9):
        assert largest_difference(got, want) < 1e-12


def test_what_an_earlier_echelon_did_not_save_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_state, "further_state", lambda optimizer, **options: {})
        _run(tmp_path, "override", "none", 4)
    assert _run(tmp_path, "override", "none", 9)


def _refusal(folder: Path, kind: str, layout: str) -> None:
    with refused(CheckpointError):
        _run(folder, kind, layout, 4)


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        *((how, "none") for how in ("list", "by tensors", "a number", "function")),
        *(("parts", "fsdp"), ("owned", "zero1"), ("factors", "zero1"), ("over", "fsdp1")),
    ],
)
def test_what_cannot_be_kept_is_refused_at_the_first_save(ranks: Ranks, tmp_path: Path, how: str, layout: str) -> None:
    """So is what each rank has of its own parameters."""
    _refusal(tmp_path, how, layout) if layout == "none" else ranks(2, _refusal, tmp_path, how, layout)
