"""A request to stop that comes as a signal: SIGTERM, SIGUSR1 or SIGHUP.

    while a loop trains        a flag is set: the loop agrees on a step, saves, and ends the rank with exit code 75
    before, between and after  the rank ends at once with exit code 75: there is nothing to save

Work inside a handler would meet the ranks at different places: one in a collective, one in a save, and all would wait.
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
_tell: Callable[[], None] | None = None  # of the loop that trains
_heard_by: int | None = None  # the process that this module's state is about


def asked() -> str | None:
    """The name of the signal that asked this rank to stop, as soon as there was one; of another rank's, once that is agreed."""
    return _asked


def asked_elsewhere(number: str) -> None:
    """The ranks have found that one of them was asked to stop: what this one begins from now on ends like theirs."""
    global _asked
    _asked = _asked or number


def leaving() -> None:
    """This rank has agreed to end: a signal that reaches it later than others must not kill it on its way out."""
    global _leaving
    _leaving = True


def _hear(number: int, frame: FrameType | None) -> None:
    global _asked
    if os.getpid() != _heard_by:  # a child that was forked meanwhile: it has nothing to save
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
    """From here to the end of this process SIGTERM, SIGUSR1 and SIGHUP mean what this module says. Returns the handlers replaced.

    A handler of the user's own stays, and so does an ignored signal. Outside the main thread nothing can be installed.
    """
    global _heard_by, _asked, _leaving, _tell
    if _heard_by is not None and _heard_by != os.getpid():  # forked since: what the parent was told is not this one's business
        _asked, _leaving, _tell = None, False, None
    _heard_by = os.getpid()
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, _hear) for number in SIGNALS if signal.getsignal(number) in (signal.SIG_DFL, leave)}


def leave_if_asked() -> None:
    """Call it before work other than training: raises SystemExit(75) if a stop was requested meanwhile.

    Also before `install_stop_handlers`: what a handler raises is lost where Python compiles an import, or frees an object.
    """
    if (reason := _asked or heard()) and _tell is None and not _leaving:
        logger.warning("%s came before training began; exit code %s asks the launcher to start again", reason, REQUEUE)
        raise SystemExit(REQUEUE)


@contextlib.contextmanager
def listening(tell: Callable[[], None] | None = None) -> Iterator[None]:
    """Context in which SIGTERM, SIGUSR1 and SIGHUP are heard, if nobody else hears them.

    Args:
        tell: called at a signal; it may only set flags. None ends the rank at once, unless this is within another's context.
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
