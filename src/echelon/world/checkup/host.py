"""Facts of this rank's host: disks, limits, names, interfaces, settings. Nothing here uses torch or waits for another rank."""

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

from echelon.common.hostlist import expand_hostlist
from echelon.common.machine import boot_id, usable_cores, visible_devices
from echelon.common.redact import redacted_fields
from echelon.contracts.version import __version__
from echelon.world.device import in_thread

__all__ = ["PARTS", "code_of", "in_time", "name"]

# Limit for a disk that hangs or a name server that is gone: these become an error.
_PATIENCE_S = 10.0
_MiB = 1 << 20
_MOST_SOURCES = 1000
_SETTINGS = re.compile(r"(?:NCCL|GLOO|TORCH_NCCL|TORCH_DISTRIBUTED|UCX|FI)_\w+|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES")


def name() -> str:
    """Slurm's name of this host, or its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def in_time(find: Callable[[], Any]) -> Any:
    """Call `find` with a time limit.

    Raises:
        TimeoutError: no answer. Its thread stays, since a thread that hangs in the kernel cannot be ended.
    """
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(find())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=in_thread(run), daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    if not results:
        raise TimeoutError(f"no answer within {_PATIENCE_S:g} s")
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "echelon": __version__, "echelon's code": _own_code(), "driver": _driver()}


def _own_code() -> str:
    """A checksum of echelon's sources on this host: two installations may have the same version."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def code_of(script: str) -> str:
    """A checksum of a script and of the other sources in its folder, as this host sees them.

    Raises:
        OSError: the script is not there.
    """
    path = Path(script)
    digest = hashlib.sha256(path.read_bytes())
    for other in sorted(path.parent.glob("*.py"))[:_MOST_SOURCES]:
        digest.update(f"{other.name}\0".encode() + hashlib.sha256(other.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _driver() -> str:
    """The version of NVIDIA's kernel module; empty without one."""
    with contextlib.suppress(OSError):
        if match := re.search(r"\s(\d+\.\d[\d.]*)\s", Path("/proc/driver/nvidia/version").read_text()):
            return match[1]
    return ""


def _disks() -> dict[str, Any]:
    """By purpose of the folder: free MiB and files, whether a file can be made there, and the folder's inode number."""
    return {
        what: _place(path)
        for what, path in {"working folder": os.getcwd(), "temporary folder": os.environ.get("TMPDIR") or "/tmp"}.items()
    }


def _place(path: str) -> dict[str, Any]:
    disk = os.statvfs(path)
    writable = True
    try:
        with tempfile.TemporaryFile(dir=path):  # it has no name, so nothing remains
            pass
    except OSError:
        writable = False
    return {
        "path": path,
        "free_mib": disk.f_bavail * disk.f_frsize // _MiB,
        "free_files": disk.f_favail if disk.f_files else None,
        "writable": writable,
        "number": os.stat(path).st_ino,
    }


def _shared_memory() -> list[int]:
    """Free and total MiB of /dev/shm."""
    usage = shutil.disk_usage("/dev/shm")
    return [usage.free // _MiB, usage.total // _MiB]


def _limits() -> dict[str, int | None]:
    """Soft limits, and the hard one of open files; None is unlimited. Locked memory is in MiB."""
    kinds = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "locked memory": resource.RLIMIT_MEMLOCK}
    soft = {what: resource.getrlimit(kind)[0] for what, kind in kinds.items()}
    none = resource.RLIM_INFINITY
    return {
        what: None if limit == none else limit // (_MiB if what == "locked memory" else 1) for what, limit in soft.items()
    } | {"open files at most": None if (hard := resource.getrlimit(resource.RLIMIT_NOFILE)[1]) == none else hard}


def _memory() -> list[int]:
    """Available and total MiB."""
    import psutil  # type: ignore[import-untyped,unused-ignore]

    memory = psutil.virtual_memory()
    return [memory.available // _MiB, memory.total // _MiB]


def _resolution() -> dict[str, list[str]]:
    """The addresses of this host's own name; and hosts without an address here: of the Slurm step's first and the next host."""
    nodes = expand_hostlist(os.environ.get("SLURM_STEP_NODELIST", ""))
    node_name = os.environ.get("SLURMD_NODENAME", "")
    asked = {nodes[0], nodes[(nodes.index(node_name) + 1) % len(nodes)]} if node_name in nodes else set()
    unknown = [each for each in sorted(asked) if not _addresses(each)]
    own = _addresses(socket.gethostname())
    return {"own": own, "unknown": unknown + ([] if own else [socket.gethostname()])}


def _addresses(host: str) -> list[str]:
    try:
        return sorted({str(address[4][0]) for address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def _interfaces() -> list[str]:
    return [each for _, each in socket.if_nameindex()]


def _settings() -> Mapping[str, str]:
    settings = {key: value[:80] for key, value in sorted(os.environ.items()) if _SETTINGS.fullmatch(key)}
    shown: Mapping[str, str] = redacted_fields(settings)
    return shown


def _machine() -> dict[str, Any]:
    return {
        "cores": usable_cores(),
        "GPUs": len(visible_devices()),
        "InfiniBand": Path("/sys/class/infiniband").is_dir() and bool(os.listdir("/sys/class/infiniband")),
        "boot": hashlib.sha256(boot_id().encode()).hexdigest()[:12],  # distinguishes hosts with the same name
    }


# Run in this order; each result is a line of its own.
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
