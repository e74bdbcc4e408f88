"""What this process may use of its machine: cores and GPUs, counted without starting CUDA; which packages there are."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from echelon.common.numbers import digits
from echelon.common.terminal import shortly

__all__ = [
    "DEVICE_VARIABLE",
    "boot_id",
    "interface_of",
    "missing_interface",
    "package_version",
    "process_stat",
    "started_at",
    "usable_cores",
    "visible_devices",
]

# "cpu" or "cuda": on what ranks compute, whatever the script says. Set by `--device`, or by hand.
DEVICE_VARIABLE = "ECHELON_DEVICE"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def boot_id() -> str:
    """Names this start of this machine; empty where the system has no such name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_stat(pid: int) -> list[str]:
    """What the kernel says of a process: its state, a letter; its parent; ... (proc(5)). Empty if there is none, or no Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()  # a name may hold anything
    except OSError:
        return []


def started_at(pid: int) -> int | None:
    """When a process began, in the kernel's ticks since the start of the machine, which no clock changes.

    With `boot_id` and the pid this identifies a process. None if it does not exist, or is a zombie.
    """
    fields = process_stat(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else None


def usable_cores(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """The smaller of the cores that this process may run on, and of the time that its control groups grant it; at least 1.

    A container with `--cpus=2` sees all cores of its machine. A thread for each of them would wait for the others most of the
    time.

    Args:
        groups, own: where Linux tells of control groups, and of this process's.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cores, *_quotas(groups, own)])))


def _quotas(groups: Path, own: Path) -> Iterator[float]:
    """In cores, of every group that this process is in, of both versions of Linux's interface."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = own.read_text().splitlines()
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        # In a container the path may be the machine's, of which only the root is seen.
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):
                yield _of_folder(groups / folder) if not kinds else _of_old_folder(groups / "cpu" / folder)


def _of_folder(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text().split()
    return math.inf if quota == "max" else int(quota) / int(period)


def _of_old_folder(folder: Path) -> float:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return math.inf if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())


def visible_devices(env: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> list[str]:
    """The NVIDIA GPUs that a process with this environment sees, as CUDA_VISIBLE_DEVICES names them.

    Args:
        dev: where Linux has its devices.
    """
    count = len([path for path in dev.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])
    if (text := env.get("CUDA_VISIBLE_DEVICES")) is None or not count:
        return [str(number) for number in range(count)]
    names = [name.strip() for name in text.split(",")]
    # CUDA reads up to the first that it does not know. Other names than numbers are UUIDs, also of parts of a GPU.
    bad = (i for i, n in enumerate(names) if n in ("", "-1", "NoDevFiles") or (n.isdecimal() and not _is_below(n, count)))
    return names[: next(bad, len(names))]


def interface_of(address: str) -> str:
    """The name of the network interface that has this address; empty if none has."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # here: few need it

    return next((name for name, all_ in psutil.net_if_addrs().items() for a in all_ if a.address.split("%")[0] == address), "")


def missing_interface(env: Mapping[str, str], backend: str = "gloo nccl") -> str:
    """A sentence on a variable that names a network interface which this host does not have; empty if none does.

    Args:
        backend: only the variables of these: "gloo", "nccl", or both in one text.
    """
    chosen = [(name, env.get(name, "").strip()) for name in _INTERFACES if name.partition("_")[0].lower() in backend]
    if not any(value for _, value in chosen):
        return ""
    there = [name for _, name in socket.if_nameindex()]
    for variable, value in chosen:
        exact = variable.startswith("GLOO") or value.startswith("=")
        if not value or value.startswith("^"):  # NCCL: any but these
            continue
        # gloo uses all of a list; NCCL whatever of it is there, by the beginnings of names.
        names = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
        known = [any(each == name if exact else each.startswith(name) for each in there) for name in names]
        if not (all(known) if variable.startswith("GLOO") else any(known)):
            return (
                f"{variable} must name a network interface of {socket.gethostname()}, got {shortly(value)}. "
                f"There {'is' if len(there) == 1 else 'are'} {', '.join(there)}. Name one of these, or unset {variable}."
            )
    return ""


def _is_below(text: str, count: int) -> bool:
    number = digits(text)
    return number is not None and number < count


def package_version(name: str) -> str:
    """Of an installed package; "not installed" also for one that is only on Python's path, as with PYTHONPATH=src."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
