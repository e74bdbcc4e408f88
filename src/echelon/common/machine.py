"""The cores and GPUs that this process may use, counted without starting CUDA; and versions of packages."""

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

# "cpu" or "cuda": the ranks' device, whatever the script says. Set by `--device`, or by hand.
DEVICE_VARIABLE = "ECHELON_DEVICE"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def boot_id() -> str:
    """Identifies this boot of the machine; empty where the system has no such id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_stat(pid: int) -> list[str]:
    """The kernel's facts about a process: state (a letter), parent, ... (proc(5)). Empty if it does not exist, or no Linux."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        )  # the process's name may hold any character
    except OSError:
        return []


def started_at(pid: int) -> int | None:
    """Start time of a process, in the kernel's ticks since boot, which no clock change affects.

    With `boot_id` and the pid it identifies a process. None if the process does not exist, or is a zombie.
    """
    fields = process_stat(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else None


def usable_cores(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Number of cores that this process may use, by its affinity and by the CPU quota of its control groups; at least 1.

    A container with `--cpus=2` sees all cores of its machine; with one thread per core, threads would mostly wait for each other.

    Args:
        groups, own: paths where Linux describes control groups, and those of this process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cores, *_quotas(groups, own)])))


def _quotas(groups: Path, own: Path) -> Iterator[float]:
    """CPU quotas, in cores, of all groups of this process, in both versions of Linux's interface."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = own.read_text().splitlines()
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        # In a container the path may be the machine's, of which only the root is visible.
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
    """The NVIDIA GPUs that a process with this environment sees, named as in CUDA_VISIBLE_DEVICES.

    Args:
        dev: Linux's folder of devices.
    """
    count = len([path for path in dev.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])
    if (text := env.get("CUDA_VISIBLE_DEVICES")) is None or not count:
        return [str(number) for number in range(count)]
    names = [name.strip() for name in text.split(",")]
    # CUDA stops at the first name that it does not know. Names other than numbers are UUIDs, also of parts of a GPU.
    bad = (i for i, n in enumerate(names) if n in ("", "-1", "NoDevFiles") or (n.isdecimal() and not _is_below(n, count)))
    return names[: next(bad, len(names))]


def interface_of(address: str) -> str:
    """The name of the network interface with this address; empty if there is none."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # here: few callers need it

    return next((name for name, all_ in psutil.net_if_addrs().items() for a in all_ if a.address.split("%")[0] == address), "")


def missing_interface(env: Mapping[str, str], backend: str = "gloo nccl") -> str:
    """A sentence about a variable that names a network interface which this host lacks; empty if there is none.

    Args:
        backend: check only the variables of "gloo", "nccl", or of both in one text.
    """
    chosen = [(name, env.get(name, "").strip()) for name in _INTERFACES if name.partition("_")[0].lower() in backend]
    if not any(value for _, value in chosen):
        return ""
    there = [name for _, name in socket.if_nameindex()]
    for variable, value in chosen:
        exact = variable.startswith("GLOO") or value.startswith("=")
        if not value or value.startswith("^"):  # NCCL: any interface but these
            continue
        # gloo uses all interfaces of a list; NCCL those that exist, by prefixes.
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
    """Version of an installed package; "not installed" also for one that is only on Python's path, as with PYTHONPATH=src."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
