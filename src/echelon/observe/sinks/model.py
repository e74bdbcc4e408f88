"""A run's progress as one line of text, from the lines of metrics.jsonl and the events."""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import Any

from echelon.common.terminal import printable
from echelon.observe.amounts import clock
from echelon.observe.columns import finite, moment, number

__all__ = ["ProgressModel", "in_order", "short_path"]

_EVALUATED = 8  # most numbers in an evaluation's line


class ProgressModel:
    """The latest values worth showing, and the time left."""

    def __init__(self) -> None:
        self.phase = ""
        self.step = 0
        self.total_steps: int | None = None
        self.eval_loss: float | None = None
        self.memory: float | None = None  # peak bytes of rank 0's GPU so far
        self.slowest = ""
        self._begin()

    def _begin(self) -> None:
        """Reset smoothed values and the time left, which belong to one training: a process may have several."""
        self.loss: float | None = None
        self.lr: float | None = None
        self.rate: float | None = None
        self.rate_unit = self._rate_key = ""
        self.mfu: float | None = None
        self._origin: tuple[float, int] | None = None
        self._seconds_per_step: float | None = None

    def record(self, record: dict[str, Any]) -> None:
        """Take a line of metrics.jsonl."""
        if "eval_loss" in record:
            self.eval_loss = number(record["eval_loss"])
            return
        if "loss" not in record:  # only numbers of an epoch or an evaluation
            return
        step, now = _step(record, self.step), moment(record.get("time"))
        now = time.time() if now is None else now
        if self._origin is not None and step > self._origin[1]:
            # The mean since the phase began: slow first steps fade, and a short stall hardly changes the estimate.
            self._seconds_per_step = (now - self._origin[0]) / (step - self._origin[1])
        elif self._origin is None:
            self._origin = (now, step)
        self.step = step
        loss = number(record.get("loss"))
        if loss is not None:
            self.loss = _smooth(self.loss, loss)
        self.lr = number(record.get("lr"))
        if self._rate_key not in record:
            self._rate_key = next((k for k in record if k.endswith("_per_s")), "")
            self.rate_unit = printable(self._rate_key.removesuffix("_per_s")[:40])
        mfu = number(record.get("mfu"))
        if mfu is not None:
            self.mfu = _smooth(self.mfu, mfu)
        memory = finite(record.get("memory_peak_bytes"))
        self.memory = self.memory if memory is None else memory
        rate = number(record.get(self._rate_key))
        if rate is not None:
            self.rate = _smooth(self.rate, rate)

    def event(self, event: dict[str, Any]) -> str | None:
        """Take an event; returns a line if it is worth showing."""
        name = event.get("event", "")
        if name == "train_start":
            self.phase, self.total_steps = "train", _step(event, 0, "total_steps") or None
            self.step = _step(event, 0)
            self._begin()
            total = f" of {self.total_steps}" if self.total_steps else ""
            restored = f", restored from {short_path(str(event['restored_from']))}" if event.get("restored_from") else ""
            reached = f"{event['reached']} reached, " if event.get("reached") else ""
            complete = f": {reached}nothing is left to train" if event.get("complete") is True else ""
            return printable(f"training from update {self.step}{total}{restored}{complete}")
        if name == "eval_start":
            self.phase = "evaluate"
        elif name == "eval_end":
            self.phase = "train" if event.get("within_fit") else ""
            return self._evaluated(event)
        elif name == "train_end":
            self.phase = ""
        elif name == "checkpoint_saved":
            return printable(f"checkpoint {short_path(str(event.get('path', '')))}")
        elif name == "best_checkpoint":
            value = number(event.get("value"))
            return printable(f"best       {short_path(str(event.get('path', '')))}  {event.get('name')} {_shown(value)}")
        elif name == "early_stop":
            at = f" at update {event['step']}" if event.get("step") is not None else ""
            return printable(f"stopped early by {event.get('name')}{at}: {event.get('why')}")
        return None

    def _evaluated(self, event: dict[str, Any]) -> str | None:
        """A line with an evaluation's numbers, under the names by which they can be monitored."""
        logged = event.get("logged")
        results = {"loss": event.get("eval_loss"), **(logged if isinstance(logged, dict) else {})}
        numbers = [(name, value) for name, each in results.items() if (value := number(each)) is not None]
        shown = [f"eval_{name} {_shown(value)}" for name, value in numbers[:_EVALUATED]]
        shown += [f"and {len(numbers) - _EVALUATED} more"] if len(numbers) > _EVALUATED else []
        return printable("  ".join([f"update {_step(event, self.step)}", *shown])) if shown else None

    @property
    def left_s(self) -> float | None:
        if self._seconds_per_step is None or not self.total_steps:
            return None
        return max(0, self.total_steps - self.step) * self._seconds_per_step

    def line(self) -> str:
        """One line of plain text, the same for both kinds of output."""
        parts = [f"update {self.step}" + (f"/{self.total_steps}" if self.total_steps else "")]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.lr is not None:
            parts.append(f"lr {self.lr:.3g}")
        if self.rate is not None:
            parts.append(f"{_count(self.rate)} {self.rate_unit}/s")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.0%}")
        if self.memory is not None and 0 < self.memory < 1e18:
            parts.append(f"{self.memory / (1 << 30):.3g} GiB")
        if self.slowest:
            parts.append(self.slowest)
        if self.left_s is not None:
            parts.append(f"{clock(self.left_s)} left")
        if self.phase == "evaluate":
            parts.append("evaluating")
        return "  ".join(parts)

    @property
    def fraction(self) -> float | None:
        return min(1.0, self.step / self.total_steps) if self.total_steps else None


def _shown(value: float | None) -> str:
    """A number in a loss's format, unless that would cut it to nothing."""
    return (
        f"{value:.4f}" if value is not None and 1e-2 <= abs(value) < 1e6 else f"{value:.4g}" if value is not None else "unknown"
    )


def _smooth(before: float | None, now: float) -> float:
    """A moving average. A value that is not finite is shown unsmoothed, and replaced by the next."""
    return now if before is None or not math.isfinite(before) or not math.isfinite(now) else 0.9 * before + 0.1 * now


def _step(record: dict[str, Any], otherwise: int, name: str = "step") -> int:
    """A number of steps from an untrusted file."""
    value = record.get(name)
    return value if type(value) is int and 0 <= value < 1 << 62 else otherwise


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def short_path(path: str) -> str:
    """The path relative to the working folder, if that is shorter."""
    with contextlib.suppress(ValueError, OSError):  # not a path, or the working folder was removed
        relative = os.path.relpath(path)
        return relative if len(relative) < len(path) else path
    return path


def in_order(*files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records and events by time: a short run is read all at once, with its events after its records."""
    return sorted((record for records in files for record in records), key=lambda record: moment(record.get("time")) or 0.0)
