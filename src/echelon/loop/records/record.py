"""Records numbers and events on rank 0: cheap per update, read from the device a moment later, written in batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from echelon.loop.records.utilization import Utilization
from echelon.world.device import to_host

if TYPE_CHECKING:
    from echelon.observe.sinks.folder import Sink

__all__ = ["Recorder"]

# Often enough for a live line, seldom enough to cost nothing: at a thousand updates a second a batch holds two hundred.
_FLUSH_S = 0.2
# One update: its number, [loss, weight, gradient norm, further numbers ...], learning rate, time, FLOPs, the names of the further
# numbers, and one tensor on the device with all numbers that are there.
_Row = tuple[int, list[Any], Any, float, float, tuple[str, ...], torch.Tensor | None]
_ELSEWHERE = object()  # stands for a number that is on the device
_MEMORY_S = 1.0  # between two reads of the allocator's counters, which take a fraction of a millisecond


class Recorder:
    """Collects the records of updates and gives them to the sinks a few times a second.

    Numbers on a GPU are copied to the host beside the computation, for many updates at once, and read when they have arrived:
    watching a run never makes it wait for its device.
    """

    def __init__(self, sinks: list[Sink], weight_unit: str) -> None:
        self._sinks = sinks
        self._rate_key = f"{weight_unit}_per_s"
        self._pending: list[_Row] = []
        self._copied: tuple[list[_Row], torch.Tensor, torch.cuda.Event | None] | None = None
        self.utilization: Utilization | None = None  # set at the first step that can tell
        self.counts_flops = True  # until that step finds that the device's peak is unknown
        self._looked_at = 0.0
        self._flushed_at = self._last_at = time.perf_counter()
        self._wall_offset = time.time() - self._flushed_at

    def count_flops(self, unit: Any, data: Any) -> None:
        """Count the FLOPs of a micro-batch of the current update."""
        if self.utilization is None:
            self.utilization = Utilization(unit)
            self.counts_flops = self.utilization.counts
        if self.utilization.counts:
            self.utilization.count(data)

    def update(self, step: int, loss: Any, weight: Any, lr: Any, grad_norm: Any, more: Mapping[str, Any] | None = None) -> None:
        """Record update `step`, counted from 1: mean loss and weight of its global batch, and further numbers by name. Values are
        numbers or 0-dim tensors.
        """
        now, there = time.perf_counter(), None
        if isinstance(loss, torch.Tensor) and loss.is_cpu:
            loss = loss.item()  # now: hundreds of tensors kept until the flush would displace the model's from the CPU cache
        given = [loss, weight, grad_norm, *(more.values() if more else ())]
        if isinstance(loss, torch.Tensor):  # the norm of offloaded gradients is on the host
            there = torch.stack([value.detach().double() for value in given if _is_elsewhere(value)])
            given = [_ELSEWHERE if _is_elsewhere(value) else value for value in given]
        flops = self.utilization.take() if self.counts_flops and self.utilization is not None else 0.0
        self._pending.append((step, given, lr, now, flops, tuple(more or ()), there))
        if now - self._flushed_at >= _FLUSH_S:
            self._write_arrived()
            self._flushed_at = now

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record numbers of an epoch or an evaluation, by name."""
        self.flush()
        for sink in self._sinks:
            sink.records([{"step": step, **numbers, "time": time.time()}])

    def event(self, event: str, **fields: Any) -> None:
        self.flush()
        record = {"event": event, "time": time.time(), **fields}
        for sink in self._sinks:
            sink.event(record)

    def pause_clock(self) -> None:
        """Leave the time since the last update out of the throughput: an evaluation or a checkpoint took it."""
        self._last_at = time.perf_counter()

    def flush(self) -> None:
        """Write all records, waiting for the device if need be."""
        self._write_arrived(wait=True)

    def _write_arrived(self, *, wait: bool = False) -> None:
        """Write the rows copied at the last call, if they have arrived, and start copying those since. Rows on the host are
        written at once.
        """
        while self._copied is not None or self._pending:
            if self._copied is None:
                self._copied, self._pending = _to_host(self._pending), []
            rows, values, arrival = self._copied
            if wait and arrival is not None:
                arrival.synchronize()
            elif arrival is not None and not arrival.query():
                return
            self._copied = None
            records = self._read(rows, iter(values.tolist()))
            self._add_memory(records[-1])
            for sink in self._sinks:
                sink.records(records)

    def _add_memory(self, record: dict[str, Any]) -> None:
        now = time.perf_counter()
        if self.utilization is not None and now - self._looked_at >= _MEMORY_S:
            self._looked_at = now
            record |= self.utilization.memory()

    def _read(self, rows: Sequence[_Row], values: Iterator[float]) -> list[dict[str, Any]]:
        used, rate_key, offset, last_at, records = self.utilization, self._rate_key, self._wall_offset, self._last_at, []
        for step, given, lr, at, flops, names, _ in rows:
            loss, weight, grad_norm, *more = (next(values) if value is _ELSEWHERE else value for value in given)
            elapsed, last_at = at - last_at, max(at, last_at)
            rate = float(weight) / elapsed if elapsed > 0 else None
            record = {
                "step": step,
                "loss": float(loss),
                "lr": None if lr is None else float(lr),
                "grad_norm": None if grad_norm is None else float(grad_norm),
                rate_key: rate,
                "time": at + offset,
            }
            if names:
                record |= {name: float(value) for name, value in zip(names, more, strict=True)}
            if used is not None and rate is not None:
                if used.devices > 1:
                    record[f"{rate_key}_per_device"] = rate / used.devices
                if flops and (mfu := used.mfu(flops, elapsed)) is not None:
                    record["mfu"] = mfu
            records.append(record)
        self._last_at = last_at
        return records

    def close(self) -> None:
        self.flush()
        for sink in self._sinks:
            sink.close()


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_cpu


def _to_host(rows: list[_Row]) -> tuple[list[_Row], torch.Tensor, torch.cuda.Event | None]:
    """Start copying the rows' numbers from the device to the host; the event tells when they have arrived."""
    there = [row[-1] for row in rows if row[-1] is not None]
    return rows, *to_host(torch.cat(there) if there else torch.empty(0))
