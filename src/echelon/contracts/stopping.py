"""Asking ranks to stop and resume later: the signals and the exit code that launcher and ranks agree on."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

__all__ = ["REQUEUE", "SIGNALS", "is_ours", "leave", "signal_name"]

# EX_TEMPFAIL of sysexits.h: "try again later". The run has saved what it had and is not complete.
REQUEUE = 75

# Slurm's and Kubernetes' request to end, and the usual warning some time before it.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def leave(number: int, frame: FrameType | None) -> None:
    """What SIGUSR1 does to a rank from its first line on: it ends, with nothing to save. Installed by the launcher.

    From `init_from_env` on, `echelon.world.stop` has a handler in its place, for SIGTERM as well.
    """
    raise SystemExit(REQUEUE)


leave.ends_with_75 = True  # type: ignore[attr-defined]


def signal_name(number: int) -> str:
    """Such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def is_ours(handler: Any) -> bool:
    """Whether a signal's handler is one of echelon's, and not the program's own."""
    return getattr(handler, "ends_with_75", False) is True
