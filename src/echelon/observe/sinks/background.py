"""Calls a tracker in a thread of its own, so that no rank waits for a slow server or disk."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["BackgroundCalls"]

logger = logging.getLogger(__name__)

_MOST = 50_000  # records: some tens of MB, or hours of updates


class BackgroundCalls:
    """Makes calls in order, in a daemon thread. Only `settle` waits for them, for a limited time.

    If more than `most` calls are waiting, the oldest are dropped, since training goes on and metrics.jsonl has their numbers. The
    first drop is logged, and `left_out` counts them. An object called here must be created in this thread, or be usable from any.

    Args:
        name: the tracker's name, for messages.
    Attributes:
        left_out: number of dropped calls.
    """

    def __init__(self, name: str, most: int = _MOST) -> None:
        self._name, self._most, self._owner = name, most, os.getpid()
        self._calls: deque[Callable[[], None]] = deque()
        self._busy = self._is_finished = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.left_out = 0

    @property
    def is_here(self) -> bool:
        """Whether this process created it: a forked process does not have its thread."""
        return os.getpid() == self._owner

    @property
    def waiting(self) -> int:
        """Number of calls that are not done."""
        return len(self._calls) + self._busy

    def give(self, call: Callable[[], None]) -> None:
        """Queue a call, which must not raise."""
        if not self.is_here:
            return
        with self._changed:
            if len(self._calls) >= self._most:
                self._calls.popleft()
                self.left_out += 1
            self._calls.append(call)
            self._changed.notify_all()
            is_first = self.left_out == 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"echelon-{self._name}", daemon=True)
            self._thread.start()
        if is_first:
            logger.warning(
                "%s is %d records behind: from now on the oldest of them are left out there. The run continues; metrics.jsonl "
                "has them.",
                self._name,
                self._most,
            )

    def settle(self, within_s: float) -> bool:
        """Wait at most `within_s`; returns whether all queued calls are done."""
        if not self.is_here:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self.waiting, within_s)

    def finish(self) -> None:
        """Accept no more calls: the thread ends after those it has."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()
            is_done = not self.waiting
        if self._thread is not None and is_done:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._calls or self._is_finished))
                if not self._calls:
                    return
                call, self._busy = self._calls.popleft(), True
            call()
