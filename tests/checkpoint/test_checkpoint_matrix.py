"""Saved under any layout on 1, 2 or 4 ranks, restored under any other: weights, optimizer state, averages, buffers, all of it.

Every checkpoint is compared with the state of plain PyTorch at that step; what is restored from it is compared, piece by piece
and bit by bit, with its files; and then training goes on and is compared with plain PyTorch again. All ranks see the same
batches, so that batch norm, too, has one right answer under every layout.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import echelon as ech
from echelon.checkpoint import store
from echelon.checkpoint.tensors import Tensors, local_files
from echelon.loop.auto.averaged import AveragedWeights
from echelon.parallel.parallelize import parallelize
from echelon.parallel.shards import local
from echelon.parallel.state.state import states_by_name
from echelon.parallel.strategy import Prepared
from echelon.world.init import World
from tests.conftest import Ranks
from tests.kit.models import batch, net
from tests.kit.units import Regression

Saver = ech.DistributedCheckpointSaver
CPU = torch.device("cpu")
KINDS = ["ddp", "fsdp1", "fsdp", "hsdp", "zero1", "zero2", "tp"]
SIZES = [1, 2, 4]
CELLS = ["plain", *(f"{kind}-{size}" for size in SIZES for kind in KINDS)]
SAVED, MORE = 4, 2  # steps before the save, and after the restore


class Odd(nn.Module):
    """Five rows and columns, which no number of ranks divides, but for the layers that tensor parallelism splits."""

    tp_plan: ClassVar[dict[str, str]] = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)  # buffers, one of them a count
        self.up, self.down = nn.Linear(5, 12), nn.Linear(12, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.first.weight
        self.side = nn.Linear(5, 5)  # used in every other step
        self.late = nn.Linear(5, 5)  # not used before the save: it has no optimizer state then
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:  # (B, 5) -> (B, 3)
        x = self.norm(torch.tanh(self.first(x)))
        x = x + self.down(torch.tanh(self.up(x)))
        x = x + self.tied(self.frozen(x))
        if step % 2 == 0:
            x = x + self.side(x)
        if step >= SAVED:
            x = x + torch.tanh(self.late(x))
        return self.last(x)


def _data(step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    generator = torch.Generator().manual_seed(step)
    made = (torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    return *made, step  # type: ignore[return-value]


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    """Three groups: with and without weight decay, and the last layer with another rate. The frozen layer is in one, too."""
    named = dict(module.named_parameters())
    last = [p for n, p in named.items() if "last" in n]
    biases = [p for n, p in named.items() if "last" not in n and n.endswith("bias")]
    rest = [p for n, p in named.items() if "last" not in n and not n.endswith("bias")]
    return [{"params": rest}, {"params": biases, "weight_decay": 0.0}, {"params": last, "lr": 0.01, "weight_decay": 0.3}]


def _strategy(kind: str) -> Any:
    unused = ech.DDPStrategy(find_unused_parameters=True)
    return {"ddp": unused, "zero1": unused.but(shard_optimizer=True), "plain": "none"}.get(kind, kind)


def _prepared(module: nn.Module, kind: str) -> Prepared[Any]:
    if kind != "fsdp1":
        return parallelize(module, _strategy(kind), CPU)
    with warnings.catch_warnings():  # of one rank, and of the process group's device
        warnings.simplefilter("ignore")
        return Prepared.of(FSDP(module, device_id=CPU, use_orig_params=True), World.current(CPU))


class Everything(ech.TrainUnit[Any]):
    """Two modules, each with an optimizer of another kind, its own schedule, and averages of one of them."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        one, two = (_prepared(Odd().double(), kind) for _ in range(2))
        self.one, self.two = one.module, two.module
        self.zeros = False  # as the older FSDP: a parameter that is not used has a gradient of zeros
        # Dampening tells a buffer of zeros from none at all.
        self.sgd = one.optimizer(lambda m: torch.optim.SGD(_groups(m), 0.05, 0.9, dampening=0.2, weight_decay=0.1))
        self.adam = two.optimizer(lambda m: torch.optim.AdamW(_groups(m), 0.02, amsgrad=True))
        self.steps = torch.optim.lr_scheduler.MultiStepLR(self.sgd, [2, 5], gamma=0.5)
        self.cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.adam, 9)
        # The older FSDP hides what would be averaged.
        self.averages = None if kind == "fsdp1" else AveragedWeights(two, ech.units.SWAParams(1, 1, ema_decay=0.7))

    def train_step(self, state: Any, data: Any) -> None:
        x, y, step = data
        for module, optimizer, schedule in ((self.one, self.sgd, self.steps), (self.two, self.adam, self.cosine)):
            nn.functional.mse_loss(module(x, step), y).backward()
            if self.zeros:
                for p in (p for p in module.parameters() if p.requires_grad and p.grad is None):
                    p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if self.averages is not None:
            self.averages.step()

    def go_on(self) -> None:
        for step in range(SAVED, SAVED + MORE):
            self.train_step(None, _data(step))


def _save(folder: Path, kinds: list[str]) -> None:
    for kind in kinds:
        size = dist.get_world_size() if dist.is_initialized() else 1
        name = kind if kind == "plain" else f"{kind}-{size}"
        ech.train(Everything(kind, 0), [_data(i) for i in range(SAVED)], max_epochs=1, callbacks=[Saver(folder / name)])


@functools.lru_cache  # many kinds read the same one
def _wholes(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors and all other values of a checkpoint's states by name, by one process."""
    with local_files(folder) as files:
        saved = Tensors(files)
        rest = files.state(store.STATE)
        numbers = {f"{n}.{k}": v for n in ("one", "two", "sgd", "adam", "averages") for k, v in rest.get(n, {}).items()}
        return {name: saved.whole(name).clone() for name in saved.index}, numbers


def _plain_state(unit: Everything) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The same of a unit in one process, straight from torch's objects."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, module in (("one", unit.one), ("two", unit.two)):
        tensors |= {f"{name}.{k}": v.clone() for k, v in module.state_dict().items()}
    for name, module, optimizer in (("sgd", unit.one, unit.sgd), ("adam", unit.two, unit.adam)):
        names = {p: n for n, p in module.named_parameters()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                numbers |= {f"{name}.param_groups.{names[p]}.{k}": v for k, v in group.items() if k != "params"}
                tensors |= {f"{name}.state.{names[p]}.{k}": v.clone() for k, v in optimizer.state.get(p, {}).items()}
    assert unit.averages is not None
    for key, value in unit.averages.state_dict().items():
        (tensors if isinstance(value, torch.Tensor) else numbers)[f"averages.{key}"] = (
            value.clone() if isinstance(value, torch.Tensor) else value
        )
    return tensors, numbers


def _apart(
    unit: Everything, want: tuple[dict[str, torch.Tensor], dict[str, Any]], every: list[str] | None = None
) -> tuple[float, list[str]]:
    """This rank's pieces of a unit's state against whole ones: the largest difference, and names in one of them only."""
    found: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for name, state in states_by_name(unit.app_state()).items():
        if getattr(state, "keyed_by_name", False):
            for key, value in state.state_dict().items():
                (found if isinstance(value, torch.Tensor) else numbers)[f"{name}.{key}"] = value
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(found, is_coordinator=True)
    tensors, wanted_numbers = want
    worst, odd = 0.0, {k for k in numbers.keys() | wanted_numbers.keys() if numbers.get(k) != wanted_numbers.get(k)}
    for item in planner.create_local_plan().items:
        name = item.index.fqn
        if name not in tensors:
            odd.add(name)
            continue
        part = tensors[name]
        for dim, (offset, size) in enumerate(zip(item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        if part.numel():
            worst = max(worst, float((planner.resolve_data(item).double() - part.double()).abs().nan_to_num(9e9).max()))
    # A rank of a divided optimizer has no tensors of what others own.
    shared = {n for n in tensors if "zero1" not in (every or []) or ".state." not in n}
    return worst, sorted(odd | (shared - found.keys()))


def _spoil(unit: Everything) -> None:
    """Change all that a restore puts back."""
    with torch.no_grad():
        means = unit.averages.state_dict().values() if unit.averages is not None else ()
        states = [v for o in (unit.sgd, unit.adam) for s in o.state.values() for v in s.values()]
        modules = [t for m in (unit.one, unit.two) for t in (*m.parameters(), *m.buffers())]
        for tensor in (t for t in (*modules, *states, *means) if isinstance(t, torch.Tensor)):
            local(tensor.detach()).add_(1)
    for group in (*unit.sgd.param_groups, *unit.adam.param_groups):
        group.update(lr=9.0, weight_decay=9.0)
    unit.steps.last_epoch = unit.cosine.last_epoch = 99
    unit.train_progress.increment_step()


def _load(folder: Path, kinds: list[str], sources: list[list[str]], final: Any) -> dict[str, str]:
    """Checkpoints into each kind: what went wrong, by pair. Bit-equal states go on alike: every fourth pair is trained.

    Args:
        sources: of those in one list, which look alike, each kind takes another.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    wrong: dict[str, str] = {}
    for row, kind in enumerate(kinds):
        unit = Everything(kind, 7)  # fresh for its first checkpoint, and used for the others
        averages = unit.averages
        for column, alike in enumerate(sources):
            name = alike[(row + size) % len(alike)]
            pair = f"{name} -> {kind}-{size}"
            # What the older FSDP saved has no averages, and it wants none.
            unit.averages = None if name.startswith("fsdp1") else averages
            mine = [
                w if unit.averages is not None else _without_averages(w)
                for w in (_wholes(folder / name / f"step-{SAVED:08d}"), final["fsdp1" in name, kind == "fsdp1"])
            ]
            try:
                left_out = ("averages",) if unit.averages is None else ()
                options = ech.callbacks.RestoreOptions(allow_changes=left_out)
                Saver.restore(folder / name / f"step-{SAVED:08d}", unit, restore_options=options)
                worst, odd = _apart(unit, mine[0], [kind])
                if worst or odd:
                    wrong[pair] = f"restored: {worst:.1e} {odd[:6]}"
                assert unit.train_progress.num_steps_completed == SAVED
                if (row + column + size) % 4:
                    _spoil(unit)
                    continue
                unit.go_on()
                worst, odd = _apart(unit, mine[1], [kind])
                if not worst < 1e-11 or odd:
                    wrong[pair] = f"{wrong.get(pair, '')} two steps later: {worst:.1e} {odd[:6]}"
            except Exception as error:
                wrong[pair] = f"{type(error).__name__}: {str(error)[:300]}"
    return wrong


def _layout(folder: Path) -> str:
    """What there is of which tensor: checkpoints that agree in this differ in nothing that a reader could see."""
    with local_files(folder / f"step-{SAVED:08d}") as files:
        return str([(name, sorted(p[:2] for p in entry["pieces"])) for name, entry in Tensors(files).index.items()])


def _without_averages(state: Any) -> Any:
    return tuple({k: v for k, v in each.items() if not k.startswith("averages.")} for each in state)


def _plainly(zeros_before: bool, zeros_after: bool) -> tuple[Any, Any]:
    """Plain PyTorch's state at the save, and two steps later."""
    unit = Everything("plain", 0)
    unit.zeros = zeros_before
    for step in range(SAVED):
        unit.train_step(None, _data(step))
    saved, unit.zeros = _plain_state(unit), zeros_after
    unit.go_on()
    return saved, _plain_state(unit)


@pytest.mark.full
def test_every_strategy_and_size_reads_what_every_other_wrote(ranks: Ranks, tmp_path: Path) -> None:
    plainly = {(before, after): _plainly(before, after) for before in (False, True) for after in (False, True)}
    _save(tmp_path, ["plain"])
    for size in SIZES:
        ranks(size, _save, tmp_path, KINDS, timeout_s=600)
    for cell in CELLS:  # what was written is the state of plain PyTorch, whoever wrote it
        tensors, numbers = _wholes(tmp_path / cell / f"step-{SAVED:08d}")
        reference = plainly["fsdp1" in cell, False][0]
        want, wanted_numbers = _without_averages(reference) if "fsdp1" in cell else reference
        assert (cell, sorted(tensors.keys() ^ want.keys()), numbers) == (cell, [], wanted_numbers)
        apart = {n: float((tensors[n].double() - want[n].double()).abs().max()) for n in want}
        assert {n: d for n, d in apart.items() if not d < 1e-11} == {}, cell
    final = {pair: later for pair, (_, later) in plainly.items()}
    wrong = _load(tmp_path, ["plain"], [[cell] for cell in CELLS], final)
    layouts: dict[str, list[str]] = {}
    for cell in CELLS:
        layouts.setdefault(_layout(tmp_path / cell), []).append(cell)
    assert 7 <= len(layouts) <= 12, layouts
    for size in SIZES:
        for each in ranks(size, _load, tmp_path, KINDS, list(layouts.values()), final, timeout_s=600):
            wrong |= each
    assert wrong == {}


# --- what the matrix leaves out: the gradient scaler, and the older FSDP as it is by default


def _half(kind: str) -> Regression:
    scale = ech.layouts.Precision(torch.float16, init_scale=256.0, growth_interval=2)
    return Regression(module=net(dtype=torch.float32), layout=kind, optimizer="AdamW", precision=scale)


class Losses(Regression):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []

    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: ech.units.TrainStepResults) -> None:
        self.losses.append(float(results.loss))


def _older(how: str, seed: int) -> Losses:
    module: nn.Module = net(seed)
    if how != "plain":
        hybrid = ShardingStrategy.HYBRID_SHARD if how == "hybrid" else ShardingStrategy.FULL_SHARD
        groups = (dist.new_subgroups(2)[0], dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]) if how == "hybrid" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = ModuleWrapPolicy({nn.Sequential})
            module = FSDP(module, groups, hybrid, auto_wrap_policy=policy, device_id=CPU, use_orig_params=how == "hybrid")  # type: ignore[arg-type]
    return Losses(module=module, optimizer="AdamW", lr=0.05)


def _others(folder: Path, saves: list[str], loads: list[tuple[str, str]]) -> dict[str, Any]:
    """Saves of kinds, and restores of what another process saved: scales, and losses of the steps after it."""
    data = [batch(8, i) for i in range(6)]
    short = [(x.float(), y.float()) for x, y in data]
    for kind in saves:
        half = kind in ("none", "ddp", "fsdp")
        unit = _half(kind) if half else _older(kind, 0)
        ech.train(unit, (short if half else data)[:3], max_epochs=1, callbacks=[Saver(folder / kind)])
    found: dict[str, Any] = {}
    for source, kind in loads:
        if kind in ("none", "ddp", "fsdp"):
            unit = _half(kind)
            Saver.restore_from_latest(folder / source, unit)
            assert unit.grad_scaler is not None
            found[f"{source} -> {kind}"] = {
                k: v for k, v in unit.grad_scaler.state_dict().items() if "scale" in k or "track" in k
            }
        else:
            unit = _older(kind, 9)
            Saver.restore_from_latest(folder / source, unit)
            ech.train(unit, data[3:], max_epochs=2)
            found[f"{source} -> {kind}"] = unit.losses
    return found


@pytest.mark.full
def test_the_scaler_and_the_older_fsdp_by_default_and_with_copies(ranks: Ranks, tmp_path: Path) -> None:
    _others(tmp_path, ["none", "plain"], [])
    ranks(2, _others, tmp_path, ["fsdp"], [])
    found = ranks(4, _others, tmp_path, ["flat", "hybrid"], [(a, b) for a in ("flat", "plain") for b in ("flat", "hybrid")])[2]
    found |= ranks(2, _others, tmp_path, [], [("fsdp", "ddp"), ("none", "fsdp"), ("hybrid", "flat")])[1]
    found |= _others(tmp_path, [], [("fsdp", "none"), ("flat", "plain"), ("hybrid", "plain")])
    reference = _older("plain", 0)
    ech.train(reference, [batch(8, i) for i in range(3)], max_epochs=1)
    ech.train(reference, [batch(8, i) for i in range(3, 6)], max_epochs=2)
    for pair, got in found.items():
        if isinstance(got, dict):
            assert got == {"scale": 512.0, "_growth_tracker": 1}, pair
        else:
            assert got == pytest.approx(reference.losses[3:], rel=1e-11), pair
    assert len(found) == 10


class Large(ech.AutoUnit[Any]):
    """100 MB of weights, and as much momentum."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        module = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(6)))
        super().__init__(module=module, device=CPU, layout="fsdp")

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        return self.module(data).square().mean(), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.SGD(module.parameters(), 1e-3, 0.9), None


def _save_large(folder: Path) -> float:
    unit = Large(0)
    ech.train(unit, [torch.ones(1, 2048)], max_epochs=1, callbacks=[Saver(folder)])
    return _sum(unit)


def _sum(unit: Large) -> float:
    return float(sum(local(v["momentum_buffer"]).double().sum() for v in unit.optimizer.state.values()))


def _memory(what: str) -> float:
    """Of this process, in MB. Not `ru_maxrss`, which a forked process has from its parent."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1024


def _load_large(folder: Path) -> tuple[float, float]:
    unit = Large(1)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts over
    before = _memory("VmRSS")
    Saver.restore_from_latest(folder, unit)
    return _memory("VmHWM") - before, _sum(unit)


def test_no_rank_ever_holds_the_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    """Of 200 MB each of four ranks has 50 in the end, 25 of them, the weights, from the beginning."""
    total = sum(ranks(2, _save_large, tmp_path / "c"))
    loaded = ranks(4, _load_large, tmp_path / "c")
    assert all(20 < grown < 95 for grown, _ in loaded), loaded
    assert sum(part for _, part in loaded) == pytest.approx(total, rel=1e-9)
