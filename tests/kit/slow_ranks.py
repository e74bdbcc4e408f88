"""Training on ranks of which one is slow, for a reason of your choice."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import echelon as ech
from echelon.contracts.run_dir import RUN_DIR_VARIABLE, RunDir
from echelon.contracts.times import TimeRecord, read_times
from tests.kit.own_loops import own_loop

Batch = tuple[torch.Tensor, torch.Tensor]

WIDTH, ROWS, SLOW_S = 64, 16, 0.05


class Fault:
    """What is slow: "data", "forward", "backward" (asleep), "spin" (computing), "gc", "disk"; "" is nothing."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._file, self._garbage = kind, folder / f"disk-{os.getpid()}", list[Any]()

    def at(self, *kinds: str) -> None:
        if self._kind not in kinds:
            return
        if self._kind == "gc":
            self._collect()
            return
        if self._kind == "spin":
            end = time.thread_time() + SLOW_S  # of a core, however many others want it
            while time.thread_time() < end:
                pass
        elif self._kind == "disk":
            self._wait_for_file()
        else:
            time.sleep(SLOW_S)

    def _wait_for_file(self) -> None:
        """The kernel holds up a call about a file, as where a file system takes its time, whatever this machine's disk is."""
        with open(self._file, "wb") as theirs, open(self._file, "wb") as ours:
            fcntl.flock(theirs, fcntl.LOCK_EX)
            release = threading.Timer(SLOW_S, fcntl.flock, (theirs, fcntl.LOCK_UN))
            release.start()
            fcntl.flock(ours, fcntl.LOCK_EX)
            release.join()

    def _collect(self) -> None:
        while len(self._garbage) < 400_000:
            self._garbage.append([self._garbage])
        end = time.thread_time() + SLOW_S
        while time.thread_time() < end:
            gc.collect()


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.fault.at("backward")
        return gradient, None


class Net(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self._fault = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._fault.at("forward", "spin", "gc")
        return _Passes.apply(self.layers(x), self._fault)  # type: ignore[no-any-return, no-untyped-call]


class Batches:
    def __init__(self, steps: int, fault: Fault) -> None:
        own = torch.Generator().manual_seed(ech.RankInfo().rank)  # two ranks with one batch are warned of
        self._steps, self._fault = steps, fault
        self._batch = (torch.randn(ROWS, WIDTH, generator=own), torch.randn(ROWS, WIDTH, generator=own))

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._steps):
            self._fault.at("data", "disk")
            yield self._batch


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


class Unit(ech.AutoUnit[Batch]):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        return _loss(self.module, *data), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.01), None


def train(folder: str, kind: str, slow: int | None, layout: str = "ddp", *, own: bool = False, steps: int = 22) -> None:
    """On each rank, into the run's folder; `slow` is the rank with the fault."""
    fault = Fault(kind if slow is not None and ech.RankInfo().rank == slow else "", Path(folder))
    os.environ[RUN_DIR_VARIABLE] = folder
    try:
        if own:
            own_loop(Net(fault), Batches(steps, fault), _loss, lr=0.01, layout=layout)
        else:
            ech.train(Unit(module=Net(fault), layout=layout), Batches(steps, fault), max_epochs=1)
    finally:
        del os.environ[RUN_DIR_VARIABLE]


def times_of(folder: Path) -> dict[int, list[TimeRecord]]:
    return read_times(RunDir(folder))


def run_folder(folder: Path) -> RunDir:
    return RunDir(folder).at_attempt(0)
