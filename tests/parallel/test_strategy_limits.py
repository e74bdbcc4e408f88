"""What a layout cannot do is refused with what to do instead; and layouts in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import LauncherEnvironmentError, LayoutError
from echelon.compat.torchtnt.utils.prepare_module import FSDP2Strategy
from echelon.parallel import LAYOUTS, resolve
from echelon.parallel.layouts import in_words
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, plain_training, whole
from tests.kit.refusals import refusal, refused
from tests.kit.units import PARALLEL, Own, Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")


class Bare(nn.Module):
    """Nothing says how its parameter begins."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


def _misfits() -> dict[str, str]:
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

    with torch.device("meta"):
        empty, bare = net(dtype=torch.float32), Bare()
    wrapped = Regression(layout="zero1").module
    low = MixedPrecision(keep_low_precision_grads=True)
    cases: dict[str, Any] = {
        "dp": lambda: Regression(layout="dp"),
        "NO_SHARD": lambda: Regression(layout=ech.FSDPStrategy(sharding_strategy=ShardingStrategy.NO_SHARD)),
        "unknown": lambda: Regression(layout=ech.FSDPStrategy(sharding_strategy="HALF")),
        "blocks twice": lambda: Regression(layout=ech.FSDPStrategy(blocks=["first"], auto_wrap_policy={nn.Linear})),
        "ranks twice": lambda: Regression(layout=ech.FSDPStrategy(process_group=dist.group.WORLD, device_mesh=_mesh())),
        "device": lambda: Regression(layout=ech.FSDPStrategy(device_id=3)),
        "devices": lambda: Regression(layout=ech.DDPStrategy(device_ids=[0])),
        "grads": lambda: Regression(layout=ech.FSDPStrategy(mixed_precision=low)),
        "offload": lambda: Regression(layout=ech.FSDPStrategy(cpu_offload="yes")),
        "container": lambda: Regression(layout=FSDP2Strategy(modules_to_shard=["blocks"])),
        "class": lambda: Regression(layout=FSDP2Strategy(modules_to_shard=[nn.Conv2d])),
        "nothing": lambda: Regression(layout=FSDP2Strategy(shard_predicates=[lambda n, m: False])),
        "loose": lambda: Regression(module=(m := net()), layout=ech.FSDPStrategy(ignored_modules=[m.last])),
        "sizes": lambda: Regression(layout=ech.Layout(dp_replicate=-1, dp_shard=3)),
        "both sizes": lambda: Regression(layout=ech.Layout(dp_replicate=2, dp_shard=2)),
        "frozen": lambda: ech.layouts.prepare_ddp(net().requires_grad_(False), CPU),
        "twice": lambda: Regression(module=wrapped, layout="fsdp"),
        "meta": lambda: Regression(module=bare, layout="zero1"),
        "meta, unfilled": lambda: Regression(module=empty, layout=ech.FSDPStrategy(param_init_fn=lambda m: None)),
    }
    return {name: refusal(case) for name, case in cases.items()}


@pytest.mark.full
def test_what_cannot_be_names_the_remedy_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, _misfits)
    assert first == second
    for name, words in {
        "dp": "Take layout 'ddp'",
        "NO_SHARD": "layout 'ddp'",
        "unknown": "FULL_SHARD, SHARD_GRAD_OP",
        "blocks twice": "Give one of them",
        "ranks twice": "Give one of them",
        "device": "must be this rank's device, cpu",
        "devices": "there is layout 'dp'",
        "grads": "build the module in that type",
        "offload": "got str",
        "container": "blocks is a ModuleList",
        "class": "no submodule of class Conv2d in Net",
        "nothing": "must accept a submodule of Net, got none",
        "loose": "last.weight would not be reduced",
        "sizes": "to the 2 ranks that run, got dp_shard 3.",
        "both sizes": "to the 2 ranks that run, got dp_replicate 2 x dp_shard 2 = 4.",
        "frozen": "no parameter of Net requires a gradient",
        "twice": "made parallel already",
        "meta": "Bare.scale (3,) is on the meta device and nothing gives it a value",
        "meta, unfilled": "Net.blocks.0.0.weight must have a value after param_init_fn(Linear)",
    }.items():
        assert words in first.pop(name), name
    assert not first


@pytest.mark.parametrize(
    "make",
    [
        lambda: ech.ZeROStrategy(4),
        lambda: ech.ZeROStrategy(1, cpu_offload=True),
        lambda: ech.ZeROStrategy(2, options=ech.DDPStrategy()),
    ],
)
def test_a_stage_that_is_none_is_refused(make: Any) -> None:
    with refused(LayoutError):
        make()


def test_a_job_that_has_not_joined_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for layout in (*PARALLEL, "tp=2", "cp=2", "pp=2", "dp_shard=2"):
        with refused(LauncherEnvironmentError):
            Regression(layout=layout)


def test_dp_without_gpus_is_the_plain_module_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    unit = Regression(layout="dp")
    ech.train(unit, [batch(4, 0)], max_epochs=1)
    want, _, _ = plain_training([[batch(4, 0)]])
    assert type(unit.module).__name__ == "Net" and all(torch.equal(whole(unit.module)[n], want[n]) for n in want)
    assert caplog.messages == ["layout 'dp': there are no CUDA devices to use, so this is the plain module on cpu"]


def test_a_module_in_dataparallel_by_hand_is_saved_under_its_own_names(tmp_path: Path) -> None:
    wrapped, plain = Regression(module=nn.DataParallel(net())), Regression(module=net(seed=1))
    saver = ech.DistributedCheckpointSaver(tmp_path)
    ech.train(wrapped, [batch(4, 0)], max_epochs=1, callbacks=[saver])
    ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, plain)
    assert largest_difference(whole(wrapped.module), whole(plain.module)) == 0
    assert len(plain.optimizer.state) == len(list(plain.module.parameters()))


def test_names_stand_for_defaults() -> None:
    for name in LAYOUTS:
        layout = resolve(name)
        assert layout is not None and in_words(layout) == name


class Looked(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.words((x > 0).long()).mean(1))


def _hooked(module: Any) -> Any:
    module.last.weight.register_hook(lambda gradient: gradient / 2)
    return module


class _HookedLate(Regression):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        return super().configure_optimizers_and_lr_scheduler(_hooked(module))


class _Short(Looked):
    """Its last layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words((x > 0).long()).mean((1, 2))[:, None]


def _steps() -> dict[str, str]:
    def train(unit: Any) -> str:
        return refusal(ech.train, unit, [batch(4, 0), batch(4, 1)], max_epochs=1)

    split = ech.layouts.prepare_module(net(), CPU, layout="tp")
    return {
        "sparse": train(Regression(module=Looked().double(), layout="fsdp")),
        "Adafactor": train(Regression(layout="fsdp", optimizer="Adafactor")),
        "LBFGS": train(Regression(layout="fsdp", optimizer="LBFGS")),
        "LBFGS of several": train(Own(split, torch.optim.LBFGS(split.parameters(), lr=0.1), closure=True)),
        "hook": refusal(lambda: Regression(module=_hooked(net()), layout="fsdp")),
        "late hook": train(_HookedLate(layout="fsdp")),
        "max_norm": refusal(lambda: Regression(module=nn.Embedding(5, 4, max_norm=1.0), layout="ddp")),
        "unused": train(Regression(module=_Short().double(), layout="ddp")),
    }


@pytest.mark.full
def test_gradients_and_optimizers_that_a_strategy_cannot_have_are_named(ranks: Ranks) -> None:
    first, second = ranks(2, _steps)
    assert first == second
    for name, words in {
        "sparse": "Looked has gradients that are sparse tensors, which cannot be split over the ranks",
        "Adafactor": "Adafactor cannot step parameters that are split over the ranks",
        "LBFGS": "the LBFGS needs a closure, which computes the loss again and again in one step, and an AutoUnit has none",
        "LBFGS of several": "LBFGS makes one vector of all parameters",
        "hook": "puts another parameter in the place of last.weight, whose hook (register_hook",
        "late hook": "last.weight is split over the ranks, and torch does not call its hook",
        "max_norm": "max_norm must be None on several ranks, got 1",
        "unused": "the loss must depend on all trained parameters, got no gradient of last.weight and 1 more",
    }.items():
        assert words in first[name], name
