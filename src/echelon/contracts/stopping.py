"""Asking ranks to stop and resume later: the signals and the exit code that launcher and ranks share."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

__all__ = ["REQUEUE", "SIGNALS", "handling", "heard", "is_ours", "leave", "note", "signal_name"]

# EX_TEMPFAIL of sysexits.h: "try again later". The run has saved its state and is not complete.
REQUEUE = 75

# SIGTERM asks to end (Slurm, Kubernetes), SIGUSR1 is the usual warning before that, SIGHUP means a closed terminal or connection.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


_heard: tuple[int, str] | None = None  # pid of the process that got the signal, and its name


def note(number: int) -> None:
    """Record that this process got a signal that asks it to end. Called by the handlers, for the rank's record."""
    global _heard
    _heard = (heard() and _heard) or (os.getpid(), signal_name(number))


def heard() -> str:
    """The name of the first signal that asked this process to end; empty if there was none, whatever other ranks got."""
    return _heard[1] if _heard is not None and _heard[0] == os.getpid() else ""


def leave(number: int, frame: FrameType | None) -> None:
    """Handler of SIGUSR1 from a rank's first line on, installed by the launcher: end without saving, as there is nothing to save.

    From `init_from_env` on, a handler of `echelon.world.stop` replaces it, and those of the other signals.
    """
    note(number)
    raise SystemExit(REQUEUE)


leave.ends_with_75 = True  # type: ignore[attr-defined]


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def is_ours(handler: Any) -> bool:
    """Whether a signal handler is echelon's, and not the program's own."""
    return getattr(handler, "ends_with_75", False) is True


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Context with handlers of signals. An ignored signal stays ignored, as under `nohup`.

    Nothing changes outside of the main thread, as in a notebook's executor: signals belong to the main thread.
    """
    previous: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number, handler in handlers.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
