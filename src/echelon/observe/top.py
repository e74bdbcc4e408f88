"""The present state of a run, from its folder alone: where each rank is, who is slow, what happened last. For `echelon top`.

`Watch` reads what was added since its last look; `lines` makes text of it. It does not query the ranks, so it costs them nothing.
A run on a cluster can be watched wherever its folder is visible.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.common.files import read_end
from echelon.common.terminal import columns, one_line
from echelon.contracts.events import LineReader
from echelon.contracts.run_dir import RunDir, read_json
from echelon.contracts.times import PARTS, TimeRecord
from echelon.observe.amounts import clock, milliseconds
from echelon.observe.columns import finite, moment, number
from echelon.observe.facts import Attempt, get, word
from echelon.observe.recent import Recent
from echelon.observe.sinks.model import ProgressModel, in_order
from echelon.observe.stragglers import stragglers

__all__ = ["Snapshot", "Watch", "lines"]

_TAIL_BYTES = 1 << 16
_MOST_EVENTS = 10_000  # per look; a run of years has fewer
_SILENT_S = 60.0  # a running run that wrote nothing for this long is called silent
_EVENTS = 3
_LOG_LINES = 5
_SHOWN = (
    "loss",
    "eval_loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "samples_per_s",
    "mfu",
    "memory_peak_bytes",
    "host_memory_bytes",
)
_NOTED = {"train_start", "checkpoint_saved", "checkpoint_failed", "eval_end", "exception", "stopped", "train_end"}


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment.

    Args:
        name, ranks: from run.json.
        attempt: the newest attempt; None before the first.
        ended: earlier attempts, by number.
        progress: the progress line; `fraction` is the completed share of the run, from 0 to 1.
        since_s: seconds since the run last wrote anything.
        step, total_steps: completed steps, and steps of the whole run if known.
        latest: numbers of the latest records of metrics.jsonl, by name.
        times: the latest record of each rank.
        slow: a sentence per rank that holds up the others.
        events: the latest events, one line each.
        output: a rank, and the last lines of its output.
    """

    name: str
    ranks: str
    attempt: Attempt | None
    ended: Sequence[Attempt]
    progress: str
    fraction: float | None
    since_s: float | None
    running_s: float | None
    step: int
    total_steps: int | None
    latest: Mapping[str, float]
    times: Mapping[int, TimeRecord]
    slow: Sequence[str]
    events: Sequence[str]
    output: tuple[int, Sequence[str]]


class Watch:
    """Follows a run through all its attempts.

    Args:
        rank: the rank whose output is shown; None for the first rank that failed, else rank 0.
    """

    def __init__(self, run: RunDir, rank: int | None = None) -> None:
        self._run, self._rank = run, rank
        self._attempt = -1
        self._model, self._metrics = ProgressModel(), LineReader.of_end(run.metrics, _TAIL_BYTES)
        self._events: LineReader | None = None
        self._seen: list[dict[str, Any]] = []
        self._numbers: dict[str, float] = {}
        self._times: Recent | None = None
        self._ended: dict[int, Attempt] = {}

    def look(self) -> Snapshot:
        """The present state. Never raises: what cannot be read is not shown."""
        numbers = [int(path.name) for path in self._run.attempts()]
        if numbers and numbers[-1] != self._attempt:
            self._begin(numbers)
        there = RunDir(self._run.path, max(self._attempt, 0))
        fresh = self._events.read() if self._events is not None else []
        fresh = [each for each in fresh[:-_MOST_EVENTS] if each.get("event") == "train_start"][-1:] + fresh[-_MOST_EVENTS:]
        self._seen = [*self._seen, *fresh][-_MOST_EVENTS:]
        for record in in_order(self._metrics.read(), fresh):
            if "event" in record:
                self._model.event(record)
                if record["event"] == "train_start":
                    self._numbers.clear()
            else:
                self._model.record(record)
                self._numbers |= {name: value for name in _SHOWN if (value := number(record.get(name))) is not None}
        times = self._times.look() if self._times is not None else {}
        about = read_json(self._run.run_json)
        attempt = Attempt(self._attempt, read_json(there.exit_json), self._seen) if self._attempt >= 0 else None
        return Snapshot(
            name=word(get(about, "name")) or self._run.name,
            ranks=word(get(about, "ranks")) or "?",
            attempt=attempt,
            ended=list(self._ended.values()),
            progress=self._model.line() if self._model.step or self._model.loss is not None else "",
            fraction=self._model.fraction,
            since_s=_since(there),
            running_s=_running(attempt),
            step=self._model.step,
            total_steps=self._model.total_steps,
            latest=dict(self._numbers),
            times={rank: records[-1] for rank, records in times.items()},
            slow=[str(each) for each in stragglers(times)[:3]],
            events=[line for event in self._seen if (line := _event_line(event))][-_EVENTS:],
            output=self._output(there, attempt),
        )

    def _begin(self, numbers: Sequence[int]) -> None:
        """Begin a new attempt; the others have ended."""
        for n in numbers[:-1]:
            if n not in self._ended:
                self._ended[n] = Attempt(n, read_json(RunDir(self._run.path, n).exit_json), [])
        self._attempt = numbers[-1]
        there = RunDir(self._run.path, self._attempt)
        self._events, self._times = LineReader(there.events(0)), Recent(there)
        self._seen = []

    def _output(self, there: RunDir, attempt: Attempt | None) -> tuple[int, Sequence[str]]:
        failure = attempt.failure() if attempt is not None else None
        first = (failure.rank if failure is not None else None) or "0"
        failed = int(first) if first.isdecimal() and len(first) < 8 else 0
        rank = failed if self._rank is None else self._rank
        try:
            text = read_end(there.log(rank), 8192).decode("utf-8", "replace")
        except OSError:
            return rank, []
        return rank, [line for line in text.replace("\r", "\n").splitlines() if line.strip()][-_LOG_LINES:]


def _since(there: RunDir) -> float | None:
    """Seconds since the attempt last wrote anything; None before that."""
    times = []
    for path in [there.metrics, there.events(0), there.log(0), *_some(there.attempt_path)]:
        try:
            times.append(path.lstat().st_mtime)
        except OSError:
            continue
    return max(0.0, time.time() - max(times)) if times else None


def _some(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.glob("times.rank*.jsonl"))[:8]
    except OSError:
        return


def _running(attempt: Attempt | None) -> float | None:
    if attempt is None:
        return None
    began, ended = attempt.span()
    if began is None:
        return None
    return max(0.0, (ended if attempt.exit is not None and ended is not None else time.time()) - began)


def _event_line(event: Mapping[str, Any]) -> str:
    """An event as a line; empty for unimportant ones."""
    name, at = event.get("event"), moment(event.get("time"))
    if not isinstance(name, str) or name not in _NOTED:
        return ""
    when = time.strftime("%H:%M:%S", time.localtime(at)) if at is not None else "--:--:--"
    step, loss = finite(event.get("step")), number(event.get("eval_loss"))
    words = {
        "train_start": "training begins",
        "checkpoint_saved": "checkpoint",
        "checkpoint_failed": f"checkpoint failed: {event.get('error')}",
        "eval_end": f"evaluation {loss:.4f}" if loss is not None else "evaluation",
        "exception": f"{event.get('kind')}: {event.get('message')}",
        "stopped": f"stopped by {event.get('signal')}",
        "train_end": "training ends",
    }[name]
    return f"{when}  {words}{f' at update {step:.0f}' if step is not None else ''}"


# --- as text


def lines(snapshot: Snapshot, *, width: int = 100, height: int = 40, job: str = "", gone: bool = False) -> list[str]:
    """A screen of text: at most `height` lines of at most `width` characters, safe for a terminal.

    Args:
        job: the scheduler's state of the job.
        gone: the launcher has ended without recording the attempt's end.
    """
    head = [_state(snapshot, job, gone=gone)]
    if snapshot.progress:
        head.append(_bar(snapshot.fraction) + snapshot.progress)
    head += [f"attempt {each.number}: {_ended(each)}" for each in snapshot.ended[-3:]]
    if snapshot.attempt is not None and (explained := snapshot.attempt.explained()):
        head += ["", *_wrapped(explained, width)]
    head += [f"slow: {each}" for each in snapshot.slow]
    foot = ["", *snapshot.events] if snapshot.events else []
    rank, output = snapshot.output
    if output:
        foot += ["", f"rank {rank}:", *(f"  {line}" for line in output)]
    table = _table(snapshot.times, room=max(4, height - len(head) - len(foot) - 1))
    made = [*head, *(["", *table] if table else []), *foot]
    return [_cut(one_line(line), width) for line in made[:height]]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(one_line(text), max(20, width))[:6]


def _state(snapshot: Snapshot, job: str, *, gone: bool) -> str:
    attempt = snapshot.attempt
    if attempt is None:
        state = job or "has not begun"
    elif attempt.exit is not None:
        state = _ended(attempt)
    else:
        silent = snapshot.since_s is not None and snapshot.since_s > _SILENT_S
        state = f"has written nothing for {clock(snapshot.since_s or 0.0)}" if silent else "running"
        state = "its launcher has ended: `echelon explain` says more" if gone else state
        state += f" ({job})" if job else ""
    parts = [snapshot.name, state, f"{snapshot.ranks} ranks"]
    if attempt is not None and attempt.number:
        parts.append(f"attempt {attempt.number}")
    if snapshot.running_s is not None:
        parts.append(clock(snapshot.running_s))
    return "  ".join(parts)


def _ended(attempt: Attempt) -> str:
    status, failure = attempt.status(), attempt.failure()
    return f"{status.text}, {failure.one_line()}" if failure is not None else " ".join((status.text, status.detail)).strip()


def _bar(fraction: float | None, wide: int = 24) -> str:
    if fraction is None:
        return ""
    full = round(wide * fraction)
    return f"[{'#' * full}{'.' * (wide - full)}] {fraction:4.0%}  "


def _table(times: Mapping[int, TimeRecord], room: int) -> list[str]:
    """A row per rank; if there is no room for all, the slowest."""
    if not times:
        return []
    slowest = sorted(times, key=lambda rank: -times[rank].own_s)
    shown = sorted(slowest[: max(1, room - 2)])
    rows = [["rank", "host", "step", "a step", "its own", "mostly", "waits", "slowest line"]]
    for rank in shown:
        record = times[rank]
        wall = record.wall_s or 1.0
        part = max(PARTS, key=lambda name: getattr(record, name))
        mostly = f"{_PARTS[part]} {getattr(record, part) / wall:.0%}"
        step = milliseconds(record.wall_s / record.count) if record.count else "-"
        own = milliseconds(record.own_s) if record.own_s else "-"
        cells = [str(rank), record.host, str(record.steps[1]), step, own, mostly, f"{record.wait_s / wall:.0%}", record.line]
        rows.append([_cut(one_line(cell), 60) for cell in cells])
    made = columns(rows)
    return made if len(shown) == len(times) else [*made, f"the {len(shown)} slowest of {len(times)} ranks"]


_PARTS = {name: name.removesuffix("_s") for name in PARTS} | {"wait_s": "waiting", "eval_s": "evaluation"}
