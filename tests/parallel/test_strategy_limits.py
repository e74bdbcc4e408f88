"""What a layout cannot do is refused with what to do instead; and layouts in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import LauncherEnvironmentError, LayoutError
from echelon.compat.torchtnt.utils.prepare_module import FSDP2Strategy
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, plain_training, whole
from tests.kit.own_loops import prepared
from tests.kit.refusals import refusal, refused
from tests.kit.units import PARALLEL, Numbers, Own, Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")
Programs = dict[str, tuple[Callable[[], Any], str]]  # and words that it is refused with


class Bare(nn.Module):
    """Nothing says how its parameter begins."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


def _misfits() -> Programs:
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

    fsdp, fsdp2, sizes = ech.FSDPStrategy, FSDP2Strategy, ech.Layout
    layouts: dict[str, tuple[Any, str]] = {
        "dp": (lambda: "dp", "Use layout 'ddp'"),
        "NO_SHARD": (lambda: fsdp(sharding_strategy=ShardingStrategy.NO_SHARD), "layout 'ddp'"),
        "unknown": (lambda: fsdp(sharding_strategy="HALF"), "FULL_SHARD, SHARD_GRAD_OP"),
        "blocks twice": (lambda: fsdp(blocks=["first"], auto_wrap_policy={nn.Linear}), "Give one of them"),
        "ranks twice": (lambda: fsdp(process_group=dist.group.WORLD, device_mesh=_mesh()), "Give one of them"),
        "devices": (lambda: ech.DDPStrategy(device_ids=[0]), "use layout 'dp'"),
        "grads": (lambda: fsdp(mixed_precision=MixedPrecision(keep_low_precision_grads=True)), "build the module in that dtype"),
        "offload": (lambda: fsdp(cpu_offload="yes"), "cpu_offload must be True, False, or torch's CPUOffload"),
        "class": (lambda: fsdp2(modules_to_shard=[nn.Conv2d]), "no submodule of class Conv2d in Net"),
        "nothing": (lambda: fsdp2(shard_predicates=[lambda n, m: False]), "must accept a submodule of Net, got none"),
        "sizes": (lambda: sizes(dp_replicate=-1, dp_shard=3), "to the 2 ranks that run, got dp_shard 3."),
        "both sizes": (
            lambda: sizes(dp_replicate=2, dp_shard=2),
            "ranks that run, got dp_replicate 2 x dp_shard 2 = 4.",
        ),
    }
    with torch.device("meta"):
        bare = Bare()
    loose, wrapped = net(), Regression(layout="zero1").module
    modules: dict[str, tuple[nn.Module, Any, str]] = {
        "loose": (loose, fsdp(ignored_modules=[loose.last]), "last.weight would not be reduced"),
        "twice": (wrapped, "fsdp", "is already parallel"),
        "meta": (bare, "zero1", "Bare.scale (3,) is on the meta device and nothing gives it a value"),
        "max_norm": (nn.Embedding(5, 4, max_norm=1.0), "ddp", "max_norm must be None on several ranks, got 1"),
    }
    frozen = net().requires_grad_(False)
    return {
        **{name: (lambda make=make: Regression(layout=make()), words) for name, (make, words) in layouts.items()},
        **{name: (partial(Regression, module=module, layout=layout), said) for name, (module, layout, said) in modules.items()},
        "frozen": (lambda: ech.layouts.prepare_ddp(frozen, CPU), "no parameter of Net requires a gradient"),
        "hook": (
            lambda: Regression(module=_hooked(net()), layout="fsdp"),
            "replaces the parameter last.weight, whose hook (register_hook",
        ),
    }


def test_a_stage_that_is_none_is_refused() -> None:
    with refused(LayoutError):
        ech.ZeROStrategy(4)


def test_a_job_that_has_not_joined_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
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
    ech.train(Numbers(), [1], max_epochs=1)
    assert "2 ranks were launched" in caplog.text


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


class _Follows(nn.Module):
    """MoCo's: a copy of the weights follows them, written by forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.last, self.copy = how, nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.copy.weight
        with torch.no_grad():
            if self.how == "in place":
                weight.lerp_(self.last.weight, 0.1)
            elif self.how == "its data":
                weight.data.mul_(0.9).add_(self.last.weight.data, alpha=0.1)
            elif self.how == "other data":
                weight.data = weight.data * 0.9 + self.last.weight.data * 0.1
            elif self.how == "another":
                self.copy.weight = nn.Parameter(weight * 0.9, requires_grad=False)
            elif self.how == "another, trained":
                self.last.weight = nn.Parameter(self.last.weight * 0.9)
        return self.last(x) + self.copy(x)


def _steps() -> Programs:
    split = ech.layouts.prepare_module(net(), CPU, layout="tp")
    units: dict[str, tuple[Any, str]] = {
        "sparse": (Regression(module=Looked().double(), layout="fsdp"), "Looked has sparse gradients"),
        "Adafactor": (Regression(layout="fsdp", optimizer="Adafactor"), "Adafactor cannot step parameters that are split over"),
        "LBFGS of several": (
            Own(split, torch.optim.LBFGS(split.parameters(), lr=0.1), closure=True),
            "LBFGS must have parameters of one kind",
        ),
        "late hook": (_HookedLate(layout="fsdp"), "last.weight is split over the ranks, and torch does not call its hook"),
        "unused": (Regression(module=_Short().double(), layout="ddp"), "got no gradient of last.weight and 1 more"),
        "replaced": (
            Regression(module=_Follows("another, trained").double(), layout="ddp"),
            "another took the place of last.weight",
        ),
    }
    lost = "copy.weight is written in the forward pass of _Follows, and the new value is lost"
    for how in ("in place", "its data", "other data", "another"):
        layout = "zero2" if how == "its data" else "fsdp"
        units[f"writes {how}"] = Regression(module=_Follows(how).double(), layout=layout), lost
    data = [batch(4, 0), batch(4, 1)]
    return {name: (partial(ech.train, unit, data, max_epochs=1), words) for name, (unit, words) in units.items()}


class InPlace(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return super().forward(x)


class Changes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace(nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks[1](self.blocks[0](self.first(x))))


class Reads(Net):
    """Standardises a weight, as some convolutions and heads do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        weight = self.blocks[0][0].weight
        return self.last(nn.functional.linear(hidden, weight - weight.mean(1, keepdim=True)))


def _trained(**options: Any) -> None:
    ech.train(Regression(**options), [batch(4, i) for i in range(2)], max_epochs=1)


def _decodes() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(8, 0)), 8, shuffle=True)
    model, _, _ = prepared(loader, layout="fsdp")
    with ech.evaluating(model):
        nn.functional.linear(torch.randn(2, 4).double(), model.first.weight)


def _clips_by_torch() -> None:
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(8, 0)), 8)
    model, optimizer, loader = prepared(loader, layout="tp=2")
    for x, y in loader:
        with ech.window(model) as window:
            window.backward(nn.functional.mse_loss(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


PROGRAMS: Programs = {
    "a static graph": (
        lambda: _trained(layout=ech.DDPStrategy(static_graph=True), accumulate=2),
        "static_graph must be False where gradients are accumulated",
    ),
    "in place": (lambda: _trained(module=Changes().double(), layout="fsdp"), "changes its input in place"),
    "a part that is called": (_decodes, "must come from a call of Net itself"),
    "clipping by torch": (_clips_by_torch, "Clip by window.clip_grad_norm_(max_norm)"),
    "a weight that is read": (
        lambda: _trained(module=Reads().double(), layout="tp"),
        "reads a parameter that is split over the ranks",
    ),
}


def _told(make: Callable[[], Programs]) -> list[tuple[str, str]]:
    """What is said of each, and words that must be in it."""
    return [(refusal(run), words) for run, words in make().values()]


@pytest.mark.parametrize(
    "make",
    [lambda: PROGRAMS, *(pytest.param(make, marks=pytest.mark.full) for make in (_misfits, _steps))],
    ids=["programs", "misfits", "steps"],
)
def test_what_a_layout_cannot_run_is_refused_by_name_with_the_remedy_on_all_ranks(ranks: Ranks, make: Any) -> None:
    first, second = ranks(2, _told, make)
    assert first == second
    assert [(said, words) for said, words in first if words not in said] == []
