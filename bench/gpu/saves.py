"""How long a save stops training, beside torch.distributed.checkpoint with the same tensors, on the disk of temporary files.

Each round has four saves: an asynchronous one, whose stall is measured before its end is awaited; a synchronous one; DCP's
asynchronous one and its synchronous one. The device is idle when each begins, so earlier work does not count. The first rounds
make buffers.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from bench.gpu.rows import LeftOut, Notes
from bench.gpu.runner import Setting
from bench.gpu.work import adamw, settle
from torch import nn

import echelon as ech

WIDTH, LARGEST_BYTES = 2048, 3_000_000_000


def run(setting: Setting, notes: Notes) -> None:
    device, rounds = ech.init_from_env(setting.device), 1 if setting.small else 4
    size = 1_000_000 if setting.small else _size(setting, device, rounds + 2)
    width = 64 if setting.small else WIDTH
    layers = max(1, size // (12 * width * width))  # weights and two moments of 4 bytes
    torch.manual_seed(0)
    unit = Large(module=nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), device=device)
    kinds = Kinds(setting.folder, device)
    ech.train(unit, [torch.randn(8, width)] * (rounds + 2), max_epochs=1, callbacks=[kinds])
    size = layers * 12 * width * width
    notes("state", size / 1e9, "GB", "parameters and AdamW's moments, one rank")
    for name, values in kinds.times.items():
        first, later = values[0], values[1:] or values
        remark = f"median of {len(later)}; the first {first:.3f} s"
        if name in ("synchronous save", "restore"):
            remark += f"; {size / statistics.median(later) / 1e9:.2f} GB/s"
        notes(name, statistics.median(later), "s", remark)
    stall, whole = (statistics.median(kinds.times[name][-rounds:]) for name in ("asynchronous save, stall", "synchronous save"))
    notes("stall / synchronous save", stall / whole)


def _size(setting: Setting, device: torch.device, rounds: int) -> int:
    """Bytes of the state. The disk holds up to four saves at a time, and the device the state, gradients and activations.

    A round writes four saves, and half of the part's time is kept for everything else.
    """
    disk, memory = shutil.disk_usage(setting.folder).free, torch.cuda.mem_get_info(device)[0]
    rate = _bytes_per_second(setting.folder / "probe")
    size = min(LARGEST_BYTES, disk // 6, memory // 3, int(rate * setting.limit_s / 2 / (4 * rounds)))
    if size < 50_000_000:
        free = f"{disk / 1e9:.1f} GB of disk and {memory / 1e9:.1f} GB of device memory are free"
        raise LeftOut(f"{free}, and the disk takes {rate / 1e6:.0f} MB/s: too little")
    return size


def _bytes_per_second(file: Path) -> float:
    """The disk's write speed, including the sync."""
    block = os.urandom(1_000_000)
    began = time.perf_counter()
    with file.open("wb") as out:
        for _ in range(200):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    file.unlink()
    return 200_000_000 / (time.perf_counter() - began)


class Large(ech.AutoUnit[torch.Tensor]):
    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.module(data).square().mean(), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return adamw(module), None


class Kinds(ech.Callback):
    """Makes one save of each kind after each step."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.times: dict[str, list[float]] = {}
        saver = ech.DistributedCheckpointSaver
        self.later = saver(folder / "later", save_every_n_updates=1, async_checkpoint=True, keep_last_n_checkpoints=1)
        self.whole = saver(folder / "whole", keep_last_n_checkpoints=1)

    def on_train_start(self, state: ech.State, unit: Any) -> None:
        self.later.on_train_start(state, unit)

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        settle(self.device)
        began, self.later.stall_s = time.perf_counter(), 0.0
        self.later.on_train_step_end(state, unit)
        if self.later.stall_s:  # no save after the epoch's last step: the epoch's end saves
            self.times.setdefault("asynchronous save, stall", []).append(self.later.stall_s)
            self.later.settle(state)
            self._note("asynchronous save, until it is committed", began)
        began = time.perf_counter()
        self.whole.save(state, unit)
        self._note("synchronous save", began)
        tensors = {"module": unit.module.state_dict(), "optimizer": unit.optimizer.state_dict()}
        began = time.perf_counter()
        writing = dcp.async_save(tensors, checkpoint_id=self.folder / "dcp-later")
        self._note("DCP, asynchronous, stall", began)
        writing.result()
        began = time.perf_counter()
        dcp.save(tensors, checkpoint_id=self.folder / "dcp")
        self._note("DCP, synchronous", began)
        for name in ("dcp", "dcp-later"):
            shutil.rmtree(self.folder / name)

    def on_train_end(self, state: ech.State, unit: Any) -> None:
        self.later.folder.release()
        (newest,) = (self.folder / "whole").glob("step-*")
        for _ in range(2):
            settle(self.device)
            began = time.perf_counter()
            ech.DistributedCheckpointSaver.restore(newest, unit)
            settle(self.device)
            self._note("restore", began)

    def _note(self, name: str, began: float) -> None:
        self.times.setdefault(name, []).append(time.perf_counter() - began)
