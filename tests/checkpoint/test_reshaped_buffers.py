"""Buffers that training gives another shape or their first value, and states that a module's hooks rename, in a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, PerChannelMinMaxObserver
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from echelon.common.errors import CheckpointError, CheckpointMismatchError
from tests.conftest import Ranks
from tests.kit.models import largest_difference, net
from tests.kit.refusals import refused
from tests.kit.saving import goes_on, of_all
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


class Remembering(nn.Module):
    """Means of what it has seen: of the last few batches, and of all, which nothing but the default loads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("bank", torch.zeros(0, 4, dtype=torch.float64))
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            now = x.mean(0, keepdim=True)
            self.bank = torch.cat([self.bank, now])[-5:]
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return self.net(x - 0.1 * self.bank.mean(0) - (0 if self.mean is None else 0.1 * self.mean))


class Loading(Remembering):
    """Loads them by itself."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("bank", "mean"):
            if f"{prefix}{name}" in state:
                setattr(self, name, torch.zeros_like(state[f"{prefix}{name}"]))
        super()._load_from_state_dict(state, prefix, *args)  # type: ignore[no-untyped-call]


class Observing(nn.Module):
    """Quantization-aware training by torch's own parts, whose buffers get a value for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(dtype=torch.float32)
        self.observed = FakeQuantize(
            PerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=torch.per_channel_symmetric
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.observed(x.T.float()).T).double()


class Renaming(nn.Module):
    """Its state has the names of an earlier version, and a tensor of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = net(), nn.BatchNorm1d(4, dtype=torch.float64)
        self.register_state_dict_post_hook(self._to_old)
        self.register_load_state_dict_pre_hook(self._to_new)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x))

    @staticmethod
    def _to_old(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in list(state):
            state[f"{prefix}old.{name.removeprefix(prefix)}"] = state.pop(name)
        state[f"{prefix}version"] = torch.tensor(1)

    @staticmethod
    def _to_new(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        assert state.pop(f"{prefix}version") == 1
        for name in list(state):
            state[prefix + name.removeprefix(f"{prefix}old.")] = state.pop(name)


KINDS: dict[str, type[nn.Module]] = {
    "remembering": Remembering,
    "loading": Loading,
    "observing": Observing,
    "renaming": Renaming,
}


def _run(folder: Path | None, module: nn.Module, layout: str, until: int) -> dict[str, torch.Tensor]:
    return of_all(goes_on(folder, Regression(module=module, layout=layout), until))


def _each(folder: Path | None, layout: str, until: int) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: _run(folder and folder / kind, make(), layout, until) for kind, make in KINDS.items()}


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_resumed_run_goes_on_bit_equal_with_buffers_of_the_saved_shapes(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    want = ranks(2, _each, None, layout, 9)[0]
    ranks(2, _each, tmp_path, layout, 4)
    got = ranks(2, _each, tmp_path, layout, 9)[0]
    assert {kind: largest_difference(got[kind], want[kind]) for kind in KINDS} == dict.fromkeys(KINDS, 0)


def test_another_layout_on_one_rank_has_them_too(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2, _each, tmp_path, "fsdp", 4)[0]
    got = ranks(1, _each, tmp_path, "none", 4)[0]
    assert {kind: largest_difference(got[kind], saved[kind]) for kind in KINDS} == dict.fromkeys(KINDS, 0)


class Padding(nn.Module):
    """Takes the shorter buffer of older checkpoints, and keeps its own length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("table", torch.ones(length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.table.mean()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        old = state[f"{prefix}table"]
        state[f"{prefix}table"] = torch.cat([old, old.new_zeros(len(self.table) - len(old))])
        super()._load_from_state_dict(state, prefix, *args)  # type: ignore[no-untyped-call]


def test_a_module_that_loads_another_shape_into_its_own_keeps_its_own(tmp_path: Path) -> None:
    _run(tmp_path, Padding(2), "none", 2)
    assert _run(tmp_path, Padding(4), "none", 2)["table"].tolist() == [1, 1, 0, 0]


class Biased(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.net, self.layer = net(), nn.Linear(1, width, bias=bias, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.net(x)).sum(1, keepdim=True)


@pytest.mark.parametrize("now", [(3, True), (2, False)])
def test_parameters_keep_their_shapes_and_stay_absent(tmp_path: Path, now: tuple[int, bool]) -> None:
    _run(tmp_path, Biased(2, True), "none", 2)
    with refused(CheckpointMismatchError):
        _run(tmp_path, Biased(*now), "none", 2)


def _older_shards(folder: Path) -> None:
    unit = Regression(module=FSDP(Renaming(), device_id=torch.device("cpu"), use_orig_params=True))
    with refused(CheckpointError):
        goes_on(folder, unit, 2)


def test_the_older_shards_refuse_hooks_that_rename(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _older_shards, tmp_path)
