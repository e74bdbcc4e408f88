"""torch's Adam and AdamW are fused on a GPU, unless the script chose otherwise. The fused kernel exists on CPUs, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import echelon as ech
from echelon.parallel.gradients import fused
from tests.conftest import Ranks
from tests.kit.models import whole


def _is_fused(make: Any, device: str = "cuda", dtype: torch.dtype = torch.float32) -> Any:
    with FakeTensorMode():
        optimizer = make([torch.empty(3, device=device, dtype=dtype, requires_grad=True)])
        fused.fuse(optimizer)
    return optimizer.param_groups[0].get("fused")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_on_a_gpu_by_default(kind: Any) -> None:
    assert _is_fused(kind) is True


@pytest.mark.parametrize("option", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"capturable": True}])
def test_not_where_the_script_chose(option: dict[str, bool]) -> None:
    assert not _is_fused(lambda params: torch.optim.AdamW(params, **option))


def test_not_on_a_cpu_nor_for_complex_numbers() -> None:
    assert not _is_fused(torch.optim.AdamW, device="cpu")
    assert not _is_fused(torch.optim.AdamW, dtype=torch.complex64)


def test_not_a_class_of_the_users() -> None:
    class Own(torch.optim.AdamW):
        pass

    assert not _is_fused(Own)
    assert not _is_fused(torch.optim.SGD)


def test_not_once_it_has_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    fused.fuse(optimizer)
    assert not optimizer.param_groups[0]["fused"]


class Fit(ech.AutoUnit[Any]):
    given: bool | None = None

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        return nn.functional.mse_loss(self.module(data), data.flip(-1)), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.AdamW(module.parameters(), lr=0.1, fused=self.given), None


def _trained(layout: str, given: bool | None, *, precision: str = "fp32") -> tuple[Fit, list[torch.Tensor]]:
    torch.manual_seed(0)
    data = [torch.randn(4, 6) for _ in range(4)]
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    Fit.given = given
    unit = Fit(module=net, layout=layout, clip_grad_norm=1.0, precision=precision)
    return unit, data


def _apart(folder: str, layout: str) -> tuple[bool, list[float]]:
    """How far weights lie from those of `fused=True` as torch has it: after two epochs, and after a resume in between."""
    fused.DEVICES = {"cpu"}
    try:
        wanted, data = _trained(layout, True)
        ech.train(wanted, data, max_epochs=2)
        ours, _ = _trained(layout, None)
        ech.train(ours, data, max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder, save_every_n_epochs=1)])
        again, _ = _trained(layout, None)
        ech.DistributedCheckpointSaver.restore_from_latest(folder, again)
        for unit in (ours, again):
            ech.train(unit, data, max_epochs=2)
        want = whole(wanted.module)
        apart = [float((value - want[name]).abs().max()) for u in (ours, again) for name, value in whole(u.module).items()]
        return all(g["fused"] for u in (ours, again) for g in u.optimizer.param_groups), apart
    finally:
        fused.DEVICES = {"cuda"}


@pytest.mark.full
def test_numbers_are_those_of_torchs_fused_kernel(ranks: Ranks, tmp_path: Path) -> None:
    for layout in ("ddp", "fsdp", "zero1"):
        for is_fused, apart in ranks(2, _apart, str(tmp_path / layout), layout):
            assert is_fused and max(apart) == 0, (layout, is_fused, apart)
