"""A training run of echelon's with one planted fault: `train(fault, rank, folder)`, to be called on every rank."""

from __future__ import annotations

import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import echelon as ech

WIDTH = 256
AT = 6  # the step of the fault
NO_END = 600.0


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, fault: str, guilty: bool) -> None:
        self.fault, self.guilty = fault, guilty

    def __len__(self) -> int:
        return 4 * 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.guilty and index >= 4 * AT:
            if self.fault == "data_stands":
                time.sleep(NO_END)
            if self.fault == "data_raises":
                raise OSError(5, "Input/output error", "shard-3")
            if self.fault == "worker_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "slow_data":
                time.sleep(0.02)
        return torch.ones(WIDTH)


class Unit(ech.AutoUnit[torch.Tensor]):
    def __init__(self, fault: str, guilty: bool, layout: str) -> None:
        super().__init__(module=torch.nn.Linear(WIDTH, WIDTH), layout=layout)
        self.fault, self.guilty = fault, guilty

    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        step = self.train_progress.num_steps_completed
        loss = self.module(data).square().mean()
        if self.guilty and step >= AT:
            if self.fault == "step_raises":
                raise ValueError("bad label")
            if self.fault == "step_stands":
                time.sleep(NO_END)
            if self.fault == "step_stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.fault == "further_collective":
                torch.distributed.all_reduce(torch.ones(3))
            if self.fault == "nan":
                loss = loss * float("nan")
            if self.fault == "slow_step" and step < AT + 2:
                time.sleep(1.0)
        return loss, None

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> Any:
        return torch.optim.SGD(module.parameters(), lr=0.01), None

    def on_train_epoch_end(self, state: ech.State) -> None:
        if self.fault == "slow_between_epochs" and self.guilty:
            time.sleep(1.5)


def train(fault: str, rank: int, folder: str, layout: str = "ddp", wait_s: float = 30.0) -> None:
    ech.init_from_env(timeout=timedelta(seconds=wait_s))
    ech.seed(0)
    guilty = torch.distributed.get_rank() == rank
    unit = Unit(fault, guilty, layout)
    options: dict[str, Any] = {}
    callbacks: list[ech.Callback] = []
    if fault.startswith("worker"):
        options = {"num_workers": 1}
    if "save" in fault:
        saver = ech.DistributedCheckpointSaver(
            str(Path(folder) / "checkpoints"),
            save_every_n_updates=5,
            async_checkpoint=fault.startswith("async"),
            options=ech.callbacks.SaveOptions(tolerated_failures=0),
        )
        callbacks.append(saver)
        if guilty:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    loader: Any = ech.Loader(Samples(fault, guilty), global_batch=4, shuffle=False, **options)
    if fault == "fewer_batches":
        loader = [torch.ones(2, WIDTH)] * (AT if guilty else 20)
    ech.train(unit, loader, max_epochs=1, callbacks=callbacks)
