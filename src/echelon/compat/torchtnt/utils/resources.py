"""What this machine and this process use: processor, memory, GPU."""

from __future__ import annotations

import shutil
import subprocess

import psutil

__all__ = ["cpu_stats", "gpu_stats", "nvidia_smi"]

# What nvidia-smi calls it, and what we do.
_GPU = {
    "utilization.gpu": "utilization_gpu_percent",
    "utilization.memory": "utilization_memory_percent",
    "fan.speed": "fan_speed_percent",
    "memory.used": "memory_used_mb",
    "memory.free": "memory_free_mb",
    "temperature.gpu": "temperature_gpu_celsius",
    "temperature.memory": "temperature_memory_celsius",
}
_TIMEOUT_S = 10.0


def cpu_stats() -> dict[str, float]:
    """In per cent of the machine: `cpu_vm_percent` (memory), `cpu_percent` since the last call, `cpu_swap_percent`. Of this
    process: `worker_cpu_time_user`, `worker_cpu_time_system` in seconds, `worker_rss` in bytes."""
    process = psutil.Process()
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info()
    return {
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_percent": psutil.cpu_percent(),
        "cpu_swap_percent": psutil.swap_memory().percent,
        "worker_cpu_time_user": times.user,
        "worker_cpu_time_system": times.system,
        "worker_rss": float(memory.rss),
    }


def nvidia_smi() -> str | None:
    """Where the program is, if there is one."""
    return shutil.which("nvidia-smi")


def gpu_stats(gpu: int | str) -> dict[str, float]:
    """What nvidia-smi reports of one GPU; empty if there is none, without the values that it does not know.

    Takes some tens of milliseconds.

    Args:
        gpu: its number on this machine, whatever CUDA_VISIBLE_DEVICES says, or its UUID.
    """
    program = nvidia_smi()
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(_GPU)}", "--format=csv,nounits,noheader", f"--id={gpu}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return {}
    found: dict[str, float] = {}
    for name, text in zip(_GPU.values(), done.stdout.strip().split(","), strict=False):
        try:
            found[name] = float(text)
        except ValueError:  # "[N/A]"
            continue
    return found
