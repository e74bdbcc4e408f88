"""A loop of one's own takes turns with the reference that trains it: one has a batch, the other waits.

The reference decides what comes next, and so does the script's `for`; so the reference works in a thread of its own, and at any
moment just one of the two runs. The script's code, with all that is particular to its thread, stays in the main thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from echelon.prover.plain_window import Plain, PlainWindow
from echelon.world.device import in_thread

__all__ = ["Enough", "Turns"]


class Enough(BaseException):
    """Ends a script when all that is compared has been seen. Not an Exception, so that no script swallows it."""


class Turns:
    """
    Args:
        work: what calls `give` and `end_epoch`; when it returns, the script ends.
    Attributes:
        given: how many batches the loop got.
        plain: how the one that it has is trained on.
    """

    window = PlainWindow
    plain: Plain

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self.given = work, 0
        self._to_loop: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._to_work: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left = False  # the loop broke off an epoch

    # --- in the loop

    def batches(self) -> Iterator[Any]:
        """Of one epoch."""
        if self._thread is None:
            self._thread = threading.Thread(target=in_thread(self._run), name="echelon-reference", daemon=True)
            self._thread.start()
        elif not self._left:
            self._to_work.put(None)
        while True:
            kind, value = self._to_loop.get()
            if kind == "batch":
                self._left = False
                try:
                    yield value
                except GeneratorExit:  # a `break`, after the step
                    self._left = True
                    raise
                finally:
                    self._to_work.put(None)
            elif kind == "epoch" and self._left:
                self._left = False  # it knows already
                self._to_work.put(None)
            elif kind == "epoch":
                return
            else:
                raise value

    # --- in the work

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._to_loop.put(("error", error))
        else:
            self._to_loop.put(("end", Enough()))

    def give(self, batch: Any) -> None:
        """Have the loop take its step on a batch, and wait for that."""
        self.given += 1
        self._to_loop.put(("batch", batch))
        self._to_work.get()

    def again(self, batch: Any) -> None:
        """Give a batch once more, in a new iteration: the loop only looked at it."""
        if not self._left:
            self.end_epoch()
        self.give(batch)

    def end_epoch(self) -> None:
        """Have the loop do what it does between two epochs."""
        self._to_loop.put(("epoch", None))
        self._to_work.get()
