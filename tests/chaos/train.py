"""A training script as a user writes it, whose ranks die as a plan says, and which keeps a ledger of what it trained on.

Run by `echelon run`. Attempt after attempt dies, each in another way, until `--kills` have; then it goes on to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import echelon as ech
from echelon.parallel.shards import local

GLOBAL_BATCH, SAMPLES = 12, 70  # the last global batch of an epoch has ten

WAYS = ("step", "moment", "save", "everyone", "everyone's save", "launcher")


class Data(torch.utils.data.Dataset):
    """Rows, and which they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 4, generator=generator, dtype=dtype)
        self.y = torch.randn(SAMPLES, 1, generator=generator, dtype=dtype)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


class Unit(ech.AutoUnit[Any]):
    ledger: Ledger

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        self.ledger.saw(state, data)
        out = self.module(data[0])
        return nn.functional.mse_loss(out, data[1]), out

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.9)


class Ledger(ech.Callback):
    """One line for each step: the attempt, and the samples that counted."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._attempt = attempt
        self._ids: list[int] = []

    def saw(self, state: ech.State, batch: Any) -> None:
        padding = state.train_state is not None and state.train_state.step.is_padding
        self._ids = [] if padding else batch[2].tolist()

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        line = {"attempt": self._attempt, "step": unit.train_progress.num_steps_completed, "ids": self._ids}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Fate(ech.Callback):
    """How this attempt of this rank ends; the same plan on all ranks, for all know whose turn it is."""

    def __init__(self, seed: int, attempt: int, rank: int, ranks: int, folder: Path, ways: tuple[str, ...]) -> None:
        dice = random.Random(f"{seed} {attempt}")
        self.way, victim = dice.choice(ways), dice.randrange(ranks)
        self._step, self._wait_s = dice.randint(1, 6), dice.random() * 0.05
        self._call = dice.randint(1, 45 if victim == 0 else 12)
        self._tear = dice.random() < 0.5
        self._mine = victim == rank or self.way.startswith("everyone") or (self.way == "launcher" and rank == 0)
        self._folder, self._done = folder, 0

    def on_train_step_start(self, state: ech.State, unit: Any) -> None:
        self._done += 1
        if not self._mine:
            return
        if self.way == "moment" and self._done == 1:
            threading.Thread(target=lambda: (time.sleep(self._wait_s), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
        elif self.way in ("save", "everyone's save") and self._done == 1:
            from tests.chaos.forks import KILL, TEAR, arm

            arm(str(self._folder), self._call, TEAR if self._tear else KILL)
        elif self.way == "launcher" and self._done == self._step:
            import psutil

            launcher = psutil.Process(os.getppid()).ppid()  # above the server
            os.kill(launcher, signal.SIGKILL)
            time.sleep(600)  # not one step more, however late the server hears of it
        elif self.way in ("step", "everyone") and self._done == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


class Stop(ech.Callback):
    """One rank stops, as a process that a debugger or a failing memory holds."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_step_start(self, state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == self._step:
            os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--stop-rank-1-at", type=int)
    parser.add_argument("--timeout", type=float, default=60.0)
    given = parser.parse_args()
    # Which start this is, counted over launchers.
    attempt = int(os.environ.get("ECHELON_ATTEMPT", "0"))
    ech.init_from_env(timeout=timedelta(seconds=given.timeout))
    train(given, attempt)


def train(given: Any, attempt: int) -> None:
    folder: Path = given.folder
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dtype = getattr(torch, given.dtype)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(given.dropout), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    unit = Unit(module=module.to(dtype), layout=given.layout, accumulate=given.accumulation)
    unit.ledger = ledger = Ledger(folder / f"ledger-{rank}.jsonl", attempt)
    loader = ech.Loader(Data(dtype), GLOBAL_BATCH, seed=3, accumulate=given.accumulation)
    checkpoints = folder / "checkpoints"
    ech.DistributedCheckpointSaver.restore_from_latest(checkpoints, unit, train_dataloader=loader)
    saver = ech.DistributedCheckpointSaver(
        checkpoints, save_every_n_updates=4, keep_last_n_checkpoints=2, async_checkpoint=attempt % 2 == 1
    )
    callbacks: list[ech.Callback] = [ledger, saver]
    if attempt < given.kills:
        callbacks.insert(0, Fate(given.seed, attempt, rank, ranks, checkpoints.absolute(), tuple(given.ways.split(","))))
    if given.stop_rank_1_at is not None and rank == 1 and attempt == 0:
        callbacks.insert(0, Stop(given.stop_rank_1_at))
    ech.train(unit, loader, max_updates=given.steps, callbacks=callbacks)
    final = {"module": unit.module.state_dict(), "optimizer": unit.optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(mine(final), folder / f"final-{rank}.pt")


def mine(value: Any) -> Any:
    """With this rank's shards in place of what is spread over the ranks."""
    if isinstance(value, dict):
        return {key: mine(each) for key, each in value.items()}
    return local(value) if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    main()
