"""Devices that a plan is for, by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from echelon.common.errors import PlanError

__all__ = ["DEVICES", "Cluster", "Device", "bytes_of", "device_named"]

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """
    Args:
        memory: bytes that its driver offers to programs.
    """

    name: str
    memory: int


# What nvidia-smi shows as total memory, in MiB: less than the number on the box, which counts in 10**9 bytes or is rounded up.
_MIB = {
    "a100-40": 40_960,
    "a100-80": 81_920,
    "h100-sxm": 81_559,
    "h100-pcie": 81_559,
    "h100-96": 97_871,
    "h200": 143_771,
    "b200": 183_359,
    "gb200": 189_471,
    "l40s": 46_068,
    "rtx4090": 24_564,
}
DEVICES = {name: Device(name, mib << 20) for name, mib in _MIB.items()}
_SHORT = {"a100": "a100-80", "h100": "h100-sxm", "rtx-4090": "rtx4090", "4090": "rtx4090"}


def device_named(name: str) -> Device:
    """
    Raises:
        PlanError: no such device is known.
    """
    word = name.strip().lower()
    if (found := DEVICES.get(_SHORT.get(word, word))) is None:
        raise PlanError(
            f"device must be one of {', '.join(DEVICES)}, got {name!r}. For another one give its memory: --budget 64GiB."
        )
    return found


@dataclass(frozen=True)
class Cluster:
    """
    Args:
        per_node: devices of each node.
    """

    nodes: int
    per_node: int
    device: Device

    @classmethod
    def of(cls, text: str) -> Cluster:
        """From "16x8xH100": nodes, devices of each, their name.

        Raises:
            PlanError: it has another form, or names no device that is known.
        """
        found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,3})x(\S+)", text.strip(), re.IGNORECASE | re.ASCII)
        if found is None:
            raise PlanError(f"--cluster must be NODESxDEVICESxNAME, such as 16x8xH100, got {text!r}.")
        return cls(int(found[1]), int(found[2]), device_named(found[3]))


_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def bytes_of(text: str, name: str) -> int:
    """From "80GiB", "80 GB" or a number of bytes.

    Raises:
        PlanError: it is none of these, or 0.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([kmgt]i?b)?", text.strip().lower(), re.ASCII)
    if found is None or (size := int(float(found[1]) * _UNITS[found[2] or ""])) <= 0:
        raise PlanError(f"{name} must be a size such as 80GiB, got {text!r}.")
    return size
