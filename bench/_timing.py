"""What the benchmarks share: options, facts about the machine, medians, a plain-text table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["emit", "installed", "machine", "median", "options", "spread", "versions"]


def options(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has; the first line of its docstring is the description."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help=f"measurements of each, interleaved (default {rounds})")
    parser.add_argument("--json", action="store_true", help="print every measurement as JSON instead of the table")
    return parser


def installed(module: str) -> bool:
    return find_spec(module) is not None


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> str:
    """The CPU's name, how many cores this process may use, and how busy the machine is now."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores, load {os.getloadavg()[0]:.2f}"


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Smallest and largest of the measurements."""
    return f"{min(values):.{digits}f} .. {max(values):.{digits}f}" if values else "-"


def emit(
    arguments: argparse.Namespace,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    notes: Sequence[str] = (),
    facts: dict[str, Any],
) -> None:
    """Print the table, or with --json the facts that it was made from."""
    if arguments.json:
        json.dump({"title": title, **facts}, sys.stdout, indent=1)
        print()
        return
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    line = "  ".join("-" * w for w in widths)

    def text(row: Sequence[str]) -> str:
        """The first column is words, the others are figures."""
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    shown = ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    print("\n".join([title, line, text(header), line, *map(text, rows), line, *notes, facts["machine"], shown]))
