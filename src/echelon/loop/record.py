"""Emission of numbers and events on rank 0: cheap per update, read from the device a moment later, written in batches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.observe.sinks.folder import Sink

__all__ = ["Recorder"]

# Often enough for a live line, seldom enough to cost nothing: at a thousand updates a second a batch holds two hundred.
_FLUSH_S = 0.2


class Recorder:
    """Collects the records of updates as tuples of tensors and floats and gives them to the sinks a few times a second.

    Tensors are read when a batch is flushed, without the newest record: watching does not wait for the device's last work.
    """

    def __init__(self, sinks: list[Sink], weight_unit: str) -> None:
        self._sinks = sinks
        self._rate_key = f"{weight_unit}_per_s"
        self._pending: list[tuple[int, int, Any, Any, Any, Any, float]] = []
        self._flushed_at = self._last_at = time.perf_counter()
        self._wall_offset = time.time() - self._flushed_at

    def update(self, step: int, update: int, loss_sum: Any, weight: Any, lr: Any, grad_norm: Any) -> None:
        """One optimizer update: global sum of weighted losses and weight, so that loss is their quotient."""
        now = time.perf_counter()
        self._pending.append((step, update, loss_sum, weight, lr, grad_norm, now))
        if now - self._flushed_at >= _FLUSH_S:
            self.flush(keep_newest=True)
            self._flushed_at = now

    def evaluation(self, step: int, name: str, value: float) -> None:
        self.flush()
        for sink in self._sinks:
            sink.records([{"step": step, name: value, "time": time.time()}])

    def event(self, event: str, **fields: Any) -> None:
        self.flush()
        record = {"event": event, "time": time.time(), **fields}
        for sink in self._sinks:
            sink.event(record)

    def pause_clock(self) -> None:
        """Time since the last update does not count as training: an evaluation or a checkpoint took it."""
        self._last_at = time.perf_counter()

    def flush(self, *, keep_newest: bool = False) -> None:
        newest = [self._pending.pop()] if keep_newest and self._pending else []
        records = [self._read(*row) for row in self._pending]
        self._pending = newest
        if records:
            for sink in self._sinks:
                sink.records(records)

    def _read(self, step: int, update: int, loss_sum: Any, weight: Any, lr: Any, grad_norm: Any, at: float) -> dict[str, Any]:
        weight = float(weight)
        elapsed, self._last_at = at - self._last_at, max(at, self._last_at)
        return {
            "step": step,
            "update": update,
            "loss": float(loss_sum) / weight,
            "lr": float(lr),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            self._rate_key: weight / elapsed if elapsed > 0 else None,
            "time": at + self._wall_offset,
        }

    def close(self) -> None:
        self.flush()
        for sink in self._sinks:
            sink.close()
