"""One of several loaders that are read together: its present pass, and how far it came."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from echelon.common.errors import LoaderError

__all__ = ["END", "Source"]

logger = logging.getLogger(__name__)

END = object()

# Later passes of an epoch are epochs of their own for a loader that shuffles; no run has so many epochs.
_PASS = 1 << 20


class Source:
    """Reads a loader batch by batch. It is first touched when its first batch is asked for.

    Attributes:
        used: batches of the present pass that were read.
        passes: passes that were started again in this epoch.
        over: whether the present pass came to its end.
        finished: whether a pass of this epoch ever did.
        is_empty: it has no batches, and may have none.
        left_off: a pass before was left in its middle, and none was begun since.
        epoch: what a sampler is told at a pass's beginning; None leaves that to the user.
        allow_empty: a loader without batches is left out, instead of being an error.
    """

    def __init__(self, name: str, loader: Iterable[Any]) -> None:
        self.name, self._loader = name, loader
        self.used = self.passes = 0
        self.over = self.finished = self.is_empty = self.left_off = False
        self.epoch: int | None = None
        self.allow_empty = True
        self._iterator: Iterator[Any] | None = None
        self._skip = 0
        self._restored = False  # put back by its own `load_state_dict`, and not iterated over since

    def read(self) -> Any:
        """The next batch of the pass, or END."""
        if self._iterator is None:
            self._iterator = self._begin()
        batch = next(self._iterator, END)
        if batch is not END:
            self.used += 1
        return batch

    def _begin(self) -> Iterator[Any]:
        if self.epoch is not None:
            for part in (self._loader, getattr(self._loader, "sampler", None), getattr(self._loader, "batch_sampler", None)):
                set_epoch = getattr(part, "set_epoch", None)
                if set_epoch is not None:
                    set_epoch(self.epoch + self.passes * _PASS)
        if self._restored and self.left_off and not self.used:
            next(iter(self._loader), None)  # else it would continue with the pass that the saved run had left
        self.left_off = self._restored = False
        iterator = iter(self._loader)
        if self._skip:
            logger.warning(
                "the loader %r has no state, so its first %s batches are read and skipped: exact only if their order is the same",
                self.name,
                self._skip,
            )
        for count in range(self._skip):
            if next(iterator, END) is END:
                raise LoaderError(f"the loader {self.name!r} must resume after {self._skip} batches, but has only {count}.")
        self._skip = 0
        return iterator

    def end(self, *, left_off: bool) -> None:
        """The present pass is over; with `left_off`, although batches are left."""
        self.over = self.finished = True
        self.left_off, self._iterator = left_off, None

    def gave_nothing(self) -> None:
        """The present pass is over before its first batch, here or on another rank.

        Raises:
            UsageError: unless it may be empty; and if it was not empty before.
        """
        if self.passes or not self.allow_empty:
            again = " a second time" if self.passes else ""
            raise LoaderError(f"the loader {self.name!r} contains no data{again}. Is it a used-up iterator?")
        logger.warning("the loader %r contains no data and is left out", self.name)
        self.is_empty = True

    def restart(self) -> None:
        """Begin another pass."""
        self._iterator, self.used, self.over, self._skip = None, 0, False, 0
        self.passes += 1

    @property
    def is_left_off(self) -> bool:
        """`left_off`, if nobody reads on."""
        return self.left_off or (self.used > 0 and not self.over)

    def follow(self, earlier: Source) -> None:
        """Know how an earlier iteration left the loader."""
        self.left_off = earlier.is_left_off
        self._restored = earlier._restored

    def put_back(self, *, left_off: bool) -> None:
        """The loader was put back to where a saved run had it, by its own `load_state_dict`."""
        self.left_off, self._restored = left_off, hasattr(self._loader, "load_state_dict")

    def state(self) -> dict[str, Any]:
        return {
            "used": self.used,
            "passes": self.passes,
            "over": self.over,
            "finished": self.finished,
            "empty": self.is_empty,
            "left_off": self.left_off,
        }

    def go_on(self, state: dict[str, Any]) -> None:
        """Go on from `state()`; a loader that can is put there by its own `load_state_dict`, another reads what was used."""
        self.used, self.passes = int(state["used"]), int(state["passes"])
        self.over, self.finished, self.is_empty = bool(state["over"]), bool(state["finished"]), bool(state["empty"])
        self.put_back(left_off=bool(state["left_off"]))
        self._iterator, self._skip = None, 0 if hasattr(self._loader, "load_state_dict") else self.used
