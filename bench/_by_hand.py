"""The program of a rank of bench/strategies.py: every layout written by hand with torch alone, and beside it through AutoUnit."""

from __future__ import annotations

import ctypes
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import echelon as ech

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from _peak import PeakMemory
from gpt import GPT

CLIP = 1.0
M_MMAP_THRESHOLD = -3  # glibc, malloc.h


# --- by hand


def wrap(model: nn.Module, layout: str, blocks: Any) -> nn.Module:
    """Wrap the model for `layout` as torch's documentation shows it; "ddp as torch makes it" sets no option."""
    size = dist.get_world_size()
    if layout == "ddp as torch makes it":
        return DistributedDataParallel(model)
    if layout in ("ddp", "zero1"):
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if layout.startswith("tp"):
        mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        parallelize_module(model, mesh["tp"], {name: styles[style]() for name, style in GPT.tp_plan.items()})
        if layout == "tp alone":
            return model
        mesh = mesh["dp"]
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    keep = {"reshard_after_forward": False} if layout == "zero2" else {}
    for block in blocks:
        fully_shard(block, mesh=mesh, **keep)
    return fully_shard(model, mesh=mesh, **keep)


def make_optimizer(module: nn.Module, *, divided: bool = False, fused: bool = True) -> torch.optim.Optimizer:
    if divided:
        kind: Any = torch.optim.AdamW
        return ZeroRedundancyOptimizer(module.parameters(), kind, parameters_as_bucket_view=True, lr=1e-3, fused=fused)
    # One group for each kind of tensor: fused kernels refuse a mixture of kinds.
    kinds: dict[Any, list[nn.Parameter]] = {}
    for p in module.parameters():
        kinds.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return torch.optim.AdamW([{"params": same} for same in kinds.values()], lr=1e-3, fused=fused)


def synchronise(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Send no gradients before the window's last micro-batch."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    elif isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return nullcontext()


class ByHand:
    """The bare loop."""

    def __init__(self, layout: str, model: nn.Module, accumulation: int, clip: float | None) -> None:
        self.module = wrap(model, layout, model.blocks)
        self.optimizer = make_optimizer(self.module, divided=layout == "zero1")
        self.accumulation, self.clip = accumulation, clip

    def train(self, batches: list[Any]) -> None:
        for i, (inputs, targets) in enumerate(batches):
            last = (i + 1) % self.accumulation == 0
            with synchronise(self.module, last):
                logits = self.module(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                (loss / self.accumulation if self.accumulation > 1 else loss).backward()
            if last:
                if self.clip is not None:
                    nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()


# --- through echelon


class Unit(ech.AutoUnit[Any]):
    """The same recipe."""

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        inputs, targets = data
        logits = self.module(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return make_optimizer(module), None


# --- speed: the two take turns in the same processes


@dataclass(frozen=True)
class Case:
    """A comparison.

    Args:
        hand: the layout's name in `wrap`, if it differs from echelon's.
        batch, context: rows and bytes of a micro-batch on a rank.
        heads: of attention; by default one for 64 features.
        turns: pairs of measurements; each is `updates` of one side and then of the other.
        bitwise: echelon's side is bit-equal; the side by hand is not.
    """

    layout: str
    hand: str | None = None
    accumulation: int = 1
    bitwise: bool = False
    turns: int = 100
    updates: int = 2
    width: int = 128
    depth: int = 4
    batch: int = 4
    context: int = 64
    heads: int | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.layout.startswith("ep="):
            from moe import Model

            return Model(self.width, self.depth, 8, self.context)
        return GPT(self.width, self.depth, heads=self.heads or max(1, self.width // 64), context=self.context)


WARM_TURNS = 4


class Turns:
    """AutoUnit's data. After each turn of AutoUnit's steps it trains the bare loop on the same batches, and measures both times.

    The loop asks for a batch when it has finished the previous step, so the time until it asks again is one whole step.
    """

    def __init__(self, case: Case, hand: ByHand) -> None:
        self._case, self._hand = case, hand
        # In these layouts, ranks share samples.
        shared = case.layout == "tp" or case.layout.startswith(("cp=", "pp="))
        generator = torch.Generator().manual_seed(0 if shared else dist.get_rank())
        shape = (2, case.updates * case.accumulation, case.batch, case.context)
        self._batches = list(zip(*torch.randint(0, 256, shape, generator=generator), strict=True))
        # By side: wall time of an update, and processor time, which other programs of the machine disturb less.
        self.wall_ms: dict[str, list[float]] = {"echelon": [], "by hand": []}
        self.cpu_ms: dict[str, list[float]] = {"echelon": [], "by hand": []}
        self._turns = WARM_TURNS + case.turns + 1  # the last turn is not counted: it includes the end of the epoch
        self._running = self._run()

    def __len__(self) -> int:
        return self._turns * len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return self._running

    def finish(self) -> None:
        """Run the last turn by hand: AutoUnit's loop knows the length, and does not ask for a batch after the last."""
        next(self._running, None)

    def _run(self) -> Iterator[Any]:
        for turn in range(self._turns):
            clocks = _clocks()
            yield from self._batches
            self._note("echelon", turn, clocks)
            exact = torch.are_deterministic_algorithms_enabled()  # AutoUnit sets this for the whole process
            torch.use_deterministic_algorithms(False)
            clocks = _clocks()
            self._hand.train(self._batches)
            self._note("by hand", turn, clocks)
            torch.use_deterministic_algorithms(exact)

    def _note(self, side: str, turn: int, since: tuple[float, float]) -> None:
        if WARM_TURNS <= turn < self._turns - 1:
            for found, before, now in zip((self.wall_ms, self.cpu_ms), since, _clocks(), strict=True):
                found[side].append(1e3 * (now - before) / self._case.updates)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def compare(case: Case) -> dict[str, Any]:
    """Step times of both sides on this rank, and the largest difference of their parameters at the end."""
    torch.set_num_threads(1)
    ech.init_from_env()
    # torch's own norm refuses a mixture of meshes.
    clip = None if case.layout == "tp" else CLIP
    if case.layout.startswith("cp="):
        from _context_by_hand import ContextByHand

        hand: ByHand = ContextByHand(case.model(), clip)
    elif case.layout.startswith("pp="):
        from _pipeline_by_hand import PipelineByHand

        hand = PipelineByHand(case.model(), case.accumulation, clip)
    elif case.layout.startswith("ep="):
        from _experts_by_hand import ExpertsByHand

        hand = ExpertsByHand(case.model(), clip)
    else:
        hand = ByHand(case.hand or case.layout, case.model(), case.accumulation, clip)
    unit = Unit(
        module=case.model(),
        layout=case.layout,
        clip_grad_norm=clip,
        accumulate=case.accumulation,
        options=ech.UnitOptions(deterministic="bitwise" if case.bitwise else None),
    )
    turns = Turns(case, hand)
    ech.train(unit, turns, max_epochs=1)
    turns.finish()
    return {
        "wall_ms": turns.wall_ms,
        "cpu_ms": turns.cpu_ms,
        "difference": largest_difference(hand.module, unit.module),
        "parameters": sum(p.numel() for p in case.model().parameters()),
    }


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two modules' parameters; this rank may hold different parts of each."""
    if one.__module__ == "_pipeline_by_hand":  # a stage counts its blocks from 0
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return float(torch.stack([(_whole(a) - _whole(b)).abs().max() for a, b in pairs]).max())
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    names = {name.removeprefix("module.").replace("_orig_mod.", ""): name for name in theirs}
    differences = [_difference(mine[n], theirs[names[n.removeprefix("module.")]]) for n in sorted(mine)]
    return float(torch.stack(differences).max())


def _difference(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The largest difference; `mine` may be this rank's part of `theirs` along the first dim."""
    mine, theirs = _whole(mine), _whole(theirs)
    if mine.shape != theirs.shape:
        theirs = theirs.chunk(dist.get_world_size())[dist.get_rank()]
    return (mine - theirs).abs().max()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# --- memory


class Wide(nn.Module):
    """Layers that use memory only for parameters: a batch of one row has almost no activations."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class WideUnit(ech.AutoUnit[Any]):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        out = self.module(data[0])
        return out.square().mean(), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return make_optimizer(module, fused=False), None


UPDATES = 4  # DistributedDataParallel rebuilds its buckets in the second


def peak_memory(kind: str, side: str, width: int, depth: int) -> dict[str, Any]:
    """The largest resident size of this rank while it builds and trains, minus that of the same job with a tiny model.

    The tiny model comes first, in the same process, so that the code that torch loads at first use is not counted: 85 MiB, most
    of it the compiler's front end, which DistributedDataParallel and optimizers import.
    """
    torch.set_num_threads(1)
    # Freed memory must go back to the system at once: the measure is the system's count of resident pages.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**18)
    ech.init_from_env()
    run = _by_hand if side == "by hand" else _by_echelon
    run(kind, 64, 2)
    before = PeakMemory()
    times = run(kind, width, depth)
    before.pause()
    return {"bytes": before.peak(), "step_ms": 1e3 * statistics.median(times[2:])}


def _by_hand(kind: str, width: int, depth: int) -> list[float]:
    model = Wide(width, depth)
    module = wrap(model, kind, model.blocks)
    optimizer = make_optimizer(module, divided=kind == "zero1", fused=False)
    x, times = torch.randn(1, width), []
    for _ in range(UPDATES):
        start = time.perf_counter()
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return times


def _by_echelon(kind: str, width: int, depth: int) -> list[float]:
    unit = WideUnit(module=Wide(width, depth), layout=kind)
    x, asked = torch.randn(1, width), []

    class Data:
        def __len__(self) -> int:
            return UPDATES + 1

        def __iter__(self) -> Iterator[Any]:
            for _ in range(UPDATES + 1):
                asked.append(time.perf_counter())
                yield (x,)

    ech.train(unit, Data(), max_epochs=1)
    return [b - a for a, b in itertools.pairwise(asked)]
