"""Facts of this rank's host: disks, limits, names, interfaces, settings. No torch, and nothing that waits for another rank."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.contracts.machine import boot_id, usable_cores, visible_devices
from echelon.contracts.redact import redacted_fields
from echelon.contracts.version import __version__

__all__ = ["PARTS", "in_time", "name"]

# A disk that hangs, a name server that is gone: named, and not waited for.
_PATIENCE_S = 10.0
_MiB = 1 << 20
_SETTINGS = re.compile(r"(?:NCCL|GLOO|TORCH_NCCL|TORCH_DISTRIBUTED|UCX|FI)_\w+|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES")


def name() -> str:
    """As Slurm calls this host, or as it calls itself."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def in_time(find: Callable[[], Any]) -> Any:
    """
    Raises:
        TimeoutError: no answer; its thread is left behind, since nothing ends what hangs in the kernel.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(find())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    if not found:
        raise TimeoutError(f"no answer within {_PATIENCE_S:g} s")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "echelon": __version__, "echelon's code": _own_code(), "driver": _driver()}


def _own_code() -> str:
    """Of the sources of echelon that this host sees: two installations may have one version."""
    package = Path(__file__).parents[2]
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _driver() -> str:
    """NVIDIA's, as its kernel module says; empty without one."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\s(\d+\.\d[\d.]*)\s", Path("/proc/driver/nvidia/version").read_text()):
            return found[1]
    return ""


def _disks() -> dict[str, Any]:
    """Free MiB, by what it is for."""
    places = {"working folder": os.getcwd(), "temporary folder": tempfile.gettempdir()}
    return {what: [path, shutil.disk_usage(path).free // _MiB] for what, path in places.items()}


def _shared_memory() -> list[int]:
    """Free and whole MiB of /dev/shm."""
    usage = shutil.disk_usage("/dev/shm")
    return [usage.free // _MiB, usage.total // _MiB]


def _limits() -> dict[str, int | None]:
    """Soft limits; None is none. Locked memory in MiB."""
    kinds = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "locked memory": resource.RLIMIT_MEMLOCK}
    soft = {what: resource.getrlimit(kind)[0] for what, kind in kinds.items()}
    none = resource.RLIM_INFINITY
    return {
        what: None if limit == none else limit // (_MiB if what == "locked memory" else 1) for what, limit in soft.items()
    } | {"open files at most": None if (hard := resource.getrlimit(resource.RLIMIT_NOFILE)[1]) == none else hard}


def _memory() -> list[int]:
    """Available and whole MiB."""
    import psutil  # type: ignore[import-untyped,unused-ignore]

    memory = psutil.virtual_memory()
    return [memory.available // _MiB, memory.total // _MiB]


def _resolution() -> list[str]:
    """The addresses that this host has for its own name."""
    return sorted({str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)})


def _interfaces() -> list[str]:
    return [each for _, each in socket.if_nameindex()]


def _settings() -> Mapping[str, str]:
    found = {key: value[:80] for key, value in sorted(os.environ.items()) if _SETTINGS.fullmatch(key)}
    shown: Mapping[str, str] = redacted_fields(found)
    return shown


def _machine() -> dict[str, Any]:
    return {
        "cores": usable_cores(),
        "GPUs": len(visible_devices()),
        "InfiniBand": Path("/sys/class/infiniband").is_dir() and bool(os.listdir("/sys/class/infiniband")),
        "boot": hashlib.sha256(boot_id().encode()).hexdigest()[:12],  # tells hosts apart that have one name
    }


# In this order, each a line of its own.
PARTS: Mapping[str, Callable[[], Any]] = {
    what: functools.partial(in_time, find)
    for what, find in {
        "machine": _machine,
        "versions": _versions,
        "disks": _disks,
        "shared memory": _shared_memory,
        "limits": _limits,
        "memory": _memory,
        "resolution": _resolution,
        "interfaces": _interfaces,
        "settings": _settings,
    }.items()
}
