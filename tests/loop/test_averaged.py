"""Averages of the weights (EMA, SWA) under every layout, against torch.optim.swa_utils.AveragedModel in plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import echelon as ech
from echelon.checkpoint.export import export_torch
from echelon.common.errors import LayoutError, LoopError
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, whole
from tests.kit.refusals import refused
from tests.kit.saving import goes_on
from tests.kit.units import EACH, KINDS, Hooks, Regression

pytestmark = pytest.mark.standing_ranks

UPDATES = 6


class Counting(nn.Module):
    """The shared model with buffers that every training step changes: a floating one, and a whole number."""

    tp_plan: ClassVar = {f"net.{name}": style for name, style in Net.tp_plan.items()}

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += torch.tensor([1.0, 2.0], dtype=torch.float64)
            self.count += 1
        return self.net(x)


def _batches(rank: int, ranks: int, micro: int = 1) -> list[Any]:
    """This rank's micro-batches; with one rank, those of two ranks joined."""
    if ranks == 1:
        pairs = zip(_batches(0, 2, micro), _batches(1, 2, micro), strict=True)
        return [tuple(torch.cat(both) for both in zip(a, b, strict=True)) for a, b in pairs]
    return [batch(4, 100 * (rank % 2) + i) for i in range(UPDATES * micro)]


CASES = {
    "ema": ech.units.SWAParams(0, 1, ema_decay=0.7),
    "swa": ech.units.SWAParams(0, 1, averaging_method="swa"),
    "warm-up and frequency": ech.units.SWAParams(2, 3, ema_decay=0.5),
    "lit": ech.units.SWAParams(1, 1, ema_decay=0.9, use_lit=True),
    "copied buffers": ech.units.SWAParams(0, 2, ema_decay=0.7, use_buffers=False),
}
EMA = ech.units.SWAParams(0, 1, ema_decay=0.9, use_lit=True)  # what ema=0.9 is, which evaluations use


def _mine(unit: ech.AutoUnit[Any], micro: int = 1) -> list[Any]:
    return _batches(unit.prepared.data.rank, unit.prepared.data.size, micro)


def _torchs(params: ech.units.SWAParams, averaged: int) -> Any:
    """torch's own function; whole numbers, which it cannot average, are copied, and its count, a tensor, would make a float32."""
    decay = min(params.ema_decay, (1 + averaged) / (10 + averaged)) if params.use_lit else params.ema_decay
    average = get_ema_multi_avg_fn(decay) if params.averaging_method == "ema" else get_swa_multi_avg_fn()

    def update(averages: list[torch.Tensor], current: list[torch.Tensor], count: Any) -> None:
        if averages[0].is_floating_point():
            average(averages, current, int(count))
        else:
            torch._foreach_copy_(averages, current)

    return update


def _reference(params: ech.units.SWAParams, micro: int = 1) -> dict[str, torch.Tensor]:
    """What torch's AveragedModel holds in the end."""
    module = Counting()
    batches = _batches(0, 1, micro)
    swa = AveragedModel(module, use_buffers=params.use_buffers)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    averaged = 0
    for update in range(UPDATES):
        for x, y in batches[update * micro : (update + 1) * micro]:
            (nn.functional.mse_loss(module(x), y) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        since = update - params.warmup_steps_or_epochs
        if since >= 0 and since % params.step_or_epoch_update_freq == 0:
            averaged += 1
            swa.multi_avg_fn = _torchs(params, averaged)
            swa.update_parameters(module)
    return {n: v.detach().clone() for n, v in swa.module.state_dict().items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _averages(unit: ech.AutoUnit[Any]) -> dict[str, torch.Tensor]:
    assert unit.swa_model is not None
    state = {n: v for n, v in unit.swa_model.state_dict().items() if isinstance(v, torch.Tensor)}
    return {n.partition(".")[2]: _whole(v) for n, v in state.items()}


def _trained(layout: str | None, params: Any, micro: int = 1, updates: int = UPDATES, **options: Any) -> Regression:
    options.setdefault("module", Counting())
    how = {"ema": 0.9} if params is EMA else {"swa_params": params}
    unit = Regression(layout=layout, step_lr_interval="step", accumulate=micro, **how, **options)
    ech.train(unit, _mine(unit, micro)[: updates * micro], max_epochs=1)
    return unit


def _all_cases(layout: str | None) -> dict[str, dict[str, torch.Tensor]]:
    return {name: _averages(_trained(layout, params)) for name, params in [*CASES.items(), ("ema=0.9", EMA)]}


@pytest.mark.full(but=("None",))
@pytest.mark.parametrize("layout", [None, *EACH])
def test_averages_equal_torchs_on_one_process(ranks: Ranks, layout: str | None) -> None:
    for got in [_all_cases(None)] if layout is None else ranks(2, _all_cases, layout):
        for name, params in [*CASES.items(), ("ema=0.9", EMA)]:
            assert largest_difference(got[name], _reference(params)) < 1e-12, name


def test_updates_are_counted_and_not_micro_batches() -> None:
    params = CASES["warm-up and frequency"]
    unit = _trained(None, params, micro=2)
    assert largest_difference(_averages(unit), _reference(params, micro=2)) < 1e-12
    assert unit.swa_model is not None
    assert (unit.swa_model.passed, unit.swa_model.n_averaged) == (UPDATES, 2)  # of the updates 3 and 6


@pytest.mark.parametrize(("warmup", "warned"), [(5, False), (6, True), (100, True)])
def test_training_that_ends_before_the_averages_began_says_so(warmup: int, warned: bool, caplog: Any) -> None:
    unit = Regression(swa_params=ech.units.SWAParams(warmup, 1))
    ech.train(unit, [batch(4, i) for i in range(3)], max_epochs=2)
    said = [r.getMessage() for r in caplog.records if "before the averages of the weights began" in r.getMessage()]
    assert bool(said) == warned
    assert all("after 6 updates" in each and f"warmup_steps_or_epochs={warmup}" in each for each in said)


class Evaluated(Regression):
    """Notes what the module computes with in evaluations."""

    def on_eval_step_end(self, state: ech.State, data: Any, step: int, loss: torch.Tensor, outputs: Any) -> None:
        self.seen = outputs.clone()

    def on_predict_step_end(self, state: ech.State, data: Any, step: int, outputs: Any) -> None:
        self.seen = outputs.clone()


def _evaluations(layout: str | None) -> dict[str, Any]:
    """Evaluations within fit, in the middle of an epoch; the training around them must not notice."""
    x, y = batch(4, 77)
    found: dict[str, Any] = {}
    for used in (False, True):
        how = {"ema": 0.9} if used else {"swa_params": EMA}
        unit = Evaluated(layout=layout, step_lr_interval="step", **how)
        ech.fit(unit, _mine(unit), [(x, y)], max_epochs=1, evaluate_every_n_updates=2)
        found[f"outputs {used}"], found[f"loss {used}"] = unit.seen, unit.eval_loss
        found[f"weights {used}"] = {n: _whole(p) for n, p in unit.prepared.unwrapped.named_parameters()}
        found[f"averages {used}"] = _averages(unit)
        ech.predict(unit, [x])
        found[f"predicted {used}"] = unit.seen
        assert unit.swa_model is not None
        unit.module.eval()
        found[f"called {used}"] = unit.swa_model(x).clone()
    return found


def _outputs(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    module = net().eval()
    module.load_state_dict(weights)
    return module(x).detach()


def _check_evaluations(found: dict[str, Any]) -> None:
    x, y = batch(4, 77)
    assert largest_difference(found["weights False"], found["weights True"]) == 0  # training did not notice
    assert largest_difference(found["averages False"], found["averages True"]) == 0
    own, averaged = _outputs(found["weights True"], x), _outputs(found["averages True"], x)
    assert (own - averaged).abs().max() > 1e-3  # else the rest says nothing
    for name, used in (("outputs", True), ("predicted", True), ("called", True), ("called", False)):
        assert (found[f"{name} {used}"] - averaged).abs().max() < 1e-12, name
    for name in ("outputs", "predicted"):
        assert (found[f"{name} False"] - own).abs().max() < 1e-12, name
    assert found["loss True"] == pytest.approx(float(nn.functional.mse_loss(averaged, y)), rel=1e-12)


@pytest.mark.full(but=("None",))
@pytest.mark.parametrize("layout", [None, *KINDS])
def test_evaluations_use_the_averages_if_asked_to(ranks: Ranks, layout: str | None) -> None:
    for found in [_evaluations(None)] if layout is None else ranks(2, _evaluations, layout):
        _check_evaluations(found)


def test_the_weights_come_back_after_an_exception() -> None:
    unit = _trained(None, ech.units.SWAParams(0, 1, ema_decay=0.5, use_in_evaluation=True), module=net())
    own, averages = {n: _whole(p) for n, p in unit.module.named_parameters()}, _averages(unit)
    assert largest_difference(own, averages) > 1e-4

    def fails(state: ech.State, u: Any) -> None:
        assert largest_difference({n: _whole(p) for n, p in u.module.named_parameters()}, averages) == 0
        with refused(LoopError):
            u.swa_model.state_dict()
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        ech.evaluate(unit, [batch(2, 0)], callbacks=[Hooks(on_eval_step_end=fails)])
    assert largest_difference({n: _whole(p) for n, p in unit.module.named_parameters()}, own) == 0
    assert largest_difference(_averages(unit), averages) == 0


def _save_and_resume(layout: str, folder: str) -> list[dict[str, torch.Tensor]]:
    unit = Regression(module=Counting(), layout=layout, ema=0.9, step_lr_interval="step")
    ech.train(unit, _mine(unit)[:5], max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder)])
    return [_resume(layout, folder), _resume("ddp" if layout != "ddp" else "fsdp", folder)]


def _resume(layout: str | None, folder: str) -> dict[str, torch.Tensor]:
    unit = Regression(module=Counting(), layout=layout, ema=0.9, step_lr_interval="step")
    assert ech.DistributedCheckpointSaver.restore_from_latest(folder, unit)
    ech.train(unit, _mine(unit)[5:], max_epochs=2)
    assert unit.swa_model is not None
    assert (unit.swa_model.passed, unit.swa_model.n_averaged) == (6, 6)
    return _averages(unit)


@pytest.mark.full
@pytest.mark.parametrize("layout", [*KINDS, "hsdp"])
def test_averages_are_saved_and_restored_across_strategies_and_world_sizes(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    want = _reference(EMA)
    for resumed in (*ranks(2, _save_and_resume, layout, str(tmp_path)), [_resume(None, str(tmp_path))]):
        for got in resumed:
            assert largest_difference(got, want) < 1e-12


def _held(layout: str) -> tuple[int, int]:
    unit = _trained(layout, ech.units.SWAParams(0, 1), updates=1, module=net(width=64))
    assert unit.swa_model is not None
    parts = [v for v in unit.swa_model.state_dict().values() if isinstance(v, torch.Tensor)]
    held = sum((v.to_local() if hasattr(v, "to_local") else v).numel() for v in parts)
    return held, sum(p.numel() for p in Net(64).parameters())


def test_sharded_averages_are_split_over_the_ranks(ranks: Ranks) -> None:
    for held, every in ranks(2, _held, "fsdp"):
        assert held < 0.52 * every


def test_the_learning_rate_while_averaging() -> None:
    """The scheduler until the warm-up is over, then SWALR, as by hand."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    for anneal in (0, 3):
        rates: list[float] = []
        params = ech.units.SWAParams(2, 1, swalr_params=ech.units.SWALRParams(anneal, "cos", 0.01))
        unit = Regression(swa_params=params, schedule=schedule, step_lr_interval="step")
        note = Hooks(on_train_step_end=lambda state, unit, rates=rates: rates.append(unit.optimizer.param_groups[0]["lr"]))
        ech.train(unit, [batch(2, i) for i in range(7)], max_epochs=1, callbacks=[note])
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        before = schedule(optimizer)
        swalr, want = None, []
        for update in range(7):
            optimizer.step()
            if update >= 2:
                if swalr is None:
                    lr = optimizer.param_groups[0]["lr"]
                    swalr = SWALR(optimizer, 0.01, anneal, "cos")
                    optimizer.param_groups[0]["lr"] = lr
                swalr.step()
            else:
                before.step()
            want.append(optimizer.param_groups[0]["lr"])
        assert rates == pytest.approx(want, rel=1e-12)
        assert rates[1] == 0.025 and rates[-1] == pytest.approx(0.01)


class Overflow(Regression):
    """An inf in the second update's loss."""

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        loss, out = super().compute_loss(state, data)
        return loss * (float("inf") if self.train_progress.num_steps_completed == 1 else 1.0), out


def test_a_skipped_update_is_not_averaged() -> None:
    precision = ech.layouts.Precision(torch.float16, init_scale=1024.0)
    unit = Overflow(
        module=net(dtype=torch.float32), precision=precision, swa_params=ech.units.SWAParams(0, 1), step_lr_interval="step"
    )
    ech.train(unit, [batch(8, i, torch.float32) for i in range(4)], max_epochs=1)
    assert unit.swa_model is not None
    assert (unit.swa_model.passed, unit.swa_model.n_averaged) == (3, 3)


def _not_averaged() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    with pytest.raises(LayoutError, match="layout='fsdp'"):
        Regression(module=module, swa_params=ech.units.SWAParams(0, 1))
    for layout in ("fsdp", "hsdp"):
        unit = Regression(layout=layout)
        for target in (unit.module, nn.ModuleList([unit.module])):
            with pytest.raises(LayoutError, match=r"cannot be copied.*ema=0\.999"):
                copy.deepcopy(target).eval()  # as timm's ModelEmaV3 keeps its averages


def test_the_older_fsdp_and_copies_of_a_sharded_module_are_refused_with_the_remedy(ranks: Ranks) -> None:
    ranks(2, _not_averaged)


def _frozen(layout: str) -> tuple[float, float, int]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    model[0].requires_grad_(False)
    unit = Regression(module=model, layout=layout, ema=0.9)
    first = whole(unit.module)["0.weight"].clone()
    ech.train(unit, _mine(unit), max_epochs=1)
    own = dict(unit.prepared.unwrapped.named_buffers())
    mean = own["1.running_mean"].clone()
    with unit.evaluating():
        averaged = dict(unit.prepared.unwrapped.named_buffers())
        frozen = float((whole(unit.module)["0.weight"] - first).abs().max())
        return frozen, float((averaged["1.running_mean"] - mean).abs().max()), int(averaged["1.num_batches_tracked"])


@pytest.mark.parametrize("layout", ["none", "fsdp"])
def test_frozen_parts_stay_and_running_statistics_are_averaged(ranks: Ranks, layout: str) -> None:
    for moved, statistics, batches in ranks(1 if layout == "none" else 2, _frozen, layout):
        assert moved == 0 and statistics > 0 and batches == 6


def test_what_is_exported_loads_into_the_module(tmp_path: Path) -> None:
    unit = Regression(module=Counting(), ema=0.9)
    ech.train(unit, _batches(0, 1), max_epochs=1, checkpoints=str(tmp_path / "saved"))
    (folder,) = (tmp_path / "saved").glob("step-*")
    export_torch(folder, tmp_path / "averaged.pt", state="swa_model")
    loaded = Counting()
    loaded.load_state_dict(torch.load(tmp_path / "averaged.pt"))
    averages = _averages(unit)
    assert all(torch.equal(value, averages[name]) for name, value in loaded.state_dict().items())
    assert not torch.equal(loaded.net.last.weight, unit.module.net.last.weight)  # type: ignore[union-attr]


class Caching(nn.Module):
    """The shared model with a table that is made in the first forward pass and grows with what it is asked, as that of rotary
    embeddings does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.rows = net(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += 1
        self.register_buffer("table", torch.arange(self.rows).double(), persistent=False)
        return self.net(x) + self.table[0]


def _cached(layout: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    def run(to: Path | None, until: int) -> dict[str, torch.Tensor]:
        unit = goes_on(to, Regression(module=Caching(), layout=layout, ema=0.9), until)
        ech.evaluate(unit, [batch(2, 50 + i) for i in range(4)])
        return _averages(unit)

    run(folder, 2)
    run(folder, 4)
    return [run(folder, 6), run(None, 6)]


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_buffer_that_a_forward_pass_makes_or_lets_grow_is_the_modules_own(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    for got, want in ranks(2, _cached, layout, tmp_path):
        assert "table" not in got and largest_difference(got, want) == 0


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x[:, :2]).real.sum(1, keepdim=True)


def test_complex_parameters_are_averaged() -> None:
    seen: list[torch.Tensor] = []
    unit = Regression(module=Turning(), options=ech.UnitOptions(averaging=ech.units.SWAParams(0, 1, averaging_method="swa")))
    noted = Hooks(on_train_step_end=lambda state, unit: seen.append(unit.module.weight.detach().clone()))
    ech.train(unit, [batch(4, i) for i in range(3)], max_epochs=1, callbacks=[noted])
    assert (_averages(unit)["weight"] - torch.stack(seen).mean(0)).abs().max() < 1e-6
