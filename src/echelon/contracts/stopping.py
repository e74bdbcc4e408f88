"""Asking ranks to stop and resume later: the signals and the exit code that launcher and ranks agree on."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

__all__ = ["REQUEUE", "SIGNALS", "heard", "is_ours", "leave", "note", "signal_name"]

# EX_TEMPFAIL of sysexits.h: "try again later". The run has saved what it had and is not complete.
REQUEUE = 75

# Slurm's and Kubernetes' request to end, the usual warning some time before it, and a terminal or connection that has gone.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


_heard: tuple[int, str] | None = None  # by which process, and what


def note(number: int) -> None:
    """This very process was sent a signal that asks it to end: said by the handlers, for its record."""
    global _heard
    _heard = (heard() and _heard) or (os.getpid(), signal_name(number))


def heard() -> str:
    """The name of the first signal that asked this very process to end; empty if none did, whatever other ranks were sent."""
    return _heard[1] if _heard is not None and _heard[0] == os.getpid() else ""


def leave(number: int, frame: FrameType | None) -> None:
    """What SIGUSR1 does to a rank from its first line on: it ends, with nothing to save. Installed by the launcher.

    From `init_from_env` on, `echelon.world.stop` has a handler in its place, for the others as well.
    """
    note(number)
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
