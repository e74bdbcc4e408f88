"""Asking ranks to stop and go on later: what launcher and ranks must mean by the same signal and the same exit code."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["REQUEUE", "SIGNALS", "leave"]

# EX_TEMPFAIL of sysexits.h: "try again later". The run has saved what it had and is not complete.
REQUEUE = 75

# Slurm's and Kubernetes' request to end, and the usual warning some time before it.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def leave(number: int, frame: FrameType | None) -> None:
    """What SIGUSR1 does to a rank that does not train yet: it ends, with nothing to save. Installed by the launcher.

    While it trains, `echelon.world.stop` puts a handler in its place.
    """
    raise SystemExit(REQUEUE)
