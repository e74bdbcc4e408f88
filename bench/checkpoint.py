"""What checkpoints cost: the stall of an asynchronous save against a whole one, a whole one against plain DCP, and an export.

    python bench/checkpoint.py [--mb 512] [--rounds 5] [--ranks 2] [--layout ddp]

All in one run on the same folder and disk, interleaved, medians. "Plain DCP" is `torch.distributed.checkpoint.save` of the same
tensors into a fresh folder with its own defaults (it syncs its files, has no checksums, no commit). Targets: stall at most 5% of
the whole save, whole save at most 1.15 of plain DCP, export within 1.2 times a copy and 2 GB of memory; its time is that of the
command without the imports, with the comparison of checksums.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import echelon as ech
from echelon.parallel.state.state import states_by_name
from echelon.world import agree

WIDTH, ROWS = 2048, 64


class Large(ech.AutoUnit[torch.Tensor]):
    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.module(data).square().mean(), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.AdamW(module.parameters(), lr=1e-4), None


def _model(megabytes: int) -> nn.Module:
    layers = max(1, round(megabytes * 1e6 / (12 * WIDTH * WIDTH)))  # weights and two moments of 4 bytes each
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


class Timed(ech.DistributedCheckpointSaver):
    """Saves when told to, and records how long the loop stood still."""

    def measure(self, state: ech.State, unit: Any) -> float:
        began = time.perf_counter()
        self._save(state, unit)
        return time.perf_counter() - began


class Rounds(ech.Callback):
    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.times: dict[str, list[float]] = {"dcp": [], "sync": [], "stall": [], "async total": []}
        self.whole, self.later = Timed(folder / "sync"), Timed(folder / "async", async_checkpoint=True)

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        step = unit.train_progress.num_steps_completed
        if step > self.rounds:
            return
        for name, measure in (("dcp", self._dcp), ("sync", self._sync), ("stall", self._async)):
            agree.any_rank(False)
            seconds = measure(state, unit)
            if step > 1:  # the first save makes plans and buffers
                self.times[name].append(max(agree.gather(seconds)))
            self._clear()

    def _clear(self) -> None:
        agree.any_rank(False)
        if not agree.is_joined() or dist.get_rank() == 0:
            for child in self.folder.glob("*/step-*"):
                if child.name != "step-00000001":
                    shutil.rmtree(child)
            shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        agree.any_rank(False)

    def _dcp(self, state: ech.State, unit: Any) -> float:
        began = time.perf_counter()
        tensors: dict[str, Any] = {}
        for name, stateful in states_by_name({"module": unit.module, "optimizer": unit.optimizer}).items():
            tensors |= {f"{name}.{k}": v for k, v in stateful.state_dict().items()}
        dcp.save(tensors, checkpoint_id=self.folder / "dcp", no_dist=not agree.is_joined())
        return time.perf_counter() - began

    def _sync(self, state: ech.State, unit: Any) -> float:
        return self.whole.measure(state, unit)

    def _async(self, state: ech.State, unit: Any) -> float:
        began = time.perf_counter()
        seconds = self.later.measure(state, unit)
        self.later._look_after(state, wait=True)
        if unit.train_progress.num_steps_completed > 1:
            self.times["async total"].append(time.perf_counter() - began)
        return seconds


def _measure(folder: str, megabytes: int, rounds: int, layout: str) -> dict[str, list[float]]:
    ech.init_from_env()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    unit = Large(module=_model(megabytes), device=torch.device("cpu"), layout=layout)
    callback = Rounds(Path(folder), rounds + 1)
    ech.train(unit, [torch.randn(ROWS, WIDTH)] * (rounds + 1), max_epochs=1, callbacks=[callback])
    for saver in (callback.whole, callback.later):
        saver.folder.release()
    return callback.times


EXPORT = """
import sys, time
from echelon.checkpoint import export, foreign
from echelon.cli.main import main
began = time.perf_counter()
assert main(["ckpt", "export", sys.argv[1], sys.argv[2], "--state", "module"]) == 0
seconds = time.perf_counter() - began
(peak,) = (int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("SECONDS", seconds, peak / 1e6)
"""


def _export(folder: Path, megabytes: int) -> tuple[float, float, float]:
    """Seconds of an export, seconds of a copy of the same size, both to disk, and the export's peak memory in GB."""
    torch.manual_seed(0)
    unit = Large(module=_model(3 * megabytes), device=torch.device("cpu"), layout="none")
    saver = ech.DistributedCheckpointSaver(folder / "big")
    saver.save(ech.State(entry_point=ech.units.EntryPoint.TRAIN), unit)
    del unit
    ours, copies, peak = [], [], 0.0
    for i in range(3):
        out = folder / f"out{i}"
        done = subprocess.run(
            [sys.executable, "-c", EXPORT, str(folder / "big"), str(out)], capture_output=True, text=True, check=True
        )
        seconds, gigabytes = map(float, done.stdout.split("SECONDS")[1].split())
        ours.append(seconds)
        peak = max(peak, gigabytes)
        (file,) = out.glob("*.safetensors")
        began = time.perf_counter()
        shutil.copyfile(file, folder / "copy")
        with open(folder / "copy", "rb+") as copied:
            os.fsync(copied.fileno())
        copies.append(time.perf_counter() - began)
        (folder / "copy").unlink()
        shutil.rmtree(out)
    return statistics.median(ours), statistics.median(copies), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--export-mb", type=int, default=768)
    parser.add_argument("--dir", default=None, help="on the disk to be measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as temporary:
        times = ech.launch(
            _measure, ranks=options.ranks, args=(f"{temporary}/c", options.mb, options.rounds, options.layout), timeout_s=900
        )[0]
        median = {name: statistics.median(values) for name, values in times.items()}
        print(f"{options.mb} MB, {options.ranks} ranks, {options.layout}; medians of {options.rounds}, in seconds")
        for name, value in median.items():
            print(f"  {name:<12} {value:7.3f}   ({min(times[name]):.3f} to {max(times[name]):.3f})")
        print(f"  sync / dcp    {median['sync'] / median['dcp']:.2f}   (target 1.15)")
        print(f"  stall / sync  {median['stall'] / median['sync']:.3f}   (target 0.05)")
        if options.export_mb:
            seconds, copy, peak = _export(Path(temporary), options.export_mb)
            print(
                f"export of {options.export_mb} MB: {seconds:.2f} s, a copy {copy:.2f} s: {seconds / copy:.2f} (target 1.2), ",
                end="",
            )
            print(f"peak {peak:.2f} GB (target 2)")


if __name__ == "__main__":
    main()
