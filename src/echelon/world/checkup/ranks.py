"""Measurements of ranks together: joining, clocks, sums, bandwidth, matrix products. All ranks call all parts in one order.

pairs   up to 8 ranks: every pair, in rounds in which each rank has one partner. With more ranks: a hypercube, rank XOR 1, 2, 4,
        ..., so that each of R ranks has log2(R) partners, near and far ones, and the time grows as log2(R)
clocks  each rank notes its clock as it leaves a barrier, several times. Differences are those of the clocks, plus the
        milliseconds by which ranks leave a barrier apart; the smallest difference counts
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from echelon.common.machine import interface_of
from echelon.contracts.rank import RankInfo
from echelon.world.handshake import VARIABLE as HANDSHAKE_VARIABLE
from echelon.world.init import init_from_env
from echelon.world.program import nccl_version

__all__ = ["MOST_PAIRED", "PARTS", "join", "leave", "rounds", "versions"]

MOST_PAIRED = 8
_TICKS, _TIMES = 5, 3
_MiB = 1 << 20


def versions() -> dict[str, str]:
    built = torch.version.cuda or torch.version.hip or ""
    versions_here = {"torch": str(torch.__version__), "CUDA of torch": str(built)}
    if torch.version.cuda is not None and torch.cuda.is_available():
        versions_here |= {"NCCL": nccl_version(), "GPU": torch.cuda.get_device_name()}
    return versions_here


def join(info: RankInfo, wait: timedelta) -> dict[str, Any]:
    """Join the group. Returns the seconds until all have joined, and the milliseconds of a connection to the store's port."""
    os.environ[HANDSHAKE_VARIABLE] = "none"  # differences are to be listed, not refused
    began = time.monotonic()
    device = init_from_env(timeout=wait)
    joined_s = time.monotonic() - began
    if info.world_size == 1:
        return {"s": joined_s, "device": device.type}
    began = time.monotonic()
    with socket.create_connection((info.master_addr, info.master_port), timeout=wait.total_seconds()) as connection:
        local = str(connection.getsockname()[0])
    took_ms = (time.monotonic() - began) * 1e3
    return {"s": joined_s, "device": device.type, "connect_ms": took_ms, "interface": interface_of(local)}


def _joined() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def clocks(*, quick: bool) -> list[float]:
    """The time in seconds since 1970, at several moments that are nearly the same on all ranks."""
    ticks = []
    for _ in range(_TICKS):
        if _joined():
            dist.barrier()
        ticks.append(time.time())
    return ticks


def sums(*, quick: bool) -> list[dict[str, Any]]:
    """All-reduces with known results: by device, how many numbers are wrong, and MiB/s of a large one."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_initialized():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return [_sum_on(device, _MiB if quick else 16 * _MiB) for device in devices] if _joined() else []


def _sum_on(device: torch.device, size_bytes: int) -> dict[str, Any]:
    ranks, wrong, first, best_s = dist.get_world_size(), 0, None, float("inf")
    each = sum(rank % 3 for rank in range(ranks))
    for length, dtype in ((1, torch.int64), (1001, torch.float64), (size_bytes // 4, torch.float32)):
        places = torch.arange(length, device=device) % 251
        for _ in range(_TIMES):
            values = (places + dist.get_rank() % 3).to(dtype)
            dist.barrier()
            began = time.monotonic()
            dist.all_reduce(values)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took_s = time.monotonic() - began
            bad = values != (places * ranks + each).to(dtype)  # exact in all three dtypes
            wrong += int(bad.sum())
            if first is None and bad.any():
                first = f"{values[bad][0].item():g} in place of {(places * ranks + each)[bad][0].item()}"
        best_s = min(best_s, took_s) if length > 1001 else best_s
    return {"device": device.type, "wrong": wrong, "first": first, "mib_s": size_bytes / _MiB / best_s}


def rounds(rank: int, ranks: int) -> list[int | None]:
    """This rank's partner in each round; None if it has none."""
    if ranks > MOST_PAIRED:
        other = [rank ^ (1 << bit) for bit in range((ranks - 1).bit_length())]
        return [each if each < ranks else None for each in other]
    # A round-robin tournament: one seat is fixed, the others rotate.
    seats = ranks + ranks % 2
    partners: list[int | None] = []
    for turn in range(seats - 1):
        if rank == seats - 1:
            partner = turn * (seats // 2) % (seats - 1)
        else:
            partner = (turn - rank) % (seats - 1)
            partner = seats - 1 if partner == rank else partner
        partners.append(partner if partner < ranks else None)
    return partners


def pairs(*, quick: bool) -> list[list[float]]:
    """[partner, MiB/s of both directions together, wrong bytes] of each round. In host memory, by gloo."""
    if not _joined():
        return []
    results = []
    size = _MiB // 4 if quick else 4 * _MiB
    for partner in rounds(dist.get_rank(), dist.get_world_size()):
        best_s, wrong = float("inf"), 0
        for _ in range(_TIMES):
            dist.barrier()
            if partner is None:
                continue
            payload = torch.full((size,), dist.get_rank() % 251, dtype=torch.uint8)
            theirs = torch.empty(size, dtype=torch.uint8)
            began = time.monotonic()
            works = [dist.isend(payload, partner), dist.irecv(theirs, partner)]
            for work in works:
                if work is not None:
                    work.wait()
            best_s = min(best_s, time.monotonic() - began)
            wrong += int((theirs != partner % 251).sum())
        if partner is not None:
            results.append([partner, round(2 * size / _MiB / best_s, 1), wrong])
    return results


def products(*, quick: bool) -> dict[str, Any]:
    """The best GFLOP/s of several matrix products, while all ranks compute."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    n, dtype = (4096, torch.bfloat16) if on_gpu else (1024, torch.float32)
    n = n // 4 if quick else n
    left, right = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    times = []
    if _joined():
        dist.barrier()
    for _ in range(_TIMES if quick else 4 * _TIMES):
        began = time.monotonic()
        value = left @ right
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(time.monotonic() - began)
    wrong = int((value != n).sum()) if not on_gpu or n <= 256 else int((value.float() - n).abs().gt(n / 64).sum())
    return {
        "gflop_s": round(2 * n**3 / min(times) / 1e9, 1),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "wrong": wrong,
    }


def leave() -> bool:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return True


# Run in this order on all ranks.
PARTS: Mapping[str, Callable[..., Any]] = {"clocks": clocks, "sums": sums, "pairs": pairs, "products": products}
