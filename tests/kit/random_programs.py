"""Programs that nobody wrote: loops of one's own whose options are drawn, and the same loop in plain PyTorch in one process.

They put together what each has a test of its own, in combinations that no list of cases has. `python -m tests.kit.random_programs
100 200` tries more of them, and names the seeds that differ.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from tests.kit.models import largest_difference, whole

__all__ = ["LAYOUTS", "Program", "differences", "interrupted", "resumed"]

LAYOUTS = ("ddp", "fsdp", "zero1", "zero2")
LR = 0.05
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": LR, "momentum": 0.9},
    **{name: {"lr": LR / 5, "eps": 1e-3} for name in ("AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam")},
}
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Program:
    """What a loop does.

    Args:
        body: of the model between its first and its last layer.
        clears: where `zero_grad` stands: "front" of the window, "backward" right before it, or "back" behind the step.
        steps: the scheduler: "batch" behind the optimizer's step, "before" it, or "epoch".
        freezes: the middle layer, from the second epoch on or until then.
        adds: a parameter to the optimizer as the second epoch begins.
        averages: keeps an average of the weights by hand.
        breaks: leaves each epoch after so many updates.
        skips: every fourth batch, before its window.
        weighs: each sample by a number of its own.
    """

    seed: int
    body: str
    optimizer: str
    samples: int
    batch: int
    accumulate: int
    epochs: int
    clip: float | None
    clears: str
    steps: str | None
    freezes: str | None
    groups: bool
    adds: bool
    averages: bool
    breaks: int | None
    skips: bool
    weighs: bool

    @classmethod
    def drawn(cls, seed: int) -> Program:
        draw = random.Random(seed)
        adds, accumulate = draw.random() < 0.2, draw.choice([1, 1, 2, 3])
        return cls(
            seed=seed,
            body=draw.choice(["mlp", "conv", "lstm", "attention"]),
            optimizer=draw.choice(list(OPTIMIZERS)),
            samples=draw.choice([23, 32, 41, 50]),
            batch=draw.choice([4, 8, 12]),
            accumulate=accumulate,
            epochs=draw.choice([2, 3]),
            # A parameter that no optimizer has keeps its gradients, in plain PyTorch too, and these would count in the norm.
            clip=None if adds else draw.choice([None, 0.1, 1.0]),
            clears="front" if adds else draw.choice(["front", "backward", "back"]),
            steps=draw.choice([None, "batch", "before", "epoch"]),
            freezes=draw.choice([None, None, "later", "at first"]),
            groups=draw.random() < 0.4,
            adds=adds,
            averages=draw.random() < 0.3,
            breaks=draw.choice([None, None, None, 2]),
            skips=accumulate == 1 and draw.random() < 0.25,
            weighs=draw.random() < 0.3,
        )

    def parts(self) -> tuple[Mixed, torch.optim.Optimizer, Any, DataLoader[Batch]]:
        torch.manual_seed(self.seed)
        model = Mixed(self.body).double()
        if self.freezes == "at first":
            model.middle.requires_grad_(False)
        held = [p for p in model.parameters() if not (self.adds and p is model.gain)]
        groups: list[dict[str, Any]] = [{"params": held}]
        if self.groups:
            groups = [
                {"params": [p for p in held if p.dim() > 1], "weight_decay": 0.01},
                {"params": [p for p in held if p.dim() < 2], "lr": LR / 2},
            ]
        optimizer = getattr(torch.optim, self.optimizer)(groups, **OPTIMIZERS[self.optimizer])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7) if self.steps else None
        generator = torch.Generator().manual_seed(self.seed)
        data = TensorDataset(
            torch.randn(self.samples, 6, generator=generator, dtype=torch.float64),
            torch.randint(2, (self.samples,), generator=generator),
            torch.rand(self.samples, generator=generator, dtype=torch.float64) + 0.1,
        )
        return model, optimizer, scheduler, DataLoader(data, batch_size=self.batch)

    def begin_epoch(self, epoch: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        model = getattr(model, "module", model)
        if epoch == 1 and self.freezes is not None:
            model.middle.requires_grad_(self.freezes == "at first")
        if epoch == 1 and self.adds:
            optimizer.add_param_group({"params": [model.gain], "lr": LR / 3})

    def leaves_out(self, number: int) -> bool:
        return self.skips and number % 4 == 1

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        x, y, weights = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return (each * weights).sum() / weights.sum() if self.weighs else each.mean()

    def weight(self, batch: Batch) -> torch.Tensor:
        return batch[2].sum() if self.weighs else torch.tensor(float(len(batch[0])))


class Mixed(nn.Module):
    def __init__(self, body: str) -> None:
        super().__init__()
        self.kind, self.first, self.middle, self.last = body, nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.gain = nn.Parameter(torch.ones(8))
        self.register_buffer("passes", torch.zeros(()))
        self.body: nn.Module = {
            "mlp": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()),
            "conv": lambda: nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv1d(4, 1, 3, padding=1)),
            "lstm": lambda: nn.LSTM(4, 4, batch_first=True),
            "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        }[body]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 6) -> (B, 2)
        self.passes += self.training
        x = self.first(x)
        if self.kind == "mlp":
            made = self.body(x)
        elif self.kind == "conv":
            made = self.body(x[:, None])[:, 0]
        else:
            made = self.body(x.view(-1, 2, 4))
            made = (made[0] if self.kind == "lstm" else made).reshape(-1, 8)
        return self.last(torch.tanh(self.middle(x + made)) * self.gain)


def follow(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mine, of_model in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(of_model, 0.1)


def plain(program: Program) -> tuple[dict[str, torch.Tensor], list[float]]:
    """In one process, in nothing but PyTorch: parameters by name, and the loss of each update."""
    model, optimizer, scheduler, loader = program.parts()
    average, losses = copy.deepcopy(model), []
    for epoch in range(program.epochs):
        program.begin_epoch(epoch, model, optimizer)
        batches = [batch for number, batch in enumerate(loader) if not program.leaves_out(number)]
        if program.breaks is not None:
            batches = batches[: program.breaks * program.accumulate]
        for start in range(0, len(batches), program.accumulate):
            window = batches[start : start + program.accumulate]
            whole_weight = sum(program.weight(batch) for batch in window)
            if program.clears != "back":
                optimizer.zero_grad()
            parts = [program.loss(model, batch) * program.weight(batch) / whole_weight for batch in window]
            torch.stack(parts).sum().backward()
            losses.append(float(torch.stack(parts).sum()))
            if program.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), program.clip)
            if program.steps == "before":
                scheduler.step()
            optimizer.step()
            if program.clears == "back":
                optimizer.zero_grad()
            if program.steps == "batch":
                scheduler.step()
            if program.averages:
                follow(average, model)
        if program.steps == "epoch":
            scheduler.step()
    return dict(model.named_parameters()) | {f"average.{n}": p for n, p in average.named_parameters()}, losses


class Killed(Exception): ...


def prepared(
    program: Program, layout: str, folder: Path | None = None, dies_at: int | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same by `echelon.prepare`.

    Args:
        folder: of checkpoints, from which it goes on.
        dies_at: after so many updates.
    """
    model, optimizer, scheduler, loader = program.parts()
    average: Any = copy.deepcopy(model)
    things: list[Any] = [model, optimizer, loader, average, *([scheduler] if scheduler else [])]
    run: Any = model
    checkpoints = None if folder is None else ech.Checkpoints(folder, every=[1, 2, 3, "epoch"][program.seed % 4])
    run, optimizer, batches, average, *_ = ech.prepare(
        *things, layout=layout, accumulate=program.accumulate, checkpoints=checkpoints
    )
    losses, most = [], None if program.breaks is None else program.breaks * program.accumulate
    for epoch in ech.epochs(batches, program.epochs):
        program.begin_epoch(epoch, run, optimizer)
        trained = 0
        for number, batch in enumerate(batches):
            if trained == most:
                break
            if program.leaves_out(number):
                continue
            trained += 1
            if program.clears == "front":
                optimizer.zero_grad()
            with ech.window(run, weight=program.weight(batch) if program.weighs else None) as window:
                loss = program.loss(run, batch)
                if program.clears == "backward":
                    optimizer.zero_grad()
                window.backward(loss)
                if program.clip is not None:
                    window.clip_grad_norm_(program.clip)
                if program.steps == "before":
                    scheduler.step()
                optimizer.step()
                if program.clears == "back":
                    optimizer.zero_grad()
                if program.steps == "batch":
                    scheduler.step()
            if window.is_last:
                losses.append(float(window.loss))
                if program.averages:
                    follow(average, run)
                if len(losses) == dies_at:
                    raise Killed
        if program.steps == "epoch":
            scheduler.step()
    return whole(run) | {f"average.{name}": value for name, value in whole(average).items()}, losses


def differences(seeds: list[int]) -> list[str]:
    """On every rank: which programs are not under every layout what they are in one process."""
    found = []
    for program in map(Program.drawn, seeds):
        values, losses = plain(program)
        for layout in LAYOUTS:
            got, told = prepared(program, layout)
            apart = max(largest_difference(got, values), *(abs(a - b) for a, b in zip(told, losses, strict=True)))
            if apart > 1e-10:
                found.append(f"{layout} differs by {apart:.1e}: {program}")
    return found


def _killable(seeds: list[int]) -> list[tuple[Program, str, int]]:
    """Programs with a layout, and the update after which each is killed. A loop that counts batches by itself counts them from 0
    in an epoch that goes on, and a group that was added is not there when a checkpoint is restored.
    """
    programs = [each for each in map(Program.drawn, seeds) if not (each.skips or each.breaks or each.adds)]
    return [(each, LAYOUTS[each.seed % len(LAYOUTS)], 1 + each.seed % 7) for each in programs]


def interrupted(seeds: list[int], folder: str) -> None:
    for program, layout, update in _killable(seeds):
        with contextlib.suppress(Killed):
            prepared(program, layout, Path(folder) / str(program.seed), update)


def resumed(seeds: list[int], folder: str) -> list[str]:
    """On every rank: which programs that `interrupted` began do not come to what they are in one process."""
    found = []
    for program, layout, update in _killable(seeds):
        got, _ = prepared(program, layout, Path(folder) / str(program.seed))
        if (apart := largest_difference(got, plain(program)[0])) > 1e-10:
            found.append(f"{layout}, killed after update {update}, differs by {apart:.1e}: {program}")
    return found


if __name__ == "__main__":
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        for ranks in (2, 4):
            for each in ech.launch(differences, ranks=ranks, args=[[seed]], quiet=True)[0]:
                print(f"{ranks} ranks: {each}", flush=True)
