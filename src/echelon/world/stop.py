"""A request to stop that comes as a signal only sets a flag: the loop agrees on a step, saves, and ends the rank.

Work inside a handler would meet the ranks at different places: one in a collective, one in a save, and all would wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from echelon.contracts.stopping import SIGNALS, leave

__all__ = ["asked", "leaving", "listening"]

_asked: str | None = None
_leaving = False


def asked() -> str | None:
    """The name of the signal that asked this rank to stop, as soon as there was one."""
    return _asked


def leaving() -> None:
    """This rank has agreed to end: a signal that reaches it later than others must not kill it on its way out."""
    global _leaving
    _leaving = True


@contextlib.contextmanager
def listening(tell: Callable[[], None]) -> Iterator[None]:
    """Context in which SIGTERM and SIGUSR1 are heard: each calls `tell`, which may only set flags, and is remembered.

    A handler of the user's own stays, and so does an ignored signal. Outside the main thread nothing can be installed.
    """
    own = os.getpid()

    def hear(number: int, frame: FrameType | None) -> None:
        global _asked
        if os.getpid() != own:  # a child that was forked meanwhile: it has nothing to save
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        _asked = signal.Signals(number).name
        tell()

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, leave):
                before[number] = signal.signal(number, hear)
    try:
        yield
    finally:
        for number, handler in before.items() if not _leaving else ():
            signal.signal(number, handler)
