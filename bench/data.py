"""Data: the keyed order's speed and seek, the loader beside torch's DataLoader, and what an epoch of 10^8 samples costs to begin.

The DataLoader has the same dataset, batch size, number of workers and collate function, and a DistributedSampler of one rank.
Measurements of both are interleaved; the ratio is that of the medians. Memory is the growth of a fresh process's peak.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _timing import emit, machine, median, options, spread, versions
from torch.utils.data import DataLoader, DistributedSampler

import echelon as ech
from echelon.data.order import Order

BATCH = 64
HUGE = 10**10
MANY = 10**8


class Small:
    """A sample is 8 numbers and a label, so that only the loader's own time is measured."""

    def __init__(self, length: int) -> None:
        self.values = torch.arange(length * 8, dtype=torch.float32).reshape(length, 8)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.values[index], index


class AtOnce(Small):
    """The same data, read a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        return list(zip(self.values[indices].unbind(), indices, strict=True))


def _ours(dataset: Any, workers: int) -> Any:
    return ech.Loader(dataset, BATCH, num_workers=workers, options=ech.data.LoaderOptions(dp=(0, 1)))


def _torch(dataset: Any, workers: int) -> Any:
    return DataLoader(dataset, BATCH, num_workers=workers, sampler=DistributedSampler(dataset, num_replicas=1, rank=0))


def _samples_a_second(loader: Any, count: int) -> float:
    began = time.perf_counter()
    for _ in loader:
        pass
    return count / (time.perf_counter() - began)


def permuting(rounds: int) -> dict[str, list[float]]:
    """Indices a second, for orders of several lengths; torch.randperm makes a whole epoch at once."""
    found: dict[str, list[float]] = {}
    makers: dict[str, tuple[int, Callable[[], Any]]] = {
        "torch.randperm, 10^7 (the whole epoch)": (10**7, lambda: torch.randperm(10**7))
    }
    for name, length in (("10^6", 10**6), ("10^8 + 1", 10**8 + 1), ("10^10", HUGE), ("2^62", 2**62)):
        order = Order(length, 1)
        makers[f"order of {name}"] = (10**6, lambda order=order: order.indices(3, 0, 10**6))
    for _ in range(rounds):
        for name, (count, make) in makers.items():
            began = time.perf_counter()
            make()
            found.setdefault(name, []).append(count / (time.perf_counter() - began))
    return found


def seeking(times: int = 200) -> list[float]:
    """Microseconds to make an order of 10^10 and give the first global batch of 1,024 at a random position."""
    found = []
    for _ in range(times):
        position = random.randrange(HUGE - 1024)
        began = time.perf_counter()
        Order(HUGE, 1).indices(5, position, position + 1024)
        found.append((time.perf_counter() - began) * 1e6)
    return found


def loading(rounds: int, samples: int) -> dict[str, dict[str, list[float]]]:
    """Samples a second over a whole epoch, including the start of the workers."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for kind in (Small, AtOnce):
            for workers in (0, 2):
                # Workers start with the same work, however long the epoch is.
                dataset = kind(samples)
                row = found.setdefault(f"{workers} workers, {'__getitem__' if kind is Small else '__getitems__'}", {})
                makers = [("echelon", _ours), ("torch", _torch)]
                random.shuffle(makers)
                for name, make in makers:
                    row.setdefault(name, []).append(_samples_a_second(make(dataset, workers), samples))
    return found


def beginning(kind: str) -> dict[str, float]:
    """Seconds and MiB that this process needs until the first index of an epoch of 10^8 samples."""
    data = range(MANY)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if kind == "echelon":
        ech.Loader(data, BATCH, options=ech.data.LoaderOptions(dp=(0, 8))).order.indices(0, 0, BATCH)
    else:
        next(iter(DistributedSampler(data, num_replicas=8, rank=0)))  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def _in_fresh_process(kind: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, "--beginning", kind], capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = options(__doc__, rounds=7)
    parser.add_argument("--samples", type=int, default=100_000, help="in an epoch of the throughput part")
    parser.add_argument("--beginning", choices=["echelon", "torch"], help="only this part, in this process")
    arguments = parser.parse_args()
    if arguments.beginning:
        print(json.dumps(beginning(arguments.beginning)))
        return
    torch.set_num_threads(1)
    np.random.seed(0)
    orders, seeks = permuting(arguments.rounds), seeking()
    throughput = loading(arguments.rounds, arguments.samples)
    starts = {kind: _in_fresh_process(kind) for kind in ("echelon", "torch")}
    rows = [[name, f"{median(rates) / 1e6:.1f} M/s", spread([r / 1e6 for r in rates], 1), ""] for name, rates in orders.items()]
    rows.append(["seek in 10^10, 1,024 samples", f"{median(seeks):.0f} us", spread(seeks), ""])
    for name, sides in throughput.items():
        ours, theirs = median(sides["echelon"]), median(sides["torch"])
        rows.append(
            [f"Loader, {name}", f"{ours / 1e3:.1f} k/s", spread([v / 1e3 for v in sides["echelon"]], 1), f"{ours / theirs:.3f}"]
        )
        rows.append([f"DataLoader, {name}", f"{theirs / 1e3:.1f} k/s", spread([v / 1e3 for v in sides["torch"]], 1), "1"])
    for kind, name in (("echelon", "Loader"), ("torch", "DistributedSampler")):
        rows.append([f"{name}, first index of 10^8", f"{starts[kind]['seconds']:.3f} s", f"{starts[kind]['mib']:.0f} MiB", ""])
    emit(
        arguments,
        f"Data: medians of {arguments.rounds} interleaved rounds, batches of {BATCH}, one thread",
        ["what", "median", "range", "to torch"],
        rows,
        facts={
            "order": orders,
            "seek_us": seeks,
            "throughput": throughput,
            "beginning": starts,
            "machine": machine(),
            "versions": versions("torch", "numpy"),
        },
    )


if __name__ == "__main__":
    main()
