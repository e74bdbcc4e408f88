"""Progress for people: a live line on a terminal, plain lines elsewhere. Control characters are never written into a file.

`model` holds the state; `ProgressSink` shows it inside a training process; `RunScreen` shows it in the launcher, which reads the
run folder instead, so that drawing costs the ranks nothing, and rank 0's own output does not break the line.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO, cast

from echelon.common.terminal import Forgiving, is_terminal, printable, put_bytes, say
from echelon.contracts.events import LineReader
from echelon.contracts.run_dir import RunDir
from echelon.observe.recent import Recent
from echelon.observe.sinks.model import ProgressModel, in_order
from echelon.observe.stragglers import stragglers

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["Notes", "ProgressSink", "RunScreen"]

PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.2
RANKS_EVERY_S = 2.0
_STRAGGLERS = 8  # most stragglers named per attempt
# Of a batch of records, only this many last ones still influence a smoothed number.
_SMOOTHED = 50
# A longer line is passed on as it comes, and the live line waits for its end: joining its pieces again and again would be slow.
_LONG_LINE = 65536


class _Painter:
    """Writes lines to a stream; on a terminal, above a live line that is redrawn."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = Forgiving(stream)
        self.is_live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self._live: Live | None = None
        self._draw_next = 0.0
        self._printed = ("", 0.0)
        self._aside = False

    def line(self, text: str) -> None:
        if self._live is not None:
            from rich.text import Text

            # Keep colours, and let the terminal wrap long lines as usual.
            self._live.console.print(Text.from_ansi(text), soft_wrap=True)
        else:
            self.stream.write(text + "\n")

    def event(self, model: ProgressModel, event: dict[str, Any]) -> None:
        """Pass an event to the model, and show the line that it returns."""
        if event.get("event") == "train_end":
            self.progress(model, final=True)
        line = model.event(event)
        if line:
            self.line(line)

    def progress(self, model: ProgressModel, *, final: bool = False) -> None:
        """Redraw if it is time; with `final`, show the last state in any case."""
        now = time.monotonic()
        if self._aside or (model.step == 0 and model.loss is None):
            return
        if self.is_live:
            if final or now >= self._draw_next:
                first = self._live is None
                self._draw(model)
                # Drawing takes a few milliseconds, the first time more, as it imports rich: use at most a hundredth of the time.
                self._draw_next = now + max(LIVE_EVERY_S, 0.0 if first else 100 * (time.monotonic() - now))
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
            console = Console(file=cast("TextIO", self.stream))
            # Refreshed by hand: a thread of rich would compete with training for the GIL.
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
        """Remove the live line until `go_on`, since other output has begun a line."""
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
    """Progress inside the training process, for runs without echelon's launcher."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._model, self._painter = ProgressModel(), _Painter(stream or sys.stderr)

    def records(self, records: list[dict[str, Any]]) -> None:
        for record in records[-_SMOOTHED:]:
            self._model.record(record)
        self._painter.progress(self._model)

    def event(self, event: dict[str, Any]) -> None:
        self._painter.event(self._model, event)

    def close(self) -> None:
        self._painter.close()


class Notes:
    """A run's important events in a few lines on standard error, if nothing else shows progress.

    If the program has set up logging, they go to the logger "echelon" at the level INFO.
    """

    def __init__(self) -> None:
        self._model, self._saved = ProgressModel(), ""

    def event(self, event: dict[str, Any]) -> None:
        name, line = event.get("event"), self._model.event(event)
        if name == "checkpoint_saved":  # only the last one is shown
            self._saved = line or ""
        elif name == "train_end":
            self._say(self._saved)
        elif name in ("best_checkpoint", "early_stop") or "restored_from" in event or "reached" in event:
            self._say(line or "")

    @staticmethod
    def _say(line: str) -> None:
        if not line:
            return
        logger = logging.getLogger("echelon")
        if logger.hasHandlers() or not logger.isEnabledFor(logging.WARNING):
            logger.info("%s", line)
        else:
            say(line)


class RunScreen:
    """The launcher's terminal: rank 0's output as it comes, and progress from the run folder."""

    def __init__(self, run: RunDir, stream: TextIO | None = None) -> None:
        self._run = run
        self._painter = _Painter(stream or sys.stderr)
        self._model = ProgressModel()
        self._metrics = LineReader(run.metrics, from_end=True)
        self._attempt = -1
        self._events: LineReader | None = None
        self._partial: dict[str, list[bytes]] = {}
        self._partial_since = 0.0
        self._long = ""  # the stream with a line too long to wait for
        self._times: Recent | None = None
        self._ranks_next, self._named = 0.0, set[int]()

    def write(self, stream: str, data: bytes) -> None:
        """Show rank 0's output. A live line is interrupted by whole lines only; without one, bytes pass unchanged."""
        target = sys.stdout if stream == "stdout" else sys.stderr
        if not (self._painter.is_live and is_terminal(target)):
            put_bytes(target, data)
            return
        if self._long:
            end = data.find(b"\n") + 1 if stream == self._long else 0
            put_bytes(target, data[:end] if end else data)
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
                put_bytes(target, b"".join(self._partial.pop(stream)))
                self._long = stream

    def tick(self) -> None:
        if self._partial and time.monotonic() - self._partial_since > 0.5:
            self._flush_partial()
        self._read()
        if time.monotonic() >= self._ranks_next:
            self._look_at_ranks()
            self._ranks_next = time.monotonic() + RANKS_EVERY_S
        self._painter.progress(self._model)

    def _look_at_ranks(self) -> None:
        """Show the slowest straggler in the progress line, and each straggler once in a line with the cause."""
        slow = stragglers(self._times.look()) if self._times is not None else []
        self._model.slowest = f"rank {slow[0].rank} {slow[0].factor:.1f}x slow" if slow else ""
        for each in slow[:_STRAGGLERS]:
            if each.rank not in self._named and len(self._named) < _STRAGGLERS:
                self._named.add(each.rank)
                self._painter.line(printable(f"echelon: {each}"))

    def _read(self) -> None:
        if self._attempt != self._run.attempt:
            self._attempt = self._run.attempt
            self._events, self._times = LineReader(self._run.events(0)), Recent(self._run)
            self._named.clear()
        events = self._events.read() if self._events else []
        for record in in_order(self._metrics.read(), events):
            if "event" in record:
                self._painter.event(self._model, record)
            else:
                self._model.record(record)

    def _flush_partial(self) -> None:
        for parts in self._partial.values():
            self._painter.line(b"".join(parts).decode("utf-8", "replace"))
        self._partial.clear()

    def close(self) -> None:
        self._flush_partial()
        self._read()
        self._painter.close()
