"""What to start, and how it ended: the values that a launcher takes and returns."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from echelon.common.errors import LaunchError, UsageError, require
from echelon.common.machine import DEVICE_VARIABLE, usable_cores, visible_devices
from echelon.common.terminal import shortly
from echelon.diagnosis.failure import Failure

__all__ = [
    "JobSpec",
    "Outcome",
    "auto_ranks",
    "cores_of_a_rank",
    "parse_duration",
    "parse_hang_timeout",
    "parse_rank_range",
    "parse_ranks",
    "spec_of",
]


@dataclass(frozen=True)
class JobSpec:
    """A program to run on ranks, on this machine or on several.

    Args:
        target: path of a Python script; with `module`, a dotted module name; with `call`, the file of a call; with `command`,
            the path of the script that the command runs.
        kind: what `target` is: "script", "module", "call" or "command".
        args: the program's own arguments; of a launch command (`launcher.functions.launch_command`), its words.
        ranks: number of processes on each node.
        min_ranks: the fewest ranks of a restart after ranks were lost; None always restarts with `ranks`.
        max_restarts: how often all ranks are started again after a failure.
        grace_s: seconds between asking the ranks to stop and killing them.
        stop_after_s: seconds, over all attempts, after which the ranks are asked to save and end; None is no limit.
        restart: start over even if the run's folder has progress.
        env: variables set on top of this process's environment.
        own_device: each rank sees one GPU only, by CUDA_VISIBLE_DEVICES (`launcher.local.placement`).
        nodes: number of machines; more than one needs Slurm.
        code: the folder from which a module is imported; empty for the ranks' working folder. For a command, the file that
            identifies the call to the script.
        bind: give each rank cores of its own (`launcher.local.placement`), with as many threads.
        sha256: checksum of a call's file, passed on command lines and trusted from there only; or of a command's `code`.
        stall_after_s: seconds without a step after which the launcher says which rank is behind; None takes the variable
            ECHELON_STALL_AFTER, else 60.
        hang_timeout_s: seconds without progress after which the ranks are ended as failed; 0 is never; None takes the variable
            ECHELON_HANG_TIMEOUT, else 600.
    """

    target: str
    kind: str = "script"
    args: Sequence[str] = ()
    ranks: int = 1
    max_restarts: int = 0
    grace_s: float = 30.0
    min_ranks: int | None = None
    stop_after_s: float | None = None
    restart: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    own_device: bool = False
    nodes: int = 1
    bind: bool = False
    code: str = ""
    sha256: str | None = None
    stall_after_s: float | None = None
    hang_timeout_s: float | None = None


def spec_of(values: Any) -> JobSpec | None:
    """A spec from the result of `dataclasses.asdict`; None if a field is missing or has a wrong type."""
    if not isinstance(values, dict) or not isinstance(values.get("target"), str):
        return None
    known = {f.name: values[f.name] for f in fields(JobSpec) if f.name in values}
    return JobSpec(**known) if all(_FIELDS[name](value) for name, value in known.items()) else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("target", "code"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("restart", "own_device", "bind"), lambda value: isinstance(value, bool)),
    **dict.fromkeys(("ranks", "nodes"), lambda value: _is_count(value) and value > 0),
    "kind": lambda value: value in ("script", "module", "call", "command"),
    "args": lambda value: isinstance(value, list) and all(isinstance(word, str) for word in value),
    "max_restarts": _is_count,
    "grace_s": _is_number,
    "min_ranks": lambda value: value is None or _is_count(value),
    "stop_after_s": lambda value: value is None or _is_number(value),
    **dict.fromkeys(("stall_after_s", "hang_timeout_s"), lambda value: value is None or _is_number(value)),
    "env": lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
    "sha256": lambda value: value is None or isinstance(value, str),
}


@dataclass(frozen=True)
class Outcome:
    """How a job ended: exit code 0 without a failure, 75 without one if it can be resumed, or the first failing rank's.

    `note` says why the job was not restarted with fewer ranks.
    """

    exit_code: int
    failure: Failure | None = None
    restarts: int = 0
    note: str = ""


def auto_ranks() -> int:
    """One rank per visible NVIDIA device; without one, or with the CPU as device, one per core that this process may use."""
    return (0 if os.environ.get(DEVICE_VARIABLE) == "cpu" else len(visible_devices())) or usable_cores()


def cores_of_a_rank(gpus_per_node: int | None) -> int:
    """Default number of cores of a rank: four with a GPU, else one.

    One core is too few for a rank with a GPU: it launches kernels, reads data, pins memory and writes checkpoints. The smallest
    nodes with GPUs have four for each.
    """
    return 4 if gpus_per_node else 1


def parse_ranks(text: str | int) -> int:
    """The number of ranks from "auto" or a whole number of at least 1.

    Raises:
        UsageError: anything else.
    """
    if text == "auto":
        return auto_ranks()
    try:
        ranks = operator.index(text) if not isinstance(text, str) else int(text) if _WHOLE.fullmatch(text) else int("no number")
    except (TypeError, ValueError):
        raise LaunchError(
            f"ranks must be a whole number of at least 1, or 'auto' for one per device or core, got {text!r}."
        ) from None
    if ranks > (most := max(1024, 64 * usable_cores())):
        raise LaunchError(
            f"ranks must be at most {most} on this machine, which has {usable_cores()} cores for them, got {ranks}."
        )
    if ranks < 1 or isinstance(text, bool):
        raise LaunchError(f"ranks must be at least 1, or 'auto' for one per device or core, got {text}.")
    return ranks


def parse_rank_range(text: str) -> tuple[int | None, int]:
    """(least, most) from "MIN:MAX"; (None, ranks) from a plain number or "auto".

    Raises:
        UsageError: not a range of ranks, or MIN is larger than MAX.
    """
    if ":" not in text:
        return None, parse_ranks(text)
    least, most = (parse_ranks(part) for part in text.split(":", 1))
    require(least <= most, "ranks", "MIN:MAX with MIN at most MAX", text, kind=LaunchError)
    return least, most


_UNITS = {"d": 86400.0, "h": 3600.0, "m(?:in)?": 60.0, "s?": 1.0}
_WHOLE = re.compile(r"\s*[-+]?[0-9]{1,9}\s*")
_AMOUNT = r"[0-9]{1,12}(?:\.[0-9]{1,12})?"


def parse_duration(text: str, what: str = "a duration") -> float:
    """Seconds from "90", "90s", "55m", "10min", "1h30m" or "2d".

    Args:
        what: name of the option or variable, for the error.
    Raises:
        UsageError: anything else, also an empty text.
    """
    parts = re.fullmatch("".join(rf"(?:({_AMOUNT}){unit})?" for unit in _UNITS), text)
    seconds = sum(float(n) * unit for n, unit in zip(parts.groups(), _UNITS.values(), strict=True) if n) if parts else 0.0
    if not seconds:
        raise LaunchError(
            f"{what} must be a number of seconds above 0, or like 55m or 1h30m with d, h, m, s, got {shortly(text)}."
        )
    return seconds


def parse_hang_timeout(text: str, what: str = "a hang timeout") -> float:
    """Seconds from a duration; 0 from "none", which never ends a run.

    Args:
        what: name of the option or variable, for the error.
    Raises:
        UsageError: anything else.
    """
    try:
        return 0.0 if text == "none" else parse_duration(text, what)
    except UsageError as error:
        raise LaunchError(str(error).replace(" must be ", " must be 'none', or ", 1)) from None
