"""Optimizers of other kinds: torchao's of few bits are saved and go on; torch's Adam and AdamW are fused on a GPU, by default."""

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

WIDTH = 96  # two layers whose halves have 4608 values: enough for torchao to quantise them


class Few(ech.AutoUnit[Any]):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        return nn.functional.mse_loss(self.module(data), data.flip(-1)), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        from torchao.optim import AdamW8bit

        return AdamW8bit(module.parameters(), lr=1e-2, block_size=WIDTH), None


def _unit(layout: str) -> Few:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return Few(module=net, layout=layout)


def _data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(3)]


def _moments(unit: Few) -> tuple[torch.Tensor, int]:
    """The first moments of this rank's part as numbers, and how many of the tensors are in 8 bits."""
    states = [s["exp_avg"] for s in unit.optimizer.state.values() if s]  # under zero1 of what this rank owns
    held = [getattr(s, "to_local", lambda s=s: s)() for s in states]
    few = [type(s).__name__ == "OptimState8bit" for s in held]
    return torch.cat([(s.dequantize() if is_few else s).flatten() for s, is_few in zip(held, few, strict=True)]), sum(few)


def _interrupted(folder: str, layout: str, resumed_as: str) -> tuple[float, float, int]:
    """How far moments lie from those that were saved, if they lie on the same ranks; how far weights in the end from those of a
    run that never stopped, relative to what training changed; and how many tensors are quantised.
    """
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, which takes long and is not in question
        straight, first, again = _unit(layout), _unit(layout), _unit(resumed_as)
        ech.train(straight, _data(), max_epochs=2)
        saver = ech.DistributedCheckpointSaver(folder, save_every_n_epochs=1)
        ech.train(first, _data(), max_epochs=1, callbacks=[saver])
        ech.DistributedCheckpointSaver.restore_from_latest(folder, again)
        moments, quantised = _moments(again)
        saved, _ = _moments(first)
        apart = float((moments - saved).abs().max() / saved.abs().max()) if layout == resumed_as else 0.0
        ech.train(again, _data(), max_epochs=2)
    ends, started = [_weights(u) for u in (again, straight)], _weights(_unit("none"))
    return apart, float((ends[0] - ends[1]).norm() / (ends[1] - started).norm()), quantised


def _weights(unit: Few) -> torch.Tensor:
    return torch.cat([value.flatten() for value in whole(unit.module).values()])


@pytest.mark.full
def test_eight_bits_are_saved_and_go_on(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="pip install 'echelon[float8]'")
    for layout, resumed_as in (("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "zero1")):
        for apart, weights, quantised in ranks(2, _interrupted, str(tmp_path / layout / resumed_as), layout, resumed_as):
            assert apart < 0.01 and weights < 0.02 and quantised, (layout, resumed_as, apart, weights, quantised)


# --- torch's fused kernels


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


def _fused_unit(layout: str, given: bool | None = None) -> Regression:
    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=0.1, fused=given)

    return Regression(module=net(dtype=torch.float32), layout=layout, clip_grad_norm=1.0, optimizer=optimizer)


def _apart(folder: str, layout: str) -> tuple[bool, list[float]]:
    """How far weights lie from those of `fused=True` as torch has it: after two epochs, and after a resume in between."""
    fused.DEVICES = {"cpu"}
    try:
        wanted, data = _fused_unit(layout, True), [batch(4, i, torch.float32) for i in range(4)]
        ech.train(wanted, data, max_epochs=2)
        ours = _fused_unit(layout)
        ech.train(ours, data, max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder, save_every_n_epochs=1)])
        again = _fused_unit(layout)
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
