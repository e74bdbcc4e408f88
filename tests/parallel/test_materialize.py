"""Models built without memory: every value is that of a plain build, to the bit, and no rank holds the whole."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import LayoutError
from echelon.parallel.meta import deferred
from echelon.parallel.meta import materialize as filling
from echelon.parallel.meta.deferred import Value
from echelon.parallel.meta.materialize import materialize
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, whole
from tests.kit.refusals import refusal, refused
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")


def _gpt() -> nn.Module:
    path = Path(__file__).resolve().parents[2] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: nn.Module = module.GPT(32, 2, 2, 16)
    return made


class Odd(nn.Module):
    """Everything that constructors do to their parameters."""

    def __init__(self) -> None:
        super().__init__()
        # Tied, transposed, and initialised by functions that leave meta tensors alone.
        self.a, self.b, self.tied = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 7)
        self.b.weight = nn.Parameter(self.a.weight.t().contiguous())
        self.tied.weight = self.a.weight
        nn.init.orthogonal_(self.a.weight)
        nn.init.trunc_normal_(self.b.weight, std=0.02)
        nn.init.sparse_(self.tied.weight, 0.2)
        # Computed buffers and parameters, changed in place and in part.
        self.register_buffer("frequencies", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)), persistent=False)
        self.register_buffer("copied", copy.deepcopy(self.frequencies))
        self.p = nn.Parameter(torch.randn(3, 2) * 0.1)
        self.p.data.mul_(2)
        with torch.no_grad():
            self.p[0] = 1
            self.p[1] += torch.rand(2)
        self.rates = [r.item() for r in torch.linspace(0, 0.3, 4)]
        self.mean = nn.Parameter(torch.rand(6) * torch.rand(6).mean())
        # Layers that copy layers, with state of their own, and parametrized.
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.padded, self.gru = nn.BatchNorm1d(3), nn.Embedding(9, 4, padding_idx=2), nn.GRU(4, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        # A generator of its own, a seed in between, real tensors drawn in between, another type.
        self.conv = nn.Conv2d(2, 3, 3)
        nn.init.normal_(self.conv.weight, generator=torch.Generator().manual_seed(5))
        torch.manual_seed(77)
        self.late, self.drawn, self.later = nn.Linear(3, 3), torch.rand(2, device="cpu"), nn.Linear(3, 3).double()
        self.apply(self._halve)

    def _halve(self, layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            layer.weight.data *= 0.5


class Asking(nn.Module):
    """Asks where its tensors lie, and for their values; mixes them with real ones; keeps tensors that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        weight = self.a.weight
        kinds = {weight.device.type, torch.get_default_device().type, torch.tensor([]).device.type}
        if (
            kinds == {"cpu"} and weight.is_cpu and not weight.is_meta and weight.device == CPU
        ):  # as libraries decide to initialise
            nn.init.normal_(weight, std=0.02)
        self.there = nn.Parameter(torch.zeros(3, device=weight.device) + torch.rand(3, device=weight.device, dtype=weight.dtype))
        self.default = nn.Parameter(torch.randn(3, device=torch.get_default_device()))
        self.std, self.sum = float(weight.detach().std()), weight.detach().numpy().sum()
        # Real tensors: from numpy, asked for by name, put into recorded ones, and the other way round.
        self.register_buffer("table", torch.from_numpy(np.linspace(0, 1, 4)).float())
        self.scaled = nn.Parameter(torch.ones(4) * self.std)
        self.scaled.data.copy_(self.table)
        self.scaled.data += torch.ones(4, device="cpu")
        self.table[:2] = self.scaled[:2].detach()
        self.embedding = nn.Embedding(5, 4)
        self.embedding.weight.data = torch.from_numpy(np.arange(20.0).reshape(5, 4).astype(np.float32))
        # Shapes that depend on values, and an array that changes afterwards.
        self.positive = nn.Parameter(weight.data[weight.data > 0].clone())
        self.unique = nn.Parameter(torch.unique(torch.randint(0, 3, (9,))).float())
        with torch.no_grad():
            self.embedding.weight[torch.tensor([True, False, False, False, True])] = 7.0
        array = np.ones(3, dtype=np.float32)
        self.from_array = nn.Parameter(torch.tensor(array))
        array[:] = 9
        # Plain attributes.
        self.frequencies = torch.polar(torch.ones(4), torch.arange(4.0))
        self.more, self.alias = [torch.rand(2), {"x": (torch.rand(2),)}], [weight]
        self.to("cpu").cpu()


class Initialising(nn.Module):
    """Initialisers on parts, through apply, as timm writes them, through parametrizations and a state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.joined = nn.Linear(4, 12), nn.Parameter(torch.empty(12, 4))
        for i in range(3):
            nn.init.xavier_uniform_(self.qkv.weight[i * 4 : (i + 1) * 4])
            nn.init.constant_(self.qkv.bias.view(3, 4)[i], i)
            nn.init.orthogonal_(self.joined[i * 4 : (i + 1) * 4])
        parametrizations = nn.utils.parametrizations
        kinds = (parametrizations.weight_norm, parametrizations.orthogonal, parametrizations.spectral_norm)
        self.parametrized = nn.ModuleList(kind(nn.Linear(4, 4)) for kind in kinds)
        self.truncated = nn.Parameter(torch.empty(5, 5))
        self._trunc_normal(self.truncated, 0.02, 0.04)
        positions = torch.zeros(7, 4)
        angles = torch.arange(7).unsqueeze(1).float() * torch.exp(torch.arange(0, 4, 2).float() * (-math.log(1e4) / 4))
        positions[:, 0::2], positions[:, 1::2] = torch.sin(angles), torch.cos(angles)
        self.register_buffer("positions", positions)
        self.apply(self._initialise)
        self.loaded = nn.Linear(4, 12)
        self.loaded.load_state_dict(self.qkv.state_dict())
        self.real = nn.Linear(2, 2)
        self.real.load_state_dict({"weight": torch.ones(2, 2, device="cpu"), "bias": torch.zeros(2)})
        self.real.weight = nn.Parameter(self.real.weight.detach().clone() * torch.rand(2, 2))
        self.lstm, self.attention = nn.LSTM(3, 4), nn.MultiheadAttention(4, 2)
        for name, parameter in self.lstm.named_parameters():
            if "bias" in name:
                parameter.data.chunk(4)[1].fill_(1.0)
        self.q = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])
        self.shuffled = nn.Parameter(torch.arange(6.0)[torch.randperm(6)])
        self.chosen = nn.Parameter(torch.multinomial(torch.ones(6), 3).float())

    @staticmethod
    @torch.no_grad()
    def _trunc_normal(tensor: torch.Tensor, std: float, limit: float) -> None:
        edge = math.erf(limit / std / math.sqrt(2))
        tensor.uniform_(-edge, edge).erfinv_().mul_(std * math.sqrt(2)).clamp_(min=-limit, max=limit)

    def _initialise(self, layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)


def _all(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def _differing(got: nn.Module, want: nn.Module) -> list[str]:
    ours, theirs = _all(got), _all(want)
    assert ours.keys() == theirs.keys()
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in ours.items()}
    return [n for n, t in theirs.items() if full[n].dtype != t.dtype or not torch.equal(full[n], t)]


def _twice(make: Any, seed: int = 0) -> tuple[Any, Any]:
    """Built plainly, and on the meta device, not yet filled; both draw the same."""
    torch.manual_seed(seed)
    want, state = make(), torch.get_rng_state()
    torch.manual_seed(seed)
    with ech.on_meta():
        got = make()
    assert torch.equal(torch.get_rng_state(), state)
    return want, got


@pytest.mark.parametrize("make", [Odd, Asking, Initialising, Net, _gpt], ids=["odd", "asking", "initialising", "net", "gpt"])
def test_values_and_streams_are_those_of_a_plain_build(make: Any) -> None:
    want, got = _twice(make)
    state = torch.get_rng_state()
    if make is not Asking:
        assert all(p.is_meta for p in got.parameters())
    materialize(got, CPU)
    assert _differing(got, want) == [] and torch.equal(torch.get_rng_state(), state)
    if make is Odd:
        assert got.tied.weight is got.a.weight and got.rates == want.rates and torch.equal(got.drawn, want.drawn)
    if make is Asking:  # tensors that are plain attributes have their values, too
        assert torch.equal(got.frequencies, want.frequencies) and torch.equal(got.more[0], want.more[0])
        assert torch.equal(got.more[1]["x"][0], want.more[1]["x"][0]) and got.alias[0] is got.a.weight
        assert (got.std, got.sum) == (want.std, want.sum)


def test_what_is_drawn_over_is_not_drawn() -> None:
    """A layer's own initialisation, which the model's replaces, and which something else was made of before."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(4, 5), nn.Linear(5, 4)
            before = self.layer.weight.detach().clone()
            nn.init.normal_(self.layer.weight)
            self.other.weight.data.copy_(before.T)
            self.other.weight.data[0].normal_()
            nn.init.normal_(self.other.bias)
            self.other.bias.data.fill_(self.other.bias.data[0])

    plain, module = _twice(Twice, 3)
    value = Value.of(module.layer.weight)
    assert value is not None
    assert [getattr(call.func, "__name__", "") for call in value.tape.needed(value.storage)] == ["empty", "normal_"]
    made = ech.layouts.prepare_module(module, torch.device("cpu"), layout="none")
    for name, parameter in plain.named_parameters():
        assert torch.equal(made.get_parameter(name), parameter), name


def test_a_block_within_a_block_and_one_after_the_other_are_one_recording() -> None:
    torch.manual_seed(0)
    with ech.on_meta():
        with ech.on_meta():
            got = nn.Linear(3, 3)
        got.weight.data.mul_(2)
    with ech.on_meta():
        got.weight.data.add_(torch.rand(3, 3))
    materialize(got, CPU)
    torch.manual_seed(0)
    want = nn.Linear(3, 3)
    assert torch.equal(got.weight, want.weight * 2 + torch.rand(3, 3))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(4))
        self.token.data[0] = 1


class Unset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.token = nn.Linear(2, 2), nn.Parameter(torch.empty(3))


def _made_before() -> nn.Module:
    with torch.device("meta"):
        module: Any = nn.ParameterDict({"token": nn.Parameter(torch.ones(4))})
    with ech.on_meta():
        module.token.data.mul_(2)
    return module


@pytest.mark.parametrize(
    ("make", "within"),
    [(Half, ech.on_meta), (_made_before, contextlib.nullcontext), (Unset, ech.on_meta), (Unset, lambda: torch.device("meta"))],
)
def test_what_nothing_sets_or_in_part_is_an_error_with_its_name(make: Any, within: Any) -> None:
    with within():
        module = make()
    with refused(LayoutError):
        materialize(module, CPU)


def _numpys_numbers() -> str:
    with ech.on_meta():
        module = nn.Linear(2, 2)
        module.weight.data.mul_(float(np.random.default_rng(dist.get_rank()).normal()))
    return refusal(ech.layouts.prepare_module, module, CPU, layout="fsdp", kind=ech.EchelonError)


def test_ranks_that_numpy_initialises_differently_are_refused_not_mixed(ranks: Ranks) -> None:
    assert all("the numbers that initialise the model" in text for text in ranks(2, _numpys_numbers))


# 8 blocks of 39 MiB, 313 in all. The C library keeps smaller pieces of memory, in an order that depends on chance.
def _large() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(3200, 3200, bias=False), nn.ReLU()) for _ in range(8)))


def _peak(layout: Any) -> float:
    """MiB by which memory grew at most."""
    with ech.on_meta():
        small = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    ech.layouts.prepare_module(small, CPU, layout=layout)  # what torch loads and allocates once
    before, seen, done = _anonymous(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(_anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    torch.manual_seed(0)
    with ech.on_meta():
        module = _large()
    ech.layouts.prepare_module(module, CPU, layout=layout)
    done.set()
    watcher.join()
    first = next(module.parameters())
    torch.manual_seed(0)
    part = first.to_local() if hasattr(first, "to_local") else first
    want = nn.Linear(3200, 3200, bias=False).weight
    rows = part.shape[0]
    assert torch.equal(part, want[rows * dist.get_rank() :][:rows])
    return max(seen) - before


def _anonymous() -> float:
    """MiB that this process allocated; pages of libraries, which a forked rank touches one by one, do not count."""
    return float(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1024


@pytest.mark.full
def test_no_rank_holds_more_than_its_shards_and_a_parameter(ranks: Ranks) -> None:
    shards, parameter = 8 * 39 / 4, 39
    for peak in ranks(4, _peak, "fsdp"):
        assert peak < shards + 3 * parameter + 20  # the value, its copy while it is cut, and what torch loads meanwhile


def test_without_a_record_layers_reset_themselves_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def plain() -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 4),
            nn.BatchNorm1d(4),
            nn.TransformerEncoderLayer(4, 2, 8),
            nn.Sequential(nn.Embedding(5, 4, padding_idx=1)),
        )

    torch.manual_seed(0)
    want = plain()
    torch.manual_seed(0)
    with torch.device("meta"):
        got = plain()
    with caplog.at_level(logging.WARNING):
        materialize(got, CPU)
    assert _differing(got, want) == []
    assert "without a record" in caplog.text and "echelon.on_meta()" in caplog.text


def _other_models() -> str:
    with ech.on_meta():
        module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + int(os.environ["RANK"]))))
    return refusal(ech.layouts.prepare_module, module, CPU, layout="ddp", kind=ech.EchelonError)


def test_ranks_with_other_models_are_told(ranks: Ranks) -> None:
    assert all("has nothing more on rank 0, it has 1.weight (2, 2)" in text for text in ranks(2, _other_models))


# --- computed by one rank each, on the device, or before a restore

PLAN = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}


class Various(nn.Module):
    """Draws of many kinds, a tie, a constant, a buffer that no checkpoint has, and one that every checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.last, self.again = nn.Linear(8, 1), nn.Linear(8, 1)
        self.again.weight = self.last.weight
        nn.init.trunc_normal_(self.blocks[0][0].weight, std=0.3)
        nn.init.orthogonal_(self.blocks[1][0].weight)
        self.gain = nn.Parameter(torch.randn(8) * 0.1 + torch.linspace(1.0, 2.0, 8))
        self.register_buffer("angles", torch.arange(8).float() / 8, persistent=False)
        self.register_buffer("seen", torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.gain + self.angles
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) + self.again(x)


def _recorded(seed: int = 5, **options: Any) -> Various:
    torch.manual_seed(seed)
    with ech.on_meta(**options):
        return Various()


def _plainly(seed: int = 5) -> Various:
    torch.manual_seed(seed)
    return Various()


def _values(module: nn.Module) -> dict[str, torch.Tensor]:
    return whole(module) | {n: b.clone() for n, b in module.named_buffers()}


def _divided() -> dict[str, Any]:
    filling.SENT_BYTES = 1
    try:
        found = {}
        for layout in ("ddp", "fsdp", "zero1", "zero2", "hsdp", ech.FSDPStrategy(cpu_offload=True), ech.Layout(tp=2, plan=PLAN)):
            computed: list[int] = []

            def compute(value: Any, *args: Any, real: Any = deferred.Value.compute, seen: list[int] = computed) -> torch.Tensor:
                made = real(value, *args)
                seen.append(made.nbytes)
                return made

            with mock.patch.object(deferred.Value, "compute", compute):
                unit = Regression(module=_recorded(5 + dist.get_rank()), layout=layout)
            found[str(layout)] = sum(computed), _values(unit.prepared.unwrapped)
            assert unit.prepared.unwrapped.last.weight is unit.prepared.unwrapped.again.weight
            ech.train(unit, [batch(4, unit.prepared.data.rank, torch.float32)] * 2, max_epochs=1)
        with ech.on_meta():
            broken = nn.Linear(3, 3)
            broken.weight = nn.Parameter(torch.empty(3, 3))
            broken.weight.data[0] = 1.0
        said = refusal(ech.layouts.prepare_module, broken, CPU, layout="ddp")
        assert "a part of it is given no value" in said
        return found | {"error": said[:6]}
    finally:
        filling.SENT_BYTES = 1 << 20


@pytest.mark.full
def test_each_value_is_computed_by_one_rank(ranks: Ranks) -> None:
    plain = _values(_plainly())
    size = sum(t.nbytes for t in plain.values())
    found = ranks(4, _divided)
    assert [got.pop("error") for got in found] == ["weight"] * 4
    for layout in found[0]:
        assert sum(got[layout][0] for got in found) < 1.2 * size, "every value was computed by several ranks"
        for got in found:
            for name, value in plain.items():
                assert torch.equal(got[layout][1][name], value), (layout, name)


def _on_device() -> dict[str, Any]:
    found = {}
    for layout in ("none", "ddp", "fsdp", ech.Layout(tp=-1, plan=PLAN)):
        seed = 5 if layout == "none" else 5 + dist.get_rank()
        unit = Regression(module=_recorded(seed, on_device=True), layout=layout)
        found[str(layout)[:6]] = _values(unit.prepared.unwrapped)
    return found


@pytest.mark.full
def test_values_computed_on_the_device_are_the_same_on_any_ranks(ranks: Ranks) -> None:
    found = ranks(2, _on_device)
    alone, plain = _values(Regression(module=_recorded(on_device=True)).module), _values(_plainly())
    for got in found:
        for layout, values in got.items():
            assert values.keys() == alone.keys()
            for name, value in values.items():
                assert torch.equal(value, alone[name]), (layout, name)
    for name, value in alone.items():
        assert value.isfinite().all() and (name in ("angles",) or not torch.equal(value, plain[name])), name
    assert torch.allclose(alone["blocks.1.0.weight"] @ alone["blocks.1.0.weight"].T, torch.eye(8), atol=1e-5)
    assert 0.05 < float(alone["blocks.0.0.weight"].std()) < 0.6
    assert torch.equal(alone["last.weight"], alone["again.weight"]) if "again.weight" in alone else True


def test_recording_for_a_device_draws_nothing() -> None:
    torch.manual_seed(5)
    with ech.on_meta(on_device=True):
        nn.Linear(1000, 1000)
    after = torch.rand(1)
    torch.manual_seed(5)
    torch.randint(2**62, ())
    assert torch.equal(torch.rand(1), after)


def _restored(folder: str, layout: Any) -> dict[str, Any]:
    saved = Regression(module=_plainly(), layout=layout, optimizer="AdamW")
    data = [batch(4, i, torch.float32) for i in range(2)]
    ech.train(saved, data, max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder)])
    want = _values(saved.prepared.unwrapped)
    found: dict[str, Any] = {}
    unit = Regression(module=_recorded(9), layout=layout, optimizer="AdamW")
    ech.DistributedCheckpointSaver.restore_from_latest(folder, unit)
    found["equal"] = largest_difference(_values(unit.prepared.unwrapped), want)

    late = Regression(module=_recorded(5), layout=layout)
    found["nothing there"] = ech.DistributedCheckpointSaver.restore_from_latest(f"{folder}/none", late)
    found["initial"] = largest_difference(_values(late.prepared.unwrapped), _values(_plainly()))
    return found


@pytest.mark.full
def test_a_restore_gives_its_values_and_leaves_those_of_a_plain_build_where_nothing_is(ranks: Ranks, tmp_path: Path) -> None:
    for layout, got in ranks(2, lambda: {name: _restored(f"{tmp_path}/{name}", name) for name in ("fsdp", "ddp")})[0].items():
        assert got["equal"] == got["initial"] == 0.0 and got["nothing there"] is False, (layout, got)
