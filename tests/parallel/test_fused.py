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
from tests.kit.models import batch, net, whole
from tests.kit.units import Regression


def _is_fused(make: Any, device: str = "cuda", dtype: torch.dtype = torch.float32) -> Any:
    with FakeTensorMode():
        optimizer = make([torch.empty(3, device=device, dtype=dtype, requires_grad=True)])
        fused.fuse(optimizer)
    return optimizer.param_groups[0].get("fused")


class Own(torch.optim.AdamW):
    """A class of the user's."""


@pytest.mark.parametrize(
    ("kind", "options", "where", "fuses"),
    [
        (torch.optim.Adam, {}, {}, True),
        (torch.optim.AdamW, {}, {}, True),
        # Not where the script chose,
        *(
            (torch.optim.AdamW, {name: value}, {}, False)
            for name, value in (("fused", False), ("foreach", True), ("foreach", False))
        ),
        (torch.optim.AdamW, {"capturable": True}, {}, False),
        # on a CPU, for complex numbers, or of another class.
        (torch.optim.AdamW, {}, {"device": "cpu"}, False),
        (torch.optim.AdamW, {}, {"dtype": torch.complex64}, False),
        (Own, {}, {}, False),
        (torch.optim.SGD, {}, {}, False),
    ],
)
def test_on_a_gpu_by_default(kind: Any, options: dict[str, Any], where: dict[str, Any], fuses: bool) -> None:
    assert bool(_is_fused(lambda params: kind(params, **options), **where)) is fuses


def test_not_once_it_has_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    fused.fuse(optimizer)
    assert not optimizer.param_groups[0]["fused"]


def _unit(layout: str, given: bool | None = None) -> Regression:
    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=0.1, fused=given)

    return Regression(module=net(dtype=torch.float32), layout=layout, clip_grad_norm=1.0, optimizer=optimizer)


def _apart(folder: str, layout: str) -> tuple[bool, list[float]]:
    """How far weights lie from those of `fused=True` as torch has it: after two epochs, and after a resume in between."""
    fused.DEVICES = {"cpu"}
    try:
        wanted, data = _unit(layout, True), [batch(4, i, torch.float32) for i in range(4)]
        ech.train(wanted, data, max_epochs=2)
        ours = _unit(layout)
        ech.train(ours, data, max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder, save_every_n_epochs=1)])
        again = _unit(layout)
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
