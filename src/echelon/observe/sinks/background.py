"""Calls a tracker in a thread of its own: where its server or disk stands still, no rank waits for it."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["BackgroundCalls"]

logger = logging.getLogger(__name__)

_MOST = 50_000  # records: some tens of MB, and hours of updates


class BackgroundCalls:
    """Makes calls in order, in a daemon thread. Only `settle` waits for them, and no longer than it is given.

    Of more than `most` calls that wait the oldest are left out, since training goes on, and metrics.jsonl has their numbers. That
    is said when it begins, and `settle` knows how many. What is called here must be made here, or not mind the thread.

    Args:
        name: of the tracker, for messages.
    Attributes:
        left_out: calls that were never made.
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
        """Whether this process made it: its thread is in no process that was forked."""
        return os.getpid() == self._owner

    @property
    def waiting(self) -> int:
        """Calls that are not done."""
        return len(self._calls) + self._busy

    def give(self, call: Callable[[], None]) -> None:
        """Have it called later. It must not raise."""
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
        """Whether all that was given is done; waits for it at most so long."""
        if not self.is_here:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self.waiting, within_s)

    def finish(self) -> None:
        """Nothing more is given: the thread ends with what it has."""
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
