"""Requests to stop by a signal: SIGTERM, SIGUSR1 or SIGHUP.

    while a loop trains        a flag is set: the loop agrees on a step, saves, and ends the rank with exit code 75
    before, between and after  the rank ends at once with exit code 75: there is nothing to save

A handler must not do the work itself: signals reach ranks at different places, one in a collective, one in a save, and all would
wait for each other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from echelon.contracts.stopping import REQUEUE, SIGNALS, heard, leave, note

__all__ = ["asked", "asked_elsewhere", "install_stop_handlers", "leave_if_asked", "leaving", "listening"]

logger = logging.getLogger(__name__)

_asked: str | None = None
_leaving = False
_tell: Callable[[], None] | None = None  # the callback of the loop that trains
_heard_by: int | None = None  # the process to which this module's state belongs


def asked() -> str | None:
    """The signal that asked this rank to stop, or, after an agreement, the one that asked another rank; None without any."""
    return _asked


def asked_elsewhere(name: str) -> None:
    """Note that the ranks have agreed to stop because one of them was asked to. Later loops of this rank stop as well."""
    global _asked
    _asked = _asked or name


def leaving() -> None:
    """Note that this rank has agreed to end: a signal that arrives late must not kill it while it ends."""
    global _leaving
    _leaving = True


def _hear(number: int, frame: FrameType | None) -> None:
    global _asked
    if os.getpid() != _heard_by:  # a forked child: it has nothing to save
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        return
    _asked = signal.Signals(number).name
    note(number)
    if _tell is not None:
        _tell()
    elif not _leaving:
        raise SystemExit(REQUEUE)


_hear.ends_with_75 = True  # type: ignore[attr-defined]  # see contracts/stopping.py


def install_stop_handlers() -> dict[signal.Signals, Any]:
    """Install this module's handlers for SIGTERM, SIGUSR1 and SIGHUP. Returns the replaced handlers.

    The user's own handlers and ignored signals are left alone. Outside the main thread nothing is installed.
    """
    global _heard_by, _asked, _leaving, _tell
    if _heard_by is not None and _heard_by != os.getpid():  # a forked child: signals to the parent do not concern it
        _asked, _leaving, _tell = None, False, None
    _heard_by = os.getpid()
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, _hear) for number in SIGNALS if signal.getsignal(number) in (signal.SIG_DFL, leave)}


def leave_if_asked() -> None:
    """Raise SystemExit(75) if a stop was requested. Call it before work other than training.

    Call it also before `install_stop_handlers`: an exception of a handler is lost while Python compiles an import or frees an
    object.
    """
    if (reason := _asked or heard()) and _tell is None and not _leaving:
        logger.warning("%s came before training began; exit code %s asks the launcher to start again", reason, REQUEUE)
        raise SystemExit(REQUEUE)


@contextlib.contextmanager
def listening(tell: Callable[[], None] | None = None) -> Iterator[None]:
    """Context in which this module handles SIGTERM, SIGUSR1 and SIGHUP, unless other handlers are installed.

    Args:
        tell: called at a signal; it may only set flags. With None a signal ends the rank at once, or calls an outer context's
            `tell`.
    """
    global _tell
    before, outer = install_stop_handlers(), _tell
    _tell = tell or outer
    try:
        yield
    finally:
        _tell = outer
        for number, handler in before.items() if not _leaving else ():
            signal.signal(number, handler)
