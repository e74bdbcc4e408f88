"""Stop a run whose losses or gradients stay inf or nan: it no longer trains anything.

The loss over the global batch is the same number on every rank, so all ranks stop at the same update without a message. On a CPU
each loss is checked at once. On a GPU nothing waits for the loss: `_AT_ONCE` losses are copied together beside the computation,
and read after as many more updates. They are read at fixed updates, not when the copy arrives, which differs from rank to rank.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch

from echelon.common.errors import NonFiniteError
from echelon.loop.progress import Progress
from echelon.world import agree
from echelon.world.device import to_host

__all__ = ["FiniteWatch", "check_loss"]

logger = logging.getLogger(__name__)

_AT_ONCE = 16

_NOT_FINITE = ("nan", "inf", "-inf")

# Half precision ends at 2**16: below this scale only gradients beyond 2**32 overflow, and those are inf or nan themselves.
_NO_SCALE = 2.0**-16


@dataclass(frozen=True)
class _Where:
    """An update, and which batches of its epoch it used; all counted from 0."""

    update: int
    epoch: int
    first: int
    last: int

    def __str__(self) -> str:
        batches = f"batch {self.first}" if self.first == self.last else f"batches {self.first} to {self.last}"
        return f"update {self.update} ({batches} of epoch {self.epoch}, counted from 0)"


class FiniteWatch:
    """Counts the updates in a row whose loss is not finite, and those that a gradient scaler has skipped.

    Args:
        limit: how many in a row are too many; None counts nothing.
    Attributes:
        is_long: there were too many. The same on all ranks that train one model.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.forget()

    def forget(self) -> None:
        """Start counting anew, after a restore of an older state."""
        self.is_long = False
        self._row = self._skipped = 0
        self._scale: float | None = None
        self._first: _Where | None = None
        self._own = math.nan  # this rank's own loss of the row's first update
        self._pending: list[tuple[_Where, torch.Tensor, torch.Tensor]] = []
        self._copied: tuple[list[_Where], torch.Tensor, torch.cuda.Event | None] | None = None

    def take(self, loss: Any, own: torch.Tensor, micro_batches: int, progress: Progress) -> None:
        """After an update, before it is counted.

        Args:
            loss: over the global batch, a number or a 0-dim tensor.
            own: this rank's part of it.
        """
        if self.limit is None:
            return
        if isinstance(loss, torch.Tensor) and _is_elsewhere(loss):
            self._pending.append((_where(micro_batches, progress), loss, own))
            if len(self._pending) == _AT_ONCE:
                self._read()
                self._copied, self._pending = _to_host(self._pending), []
            return
        value = float(loss)
        if math.isfinite(value):
            self._row = 0
        else:
            self._count(_where(micro_batches, progress), float(own))

    def _count(self, where: _Where, own: float) -> None:
        if self._row == 0:
            self._first, self._own = where, own
        self._row += 1
        self.is_long = self.is_long or self._row >= (self.limit or math.inf)

    def _read(self) -> None:
        if self._copied is None:
            return
        places, values, arrival = self._copied
        self._copied = None
        if arrival is not None:
            arrival.synchronize()
        for where, (value, own) in zip(places, values.T.tolist(), strict=True):
            if math.isfinite(value):
                self._row = 0 if not self.is_long else self._row
            else:
                self._count(where, own)

    def take_skip(self, skipped: bool, scaler: torch.amp.GradScaler) -> None:
        """Count the updates in a row that the gradient scaler has skipped. A smaller scale cures an overflow, but not a nan."""
        self._skipped = self._skipped + 1 if skipped else 0
        if self.limit is not None and self._skipped >= self.limit and (scale := scaler.get_scale()) < _NO_SCALE:
            self._scale, self.is_long = scale, True

    def raise_if_long(self, *, together: bool) -> None:
        """Collective if `together`, and then only where `is_long`.

        Raises:
            NonFiniteError: with update, step, batches, and each rank's own loss.
        """
        if not self.is_long:
            return
        off = "In an AutoUnit, options=UnitOptions(stop_after_nonfinite_losses=None) turns this check off."
        if self._first is None or (self._scale is not None and self._row < (self.limit or 0)):
            raise NonFiniteError(
                f"the gradients were inf or nan in {self._skipped} updates in a row, although the gradient scaler is down to "
                f"{self._scale:g}: nothing is trained any more. The losses are finite, so look for an infinite derivative, "
                f"such as that of sqrt(0) or of a division by a norm; detect_anomaly=True names the operation. {off}"
            )
        raise NonFiniteError(
            f"the loss was not finite in {self._row} updates in a row, the first of them {self._first} "
            f"({self._whose(together=together)}). Checkpoints up to step-{self._first.update:08} are from "
            "before. Look at those batches, lower the learning rate, or clip gradients. The callback RollBack restores a "
            f"checkpoint and skips such batches. {off}"
        )

    def _whose(self, *, together: bool) -> str:
        """The ranks' own losses of the row's first update that were not finite. Collective if `together`."""
        if not together:
            return str(self._own)
        owns = agree.gather(str(self._own))
        return (
            ", ".join(f"rank {r}: {v}" for r, v in enumerate(owns) if v in _NOT_FINITE)
            or "finite on each rank, but not their sum"
        )

    def finish(self, updates: int, *, together: bool) -> None:
        """At the end of training: read the remaining losses, and check runs of fewer updates than the limit, too.

        Args:
            updates: number of updates of the whole run so far.
        Raises:
            NonFiniteError: as `raise_if_long`; also if no update had a finite loss.
        """
        self._read()
        if self._pending:
            self._copied, self._pending = _to_host(self._pending), []
            self._read()
        self.is_long = self.is_long or (self.limit is not None and 0 < updates <= self._row)
        self.raise_if_long(together=together)
        if self._row:
            whose = self._whose(together=together)
            if agree.is_rank0():
                logger.warning(
                    "the loss was not finite in the last %s updates of training, from %s on (%s). Check the weights",
                    self._row,
                    self._first,
                    whose,
                )


def check_loss(loss: torch.Tensor, weight: Any, update: int) -> None:
    """Check the loss before the backward pass. Collective: a rank that raised alone would leave the others waiting.

    Raises:
        NonFiniteError: on all ranks.
    """
    value = str(float(loss.detach()) if float(weight) else 0.0)
    if not agree.any_rank(value in _NOT_FINITE):
        return
    values = agree.gather(value)
    if bad := [f"rank {r}: {v}" for r, v in enumerate(values) if v in _NOT_FINITE]:
        raise NonFiniteError(f"update {update}: the loss is not finite ({', '.join(bad)}). The parameters were not changed.")


def _where(micro_batches: int, progress: Progress) -> _Where:
    last = progress.num_steps_completed_in_epoch
    first = last - micro_batches + 1
    return _Where(progress.num_updates_completed, progress.num_epochs_completed, first, last)


def _is_elsewhere(loss: torch.Tensor) -> bool:
    return not loss.is_cpu


def _to_host(
    pending: list[tuple[_Where, torch.Tensor, torch.Tensor]],
) -> tuple[list[_Where], torch.Tensor, torch.cuda.Event | None]:
    """Start copying losses to the host: a row of global losses, a row of this rank's. The event tells when they have arrived."""
    there = torch.stack(
        [torch.stack([loss for _, loss, _ in pending]).double(), torch.stack([own for *_, own in pending]).double()]
    )
    return [where for where, *_ in pending], *to_host(there)
