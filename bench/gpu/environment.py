"""The environment of the other parts: versions, the card, and the speed that it reaches in practice."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from bench.gpu.rows import Notes
from bench.gpu.runner import Setting

from echelon.loop.records.utilization import peak_flops

OPTIONAL = ("triton", "torchao", "accelerate", "lightning", "pytorch-lightning", "liger-kernel", "pytest")


def run(setting: Setting, notes: Notes) -> None:
    if setting.device == "cuda" and not torch.cuda.is_available():
        notes("device", remark=_why_no_device(), status="failed")
        return
    device = torch.device(setting.device)
    notes("device", torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {os.cpu_count()} cores: the reduced form")
    notes("torch", torch.__version__, remark=f"CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    found = []
    for package in OPTIONAL:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    notes("packages", remark=", ".join(found))
    if device.type == "cuda":
        _card(notes)
    size = 128 if setting.small else 8192
    for dtype in (torch.bfloat16, torch.float16):
        reached = _product(size, dtype, device)
        notes(f"matrix product, {str(dtype).removeprefix('torch.')}", reached / 1e12, "TFLOP/s", f"{size}^3, random data")
    _copies(device, 1 << (16 if setting.small else 28), notes)


def _why_no_device() -> str:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = f"torch {torch.__version__} finds no CUDA device"
    if torch.version.cuda is None and torch.version.hip is None:
        why += ": it was built for CPUs. Name an interpreter with another torch: make gpu PYTHON=..."
    elif shown is not None and not shown.strip():
        why += ": CUDA_VISIBLE_DEVICES is empty"
    elif shutil.which("nvidia-smi") is None:
        why += ": this machine has no nvidia-smi, so probably no driver"
    else:
        why += f" (CUDA {torch.version.cuda}, CUDA_VISIBLE_DEVICES={shown}). See what nvidia-smi says of the driver"
    return f'{why}. Without a GPU: make gpu ARGS="--device cpu"'


def _card(notes: Notes) -> None:
    facts = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    notes("memory", total / 2**30, "GiB", f"{free / 2**30:.1f} free at the start")
    notes("capability", f"{facts.major}.{facts.minor}", remark=f"{facts.multi_processor_count} multiprocessors")
    notes("driver", _driver())
    notes("NCCL", ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "not in this torch")
    notes("bf16", "yes" if torch.cuda.is_bf16_supported(including_emulation=False) else "no", remark="in hardware")
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16)
    if peak is None:
        notes("peak, bf16", remark="not known for this name: no MFU is given", status="left out")
    else:
        notes("peak, bf16", peak / 1e12, "TFLOP/s", "dense, from the maker's data sheet")


def _driver() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
        return done.stdout.splitlines()[0].strip() if done.stdout.strip() else "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown (no nvidia-smi)"


def seconds(run: Callable[[], Any], device: torch.device, times: int = 10) -> float:
    """Seconds of one call, after three to warm up."""
    for _ in range(3):
        run()
    _settle(device)
    began = time.perf_counter()
    for _ in range(times):
        run()
    _settle(device)
    return (time.perf_counter() - began) / times


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _product(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a square matrix product."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out), device)


def _copies(device: torch.device, size: int, notes: Notes) -> None:
    here = torch.ones(size, dtype=torch.uint8)
    there, other = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    notes("copy on the device", 2 * size / seconds(lambda: there.copy_(other), device) / 1e9, "GB/s", "bytes read and written")
    notes("copy from pageable memory", size / seconds(lambda: there.copy_(here), device, 4) / 1e9, "GB/s")
    if device.type == "cuda":
        pinned = here.pin_memory()
        notes("copy from pinned memory", size / seconds(lambda: there.copy_(pinned, non_blocking=True), device, 4) / 1e9, "GB/s")
        notes("copy to pinned memory", size / seconds(lambda: pinned.copy_(there, non_blocking=True), device, 4) / 1e9, "GB/s")
