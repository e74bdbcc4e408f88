"""Measure this machine as a device for plans. All ranks compute at the same time, as in training."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from echelon.launcher.functions.launch import launch
from echelon.planner.devices import Device, Measured
from echelon.world.init import init_from_env

__all__ = ["calibrate"]

_TIMES = 7  # the median of these counts
_LEAST_S, _MOST_S = 0.02, 1.0  # a time is that of at least, a work's times together are at most about
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
        convolutions=tuple(device["convolutions"]),
        attentions=tuple(device["attentions"]),
        collectives=tuple(Measured(*row) for row in device["collectives"]),
    )


def _measure(quick: bool) -> dict[str, Any]:
    """Collective. Returns the slowest rank's measurements, the same on every rank."""
    device = init_from_env()
    on_gpu = device.type == "cuda"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    sizes = (64, 128) if quick else (256, 512, 1024, 2048, 4096, 8192) if on_gpu else (64, 128, 256, 512, 1024)
    dtypes = (torch.float32, torch.bfloat16)
    source = torch.randn((1 if quick else 256 if on_gpu else 16) << 20 >> 2, device=device)
    copy = torch.empty_like(source)
    small = torch.ones(16, device=device)
    attends = torch.bfloat16 if on_gpu else torch.float32  # a GPU's fast kernels do not take float32
    attention = {
        dtype: _Attention(device, dtype, quick) for dtype in dict.fromkeys((attends, torch.bfloat16))
    }  # in one order on all ranks
    convolution = {dtype: _Convolution(device, dtype, quick) for dtype in dtypes}
    took = _seconds(
        {
            **{(dtype, n): _product(n, dtype, device) for dtype in dtypes for n in sizes},
            **{("convolution", dtype): each.both for dtype, each in convolution.items()},
            **{("forward", dtype): each.forward for dtype, each in attention.items()},
            **{("both", dtype): each.both for dtype, each in attention.items()},
            "copy": lambda: copy.copy_(source),
            "least": lambda: small + small,
        },
        ranks,
        device,
    )
    flops, forward, both = attention[attends].flops, took["forward", attends], took["both", attends]
    return {
        "memory": torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total // ranks,
        "overlaps": on_gpu,
        "products": [(_word(dtype), float(2 * n**3), 2 * n**3 / took[dtype, n]) for dtype in dtypes for n in sizes],
        "convolutions": [
            (_word(dtype), each.flops, 3 * each.flops / took["convolution", dtype]) for dtype, each in convolution.items()
        ],
        "bandwidth": 2 * source.nbytes / took["copy"],
        "least": took["least"],
        "attention": (flops / forward, 2.5 * flops / max(both - forward, forward)),
        "attends in": _word(attends),
        "attentions": [  # a CPU's, in bfloat16, is another share of the products' rate
            ("aten", float(each.width), each.length / 2, 3.5 * each.flops / took["both", dtype])
            for dtype, each in attention.items()
            if dtype != attends
        ],
        "collectives": _collectives(ranks, device, 1 << 12 if quick else 1 << 22),
    }


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _seconds(works: Mapping[Any, Callable[[], Any]], ranks: int, device: torch.device) -> dict[Any, float]:
    """Seconds of each work on the slowest rank. All ranks start a work together, and works take turns: what disturbs the
    machine for a second then spoils one time of each, and not all times of one."""

    def slowest(times: list[float]) -> list[float]:
        found = torch.tensor(times, dtype=torch.float64, device=device)
        if ranks > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def once(work: Callable[[], Any], repeat: int) -> float:
        if ranks > 1:
            dist.barrier()
        began = time.perf_counter()
        for _ in range(repeat):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / repeat

    for work in works.values():  # the first time loads kernels
        once(work, 1)
    first = slowest([once(work, 1) for work in works.values()])
    repeats = [max(1, math.ceil(_LEAST_S / each)) for each in first]
    rounds = [max(1, min(_TIMES, int(_MOST_S / each))) for each in first]  # such as bfloat16 on a CPU without it
    times: list[list[float]] = [[] for _ in works]
    for turn in range(_TIMES):
        for at, work in enumerate(works.values()):
            if turn < rounds[at]:
                times[at].append(once(work, repeats[at]))
    return dict(zip(works, slowest([statistics.median(each) for each in times]), strict=True))


def _product(n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return lambda: left @ right


class _Convolution:
    """Of 3 x 3 pixels, between equally many channels."""

    def __init__(self, device: torch.device, dtype: torch.dtype, quick: bool) -> None:
        images, channels, pixels = (32, 256, 56) if device.type == "cuda" and not quick else (4, 64, 32)
        self.images = torch.randn(images, channels, pixels, pixels, device=device, dtype=dtype, requires_grad=True)
        self.weight = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype, requires_grad=True)
        self.ahead = torch.ones_like(self.images)
        self.flops = float(2 * 9 * channels**2 * images * pixels**2)

    def both(self) -> None:
        torch.autograd.grad(F.conv2d(self.images, self.weight, padding=1), (self.images, self.weight), self.ahead)


class _Attention:
    """Causal attention; `flops` counts half of the square. A GPU gets longer sequences than a CPU."""

    def __init__(self, device: torch.device, dtype: torch.dtype, quick: bool) -> None:
        rows, heads, self.length, self.width = (4, 16, 4096, 128) if device.type == "cuda" and not quick else (2, 8, 512, 64)
        self.query, self.key, self.value = (
            torch.randn(rows, heads, self.length, self.width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        self.ahead = torch.ones_like(self.query)
        self.flops = rows * heads * 4 * self.length**2 * self.width / 2

    def forward(self) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=True)

    def both(self) -> None:
        torch.autograd.grad(self.forward(), (self.query, self.key, self.value), self.ahead)


def _collectives(ranks: int, device: torch.device, most: int) -> list[tuple[str, int, float, float]]:
    """Measure collectives of the first 2, 4, ... ranks; the others wait. The latency is that of a small tensor."""
    works: dict[Any, Callable[[], Any]] = {}
    for count in sorted({*(1 << bit for bit in range(1, ranks.bit_length())), ranks} - {1}):
        group = dist.new_group(list(range(count)))
        for kind in _KINDS:
            for elements in (1 << 10, most):
                takes_part = dist.get_rank() < count
                works[kind, count, elements] = _call(kind, elements, count, group, device) if takes_part else _nothing
    took = _seconds(works, ranks, device)
    sent = 4 * (most - (1 << 10))
    return [
        (kind, count, small, sent / max(took[kind, count, most] - small, 1e-9))
        for (kind, count, elements), small in took.items()
        if elements == 1 << 10
    ]


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
