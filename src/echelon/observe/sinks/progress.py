"""Progress for people: a live line on a terminal, plain lines elsewhere. Never a control character into a file.

`ProgressModel` is what is known; `ProgressSink` shows it inside a training process; `RunScreen` shows it in the launcher,
which reads the run folder instead, so that drawing costs the ranks nothing and rank 0's own prints do not tear the line.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from echelon.contracts.events import LineReader
from echelon.contracts.run_dir import RunDir
from echelon.contracts.terminal import printable

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["ProgressModel", "ProgressSink", "RunScreen"]

PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.2
# Of a batch of records only the last so many can still be seen in a smoothed number.
_SMOOTHED = 50
# A line that is longer passes as it comes, and the live one waits for its end: else each piece of it would cost all before it.
_LONG_LINE = 65536


class ProgressModel:
    """The latest of everything worth showing, and the time left."""

    def __init__(self) -> None:
        self.phase = ""
        self.step = 0
        self.total_steps: int | None = None
        self.loss: float | None = None
        self.lr: float | None = None
        self.rate: float | None = None
        self.rate_unit = self._rate_key = ""
        self.eval_loss: float | None = None
        self.mfu: float | None = None
        self._origin: tuple[float, int] | None = None
        self._seconds_per_step: float | None = None
        self._shown_step = -1

    def record(self, record: dict[str, Any]) -> None:
        """Take in one line of metrics.jsonl."""
        if "eval_loss" in record:
            self.eval_loss = _number(record["eval_loss"])
            return
        step, now = _step(record, self.step), _number(record.get("time"))
        now = now if now is not None and abs(now) < 1e12 else time.time()
        if self._origin is not None and step > self._origin[1]:
            # The mean since the phase began: compile and warm-up steps fade, a short stall does not swing the estimate.
            self._seconds_per_step = (now - self._origin[0]) / (step - self._origin[1])
        elif self._origin is None:
            self._origin = (now, step)
        self.step = step
        loss = _number(record.get("loss"))
        if loss is not None:
            self.loss = loss if self.loss is None or loss != loss else 0.9 * self.loss + 0.1 * loss
        self.lr = _number(record.get("lr"))
        if self._rate_key not in record:
            self._rate_key = next((k for k in record if k.endswith("_per_s")), "")
            self.rate_unit = printable(self._rate_key.removesuffix("_per_s")[:40])
        mfu = _number(record.get("mfu"))
        if mfu is not None:
            self.mfu = mfu if self.mfu is None else 0.9 * self.mfu + 0.1 * mfu
        rate = _number(record.get(self._rate_key))
        if rate is not None:
            self.rate = rate if self.rate is None else 0.9 * self.rate + 0.1 * rate

    def event(self, event: dict[str, Any]) -> str | None:
        """Take in one event; returns a line if it is worth one."""
        name = event.get("event", "")
        if name == "train_start":
            self.phase, self.total_steps = "train", _step(event, 0, "total_steps") or None
            self.step = _step(event, 0)
            self._origin, self._seconds_per_step = None, None
            total = f" of {self.total_steps}" if self.total_steps else ""
            return f"training from step {self.step}{total}"
        if name == "eval_start":
            self.phase = "evaluate"
        elif name == "eval_end":
            self.phase = "train" if event.get("within_fit") else ""
            loss = _number(event.get("eval_loss"))
            return f"step {_step(event, self.step)}  eval loss {loss:.4f}" if loss is not None else None
        elif name == "train_end":
            self.phase = ""
        elif name == "checkpoint_saved":
            return printable(f"checkpoint {_short(str(event.get('path', '')))}")
        return None

    @property
    def left_s(self) -> float | None:
        if self._seconds_per_step is None or not self.total_steps:
            return None
        return max(0, self.total_steps - self.step) * self._seconds_per_step

    def line(self) -> str:
        """One line of plain text, the same for both kinds of output."""
        parts = [f"step {self.step}" + (f"/{self.total_steps}" if self.total_steps else "")]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.lr is not None:
            parts.append(f"lr {self.lr:.3g}")
        if self.rate is not None:
            parts.append(f"{_count(self.rate)} {self.rate_unit}/s")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.0%}")
        if self.left_s is not None:
            parts.append(f"{_duration(self.left_s)} left")
        if self.phase == "evaluate":
            parts.append("evaluating")
        return "  ".join(parts)

    @property
    def fraction(self) -> float | None:
        return min(1.0, self.step / self.total_steps) if self.total_steps else None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _time_of(said: dict[str, Any]) -> float:
    time_s = _number(said.get("time"))
    return time_s if time_s is not None and time_s == time_s else 0.0  # nan has no place in an order


def _step(record: dict[str, Any], otherwise: int, name: str = "step") -> int:
    """A number of steps, of files that may hold anything."""
    value = record.get(name)
    return value if type(value) is int and 0 <= value < 1 << 62 else otherwise


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"


def _short(path: str) -> str:
    with contextlib.suppress(ValueError):
        relative = os.path.relpath(path)
        return relative if len(relative) < len(path) else path
    return path


class _Painter:
    """Puts lines on a stream: above a live line that is redrawn if the stream is a terminal, else just lines."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._live: Live | None = None
        self._draw_next = 0.0
        self._printed = ("", 0.0)
        self._aside = False

    def line(self, text: str) -> None:
        if self._live is not None:
            from rich.text import Text

            # Colours stay colours, and a long line is the terminal's to wrap, as it would be without us.
            self._live.console.print(Text.from_ansi(text), soft_wrap=True)
        else:
            self.stream.write(text + "\n")
            self.stream.flush()

    def progress(self, model: ProgressModel, *, final: bool = False) -> None:
        """Redraw if it is time; `final` shows the last state even if it is not."""
        now = time.monotonic()
        if self._aside or (model.step == 0 and model.loss is None):
            return
        if self.is_live:
            if final or now >= self._draw_next:
                self._draw(model)
                # Drawing takes a few milliseconds: a hundredth of the time at most, however quick the steps.
                self._draw_next = now + max(LIVE_EVERY_S, 100 * (time.monotonic() - now))
            return
        text = model.line()
        if text != self._printed[0] and (final or now - self._printed[1] >= PLAIN_EVERY_S):
            self._printed = (text, now)
            self.line(text)

    def _draw(self, model: ProgressModel) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if self._live is None:
            console = Console(file=self.stream)
            # We refresh: a thread of rich's own would compete with the training process for the interpreter.
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        row = Table.grid(padding=(0, 1))
        fraction = model.fraction
        if fraction is not None:
            row.add_row(ProgressBar(total=1.0, completed=fraction, width=24), Text(f"{fraction:4.0%}"), Text(model.line()))
        else:
            row.add_row(Text(model.line()))
        self._live.update(row, refresh=True)

    def step_aside(self) -> None:
        """Take the live line away until `go_on`: something else has begun a line."""
        self._aside = True
        if self._live is not None:
            self._live.transient = True
            self.close()

    def go_on(self) -> None:
        self._aside = False

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class ProgressSink:
    """Progress inside the training process, for runs without our launcher."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._model, self._painter = ProgressModel(), _Painter(stream or sys.stderr)

    def records(self, records: list[dict[str, Any]]) -> None:
        for record in records[-_SMOOTHED:]:
            self._model.record(record)
        self._painter.progress(self._model)

    def event(self, event: dict[str, Any]) -> None:
        if event.get("event") == "train_end":
            self._painter.progress(self._model, final=True)
        line = self._model.event(event)
        if line:
            self._painter.line(line)

    def close(self) -> None:
        self._painter.close()


def _through(target: TextIO, data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        target.flush()
        target.buffer.write(data)
        target.buffer.flush()


class RunScreen:
    """The launcher's terminal: rank 0's output as it comes, and progress read from the run folder."""

    def __init__(self, run: RunDir, stream: TextIO | None = None) -> None:
        self._run = run
        self._painter = _Painter(stream or sys.stderr)
        self._model = ProgressModel()
        self._metrics = LineReader(run.metrics, from_end=True)
        self._attempt = -1
        self._events: LineReader | None = None
        self._partial: dict[str, list[bytes]] = {}
        self._partial_since = 0.0
        self._long = ""  # the stream whose line is too long to wait for its end

    def write(self, stream: str, data: bytes) -> None:
        """A live line may only be interrupted by whole lines; without one, bytes pass through untouched."""
        target = sys.stdout if stream == "stdout" else sys.stderr
        if not (self._painter.is_live and target.isatty()):
            _through(target, data)
            return
        if self._long:
            end = data.find(b"\n") + 1 if stream == self._long else 0
            _through(target, data[:end] if end else data)
            if not end:
                return
            self._long, data = "", data[end:]
            self._painter.go_on()
        head, end_of_line, rest = data.rpartition(b"\n")
        if end_of_line:
            whole = b"".join((*self._partial.pop(stream, ()), head))
            for line in whole.split(b"\n"):
                self._painter.line(line.decode("utf-8", "replace"))
        if rest:
            parts = self._partial.setdefault(stream, [])
            parts.append(rest)
            self._partial_since = time.monotonic()
            if sum(map(len, parts)) > _LONG_LINE:
                self._painter.step_aside()
                _through(target, b"".join(self._partial.pop(stream)))
                self._long = stream

    def tick(self) -> None:
        if self._partial and time.monotonic() - self._partial_since > 0.5:
            self._flush_partial()
        self._read()
        self._painter.progress(self._model)

    def _read(self) -> None:
        if self._attempt != self._run.attempt:
            self._attempt = self._run.attempt
            self._events = LineReader(self._run.events(0))
        events = self._events.read() if self._events else []
        # In the order in which they came about: a short run is read whole at once, its beginning after its records.
        for said in sorted([*self._metrics.read(), *events], key=_time_of):
            if "event" not in said:
                self._model.record(said)
                continue
            if said["event"] == "train_end":
                self._painter.progress(self._model, final=True)
            line = self._model.event(said)
            if line:
                self._painter.line(line)

    def _flush_partial(self) -> None:
        for parts in self._partial.values():
            self._painter.line(b"".join(parts).decode("utf-8", "replace"))
        self._partial.clear()

    def close(self) -> None:
        self._flush_partial()
        self._read()
        self._painter.close()
