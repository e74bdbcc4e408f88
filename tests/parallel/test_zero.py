"""ZeRO stage 1: each rank keeps the optimizer state of what it owns, and nobody can tell from the numbers."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader

import echelon as ech
from echelon.common.errors import RanksDisagreeError, UsageError
from echelon.parallel.state.partition import Partition
from tests.conftest import Ranks
from tests.kit.models import Batch, batch, largest_difference, net, plain_training, seeded, whole
from tests.kit.own_loops import step
from tests.kit.refusals import refusal
from tests.kit.units import Own, Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")
DATA = [[batch(4, 10 * i + r) for r in range(2)] for i in range(5)]  # by update and rank


def _mine() -> list[Batch]:
    return [both[dist.get_rank()] for both in DATA]


def _scheduled(windows: Any, module: nn.Module, optimizer: str) -> dict[str, torch.Tensor]:
    """Plain PyTorch, whose learning rate is halved every second update."""
    momentum = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(module.parameters(), lr=0.1, **momentum)
    schedule = torch.optim.lr_scheduler.StepLR(made, 2, gamma=0.5)
    return plain_training(windows, module=module, optimizer=lambda _: made, after=lambda *_: schedule.step())[0]


def _held(layout: str) -> tuple[int, int, set[str]]:
    unit = Regression(module=net(width=64), layout=layout, optimizer="AdamW")
    ech.train(unit, _mine(), max_epochs=1)
    names = {id(p): n for n, p in unit.prepared.unwrapped.named_parameters()}
    moments = [v for s in unit.optimizer.state.values() for v in s.values() if v.dim()]
    gradients = sum(p.numel() for p in unit.optimizer.state)
    return sum(m.numel() for m in moments), gradients, {names[id(p)] for p in unit.optimizer.state}


class _ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD in little: it evaluates at an average of what it trains, which `eval` puts in place, and `train` back."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = p.clone()
                p.sub_(p.grad, alpha=group["lr"])
                state["average"].lerp_(p, 1 / group["steps"])

    def train(self) -> None:
        self._swap()

    def eval(self) -> None:
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for p, state in self.state.items():
            trained = p.clone()
            p.copy_(state["average"])
            state["average"].copy_(trained)


def _evaluated(layout: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    module: Any = seeded(net)
    optimizer: Any = _ScheduleFree(module.parameters(), lr=0.1)
    rows: Any = [(x, y) for data in DATA for many in data for x, y in zip(*many, strict=True)][:24]
    module, optimizer, loader, held_out = ech.prepare(module, optimizer, DataLoader(rows, 8), DataLoader(rows, 4), layout=layout)
    seen = []
    for _ in ech.epochs(loader, 2):
        for x, y in loader:
            step(module, optimizer, x, y)
        optimizer.eval()
        with ech.evaluating(module) as evaluation:
            for x, y in held_out:
                evaluation.log("error", nn.functional.mse_loss(module(x), y))
        seen.append(float(evaluation.numbers["error"]))
        optimizer.train()
    return whole(module), seen


def test_an_optimizer_that_evaluates_elsewhere_does_so_on_all_ranks(ranks: Ranks) -> None:
    """A schedule-free one: each rank put the average in the place of what it owned, and nobody learned of it."""
    want, alone = _evaluated("none")
    for got, seen in ranks(2, _evaluated, "zero1"):
        assert largest_difference(got, want) < 1e-12 and seen == pytest.approx(alone, rel=1e-12)


@pytest.mark.full
def test_each_of_two_ranks_keeps_half_of_the_state(ranks: Ranks) -> None:
    everything, _, names = ranks(2, _held, "ddp")[0]
    (first, few, names_0), (second, rest, names_1) = ranks(2, _held, "zero1")
    assert first + second == everything and max(first, second) < 0.52 * everything
    assert first == 2 * few and second == 2 * rest
    assert names_0 | names_1 == names and not names_0 & names_1


def _looked_at(layout: str, scaled: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """A loop that clips and looks at gradients by the optimizer's groups, or keeps a scaler; its state is put back at the end."""
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled), []
    module: Any = net()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    rows: Any = [(x, y) for data in DATA for many in data for x, y in zip(*many, strict=True)][:24]
    module, optimizer, loader = ech.prepare(module, optimizer, DataLoader(rows, 8), layout=layout)
    saved = copy.deepcopy(optimizer.state_dict())
    for _ in ech.epochs(loader, 2):
        for x, y in loader:
            with ech.window(module) as window:
                window.backward(scaler.scale(nn.functional.mse_loss(module(x), y)))
                scaler.unscale_(optimizer)
                everything = [p for group in optimizer.param_groups for p in group["params"]]
                seen.append(float(nn.utils.clip_grad_norm_(everything, 0.1)))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        optimizer.load_state_dict(saved)
    return whole(module), seen


@pytest.mark.parametrize("scaled", [False, True])
def test_the_optimizers_groups_have_all_parameters_between_steps(ranks: Ranks, scaled: bool) -> None:
    want, norms = ranks(2, _looked_at, "ddp", scaled)[0]
    for got, seen in ranks(2, _looked_at, "zero1", scaled):
        assert largest_difference(got, want) < 1e-12 and seen == pytest.approx(norms, rel=1e-9)


class Shaped(nn.Module):
    """Parameters of two types, one that is channels-last and one that is not dense, frozen ones, a lone number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 2).double().to(memory_format=torch.channels_last)
        self.strided = nn.Parameter(torch.randn(4, 8, dtype=torch.float64)[:, ::2])
        self.low = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).double().requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, 4, 1, 1).expand(-1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
        x = self.frozen(self.conv(image).flatten(1)) @ self.strided
        return (self.low(x.float()).double() * self.scale).sum(1, keepdim=True)


def lone() -> nn.Module:
    """One parameter: the second of two ranks owns nothing."""
    return seeded(nn.Linear, in_features=4, out_features=1, bias=False)


MODULES: dict[str, Any] = {"Shaped": Shaped, "Lone": lone}


def _modules(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Trained; then restored in mid-way and trained on, which must be the same."""
    done = {}
    for name, module in MODULES.items():
        for optimizer in ("Adagrad", "SGD", "AdamW"):  # Adagrad's constructor makes state

            def unit(layout: str, module: Any = module, optimizer: str = optimizer) -> Regression:
                def schedule(o: Any) -> Any:
                    return torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5)

                return Regression(module=module(), layout=layout, optimizer=optimizer, schedule=schedule, step_lr_interval="step")

            case = f"{name} {optimizer}"
            saver = ech.DistributedCheckpointSaver(folder / case)
            straight, first, second = unit("zero1"), unit("zero1"), unit("zero1")
            ech.train(straight, _mine(), max_epochs=1)
            ech.train(first, _mine()[:3], max_epochs=1, callbacks=[saver])
            ech.DistributedCheckpointSaver.restore_from_latest(folder / case, second)
            assert largest_difference(whole(first.module), whole(second.module)) == 0
            ech.train(second, _mine()[3:], max_epochs=2)
            if module is Shaped:  # as gradient buckets and kernels expect it
                assert straight.prepared.unwrapped.conv.weight.is_contiguous(memory_format=torch.channels_last)
            done[case], done[f"{case} resumed"] = whole(straight.module), whole(second.module)
    return done


@pytest.mark.full
def test_types_layouts_schedules_and_a_rank_that_owns_nothing(ranks: Ranks, tmp_path: Path) -> None:
    for done in ranks(2, _modules, tmp_path):
        for name, got in done.items():
            kind, optimizer = name.split()[:2]
            want = _scheduled(DATA, MODULES[kind](), optimizer)
            for key in want:
                tolerance = 1e-12 if want[key].dtype == torch.float64 and kind == "Lone" else 2e-6  # float32 in the middle
                assert float((got[key] - want[key]).abs().max()) < tolerance, (name, key)


def _half() -> tuple[torch.Tensor, float]:
    """fp16 with a rank that owns nothing, whose scaler would find no gradient to look at."""
    unit = Regression(module=lone().float(), layout="zero1", precision=ech.layouts.Precision(torch.float16, init_scale=64.0))
    ech.train(unit, [(x.float(), y.float()) for x, y in _mine()], max_epochs=1)
    assert unit.grad_scaler is not None
    return whole(unit.module)["weight"], unit.grad_scaler.get_scale()


def test_half_precision_with_a_rank_that_owns_nothing(ranks: Ranks) -> None:
    (first, scale), (second, other) = ranks(2, _half)
    want = plain_training(DATA, module=lone())[0]["weight"]
    assert torch.equal(first, second) and scale == other
    assert float((first - want).abs().max()) < 1e-2


def _by_hand() -> tuple[dict[str, torch.Tensor], int, list[int]]:
    """A user's own unit; its optimizer is divided by hand, has a group added and steps with a closure."""
    module = net()
    wrapped = ech.layouts.prepare_module(module, CPU, layout="zero1")
    optimizer = torch.optim.SGD(module.blocks.parameters(), lr=0.1, momentum=0.9)
    partition = Partition(optimizer)
    optimizer.add_param_group({"params": [*module.first.parameters(), *module.last.parameters()], "lr": 0.1})
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad()  # before the step at which the group is divided
    left = sum(p.grad is not None for p in module.parameters())
    ech.train(Own(wrapped, optimizer, closure=True), _mine(), max_epochs=1)
    assert Partition.of(optimizer) is partition
    optimizer.zero_grad()
    left += sum(p.grad is not None for p in module.parameters())
    return whole(wrapped), left, [sum(map(partition.owns, group["params"])) for group in optimizer.param_groups]


def test_added_groups_closures_and_all_gradients_cleared(ranks: Ranks) -> None:
    want, _, _ = plain_training(DATA)
    (got, left, owned), (other, left_too, owned_too) = ranks(2, _by_hand)
    assert largest_difference(got, want) < 1e-12 and largest_difference(other, want) < 1e-12
    assert left == left_too == 0
    assert [a + b for a, b in zip(owned, owned_too, strict=True)] == [8, 4]


class ByRank(torch.optim.SGD):
    """Steps every so many parameters, and sends them, as a Muon for several ranks does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for at, parameter in enumerate(self.param_groups[0]["params"]):
            if at % dist.get_world_size() == int(os.environ["RANK"]):
                parameter.sub_(parameter.grad)
            dist.broadcast(parameter, at % dist.get_world_size())


class ByNorm(torch.optim.Optimizer):
    """Divides by the norm of all gradients, as LAMB does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for parameter in held:
            parameter.sub_(self.param_groups[0]["lr"] * parameter.grad / norm)


class Chooses(Regression):
    """Builds what it is told to."""

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        parameters = list(module.parameters())
        if self.kind == "LBFGS":
            return torch.optim.LBFGS(parameters), None
        if self.kind == "by rank":
            return ByRank(parameters, lr=0.1), None
        if self.kind == "by norm":
            return ByNorm(parameters, lr=0.1), None
        if self.kind == "differs":
            return torch.optim.SGD(parameters[: 2 + dist.get_rank()], lr=0.1), None
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        Partition(optimizer)
        return optimizer, None


def _errors() -> list[str]:
    kinds = dict.fromkeys(("LBFGS", "by rank", "by norm", "differs", "twice"), UsageError) | {"differs": RanksDisagreeError}
    said = [refusal(Chooses(layout="zero1", optimizer=kind).configure, kind=error) for kind, error in kinds.items()]
    said.append(refusal(ech.train, Chooses(layout="pp=2", optimizer="by norm"), _mine(), max_epochs=1))
    return [*said, refusal(Partition, ZeroRedundancyOptimizer(net().parameters(), torch.optim.SGD, lr=0.1))]


@pytest.mark.full
def test_what_cannot_be_divided_is_said_on_all_ranks(ranks: Ranks) -> None:
    for lbfgs, by_rank, by_norm, differs, twice, of_stages, again in ranks(2, _errors):
        assert "cannot shard LBFGS, which needs all parameters at once" in lbfgs
        assert "ByRank exchanges tensors between the ranks itself" in by_rank
        assert "ByNorm steps each parameter by the gradients of all of them" in by_norm and "'zero1'" in by_norm
        assert "ByNorm steps each parameter by the gradients of all of them" in of_stages and "'pp" in of_stages
        assert "ranks disagree about the optimizer's parameters" in differs
        assert "already sharded" in twice and "this ZeroRedundancyOptimizer is already sharded" in again


def test_prepare_module_says_that_it_never_sees_the_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    ech.layouts.prepare_module(net(), CPU, layout="zero1")
    assert "Give module and optimizer to echelon.prepare" in caplog.text
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["zero1", "fsdp"])
def test_a_world_of_one_owns_everything(layout: str) -> None:
    unit = Regression(layout=layout)
    ech.train(unit, [batch(4, 0)], max_epochs=1)
    want, _, _ = plain_training([[batch(4, 0)]])
    assert largest_difference(whole(unit.module), want) < 1e-12
    dist.destroy_process_group()


class Scheduled(Own):
    def train_step(self, state: ech.State, data: Batch) -> None:
        super().train_step(state, data)
        self.schedule.step()


def _alone(optimizer: str) -> Scheduled:
    """Torch's own optimizer with sharded state, as programs around DistributedDataParallel have it."""
    module = nn.parallel.DistributedDataParallel(net())
    unit = Scheduled(module, ZeroRedundancyOptimizer(module.parameters(), getattr(torch.optim, optimizer), lr=0.1))
    unit.schedule = torch.optim.lr_scheduler.StepLR(unit.optimizer, 2, 0.5)
    return unit


def _torchs_own(folder: Path, optimizer: str) -> dict[str, torch.Tensor]:
    saver = ech.DistributedCheckpointSaver(str(folder), save_every_n_updates=3)
    ech.train(_alone(optimizer), _mine(), max_updates=3, callbacks=[saver])
    unit = _alone(optimizer)
    assert saver.restore_from_latest(str(folder), unit)
    ech.train(unit, _mine(), max_updates=5)
    return whole(unit.module)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["RMSprop", "AdamW"])
def test_torchs_zero_redundancy_optimizer_resumes_with_its_state(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    # The second run resumes in the middle of an epoch, whose list of batches begins anew.
    want = _scheduled([*DATA[:3], *DATA[:2]], net(), optimizer)
    for trained in ranks(2, _torchs_own, tmp_path / "two", optimizer):
        assert largest_difference(trained, want) < 1e-10
