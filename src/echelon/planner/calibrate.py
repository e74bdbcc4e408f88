"""Measure this machine as a device for plans. All ranks compute at the same time, as in training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from echelon.launcher.functions.launch import launch
from echelon.planner.devices import Device, Measured
from echelon.world.init import init_from_env

__all__ = ["calibrate"]

_TIMES = 5  # the median of these counts
_SHORT_S, _LONG_S = 0.01, 0.1
_KINDS = ("all-reduce", "all-gather", "reduce-scatter")


def calibrate(ranks: int, name: str, *, quick: bool = False) -> Device:
    """Measure matrix products by size, copies, attention, and collectives of 2, 4, ... ranks. Takes about a minute.
    Args:
        ranks: number of ranks that compute at the same time; on CPUs they share the cores.
        name: the device's name.
        quick: use only small tensors; the numbers then mean little.
    """
    device = launch(_measure, ranks=ranks, args=(quick,), quiet=True)[0]
    rates = device["products"]
    peak = {dtype: max(rate for kind, _, rate in rates if kind == dtype) for dtype in sorted({row[0] for row in rates})}
    return Device(
        name,
        device["memory"],
        peak,
        device["bandwidth"],
        reached=1.0,
        copied=1.0,
        attention=tuple(rate / peak[device["attends in"]] for rate in device["attention"]),
        least=device["least"],
        overlaps=device["overlaps"],
        products=tuple(sorted(rates)),
        collectives=tuple(Measured(*row) for row in device["collectives"]),
    )


def _measure(quick: bool) -> dict[str, Any]:
    """Collective. Returns the slowest rank's measurements, the same on every rank."""
    device = init_from_env()
    on_gpu = device.type == "cuda"
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    def seconds(work: Callable[[], Any], repeat: int = 1) -> float:
        """Seconds that `work` takes on the slowest rank; all ranks start it together."""
        took = []
        for _ in range(_TIMES + 1):  # the first one warms up
            if ranks > 1:
                dist.barrier()
            began = time.perf_counter()
            for _ in range(repeat):
                work()
            if on_gpu:
                torch.cuda.synchronize()
            took.append((time.perf_counter() - began) / repeat)
        slowest = torch.tensor(statistics.median(took[1:]), dtype=torch.float64, device=device)
        if ranks > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    sizes = (64, 128) if quick else (256, 512, 1024, 2048, 4096, 8192) if on_gpu else (64, 128, 256, 512, 1024)
    products = []
    for dtype in (torch.float32, torch.bfloat16):
        for n in sizes:
            took = seconds(_product(n, dtype, device))
            if took < _SHORT_S / 10:
                took = seconds(_product(n, dtype, device), int(_SHORT_S / took))
            products.append((str(dtype).removeprefix("torch."), float(2 * n**3), 2 * n**3 / took))
            if took > _LONG_S:  # such as bfloat16 on a CPU without it: a larger product is no faster
                break
    source = torch.randn((1 if quick else 256 if on_gpu else 16) << 20 >> 2, device=device)
    copy = torch.empty_like(source)
    small = torch.ones(16, device=device)
    attends = torch.bfloat16 if on_gpu else torch.float32  # a GPU's fast kernels do not take float32
    return {
        "memory": torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total // ranks,
        "overlaps": on_gpu,
        "products": products,
        "bandwidth": 2 * source.nbytes / seconds(lambda: copy.copy_(source), 4),
        "least": seconds(lambda: small + small, 200),
        "attention": _attention(device, attends, quick, seconds),
        "attends in": str(attends).removeprefix("torch."),
        "collectives": _collectives(ranks, device, seconds, 1 << 12 if quick else 1 << 22),
    }


def _product(n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return lambda: left @ right


def _attention(device: torch.device, dtype: torch.dtype, quick: bool, seconds: Callable[..., float]) -> tuple[float, float]:
    """FLOP/s of causal attention, forward and backward, counting half of the square: a GPU gets longer sequences than a CPU."""
    rows, heads, length, width = (4, 16, 4096, 128) if device.type == "cuda" and not quick else (2, 8, 512, 64)
    query, key, value = (
        torch.randn(rows, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    ahead = torch.ones_like(query)
    flops = rows * heads * 4 * length * length * width / 2

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    once = seconds(forward, 10)
    both = seconds(lambda: torch.autograd.grad(forward(), (query, key, value), ahead), 10)
    return flops / once, 2.5 * flops / max(both - once, once)


def _collectives(
    ranks: int, device: torch.device, seconds: Callable[..., float], most: int
) -> list[tuple[str, int, float, float]]:
    """Measure collectives of the first 2, 4, ... ranks; the others wait. The latency is that of a small tensor."""
    measured = []
    counts = sorted({*(1 << bit for bit in range(1, ranks.bit_length())), ranks} - {1})
    for count in counts:
        group = dist.new_group(list(range(count)))
        takes_part = dist.get_rank() < count
        for kind in _KINDS:
            small, large = (
                seconds(_call(kind, elements, count, group, device) if takes_part else _nothing) for elements in (1 << 10, most)
            )
            sent = 4 * (most - (1 << 10))
            measured.append((kind, count, small, sent / max(large - small, 1e-9)))
    return measured


def _nothing() -> None:
    """The work of a rank outside of the group."""


def _call(kind: str, elements: int, count: int, group: dist.ProcessGroup | None, device: torch.device) -> Callable[[], Any]:
    whole = torch.ones(elements - elements % count, device=device)
    part = torch.ones(elements // count, device=device)
    if kind == "all-reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
