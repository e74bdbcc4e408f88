"""Times and amounts formatted for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["BINARY", "clock", "duration", "milliseconds", "quantity"]

BINARY = (" B", " KiB", " MiB", " GiB", " TiB")


def duration(seconds: float | None) -> str:
    """1h 02m, 1m 30s, 12.5s; for fixed values."""
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def clock(seconds: float) -> str:
    """1:02:03 or 1:30; for a value that keeps counting."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"


def milliseconds(seconds: float) -> str:
    """A step's time in three digits: 12.5 ms, from one second on 1.25 s."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def quantity(value: float, base: int = 1000, units: Sequence[str] = ("", "k", "M", "G", "T")) -> str:
    """Four digits and a unit: 12.35k."""
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:.4g}{units[power]}"
