"""The run folder's own sink: numbers to metrics.jsonl, events to this rank's event file."""

from __future__ import annotations

import os
from typing import Any, Protocol

from echelon.common.terminal import is_terminal
from echelon.contracts.events import EventLog
from echelon.contracts.run_dir import TRACK_VARIABLE, RunDir

__all__ = ["FolderSink", "Sink", "default_sinks"]


class Sink(Protocol):
    """Gets a run's records and events, on rank 0."""

    def records(self, records: list[dict[str, Any]]) -> None:
        """Take numbers of updates or evaluations, in order."""

    def event(self, event: dict[str, Any]) -> None:
        """Take an event."""

    def close(self) -> None: ...


class FolderSink:
    """Appends to the files of a run."""

    def __init__(self, run: RunDir) -> None:
        self._metrics, self._events = EventLog(run.metrics), EventLog(run.events(0), rank=0, attempt=run.attempt)

    def records(self, records: list[dict[str, Any]]) -> None:
        self._metrics.write(records)

    def event(self, event: dict[str, Any]) -> None:
        fields = {k: v for k, v in event.items() if k not in ("event", "time")}
        self._events.emit(event["event"], **fields)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


def default_sinks() -> list[Sink]:
    """The default sinks of rank 0: the run folder, if there is one; and progress, unless the launcher draws it.

    echelon's launcher draws progress from the folder, and tells the ranks by a variable. Without a launcher, progress is shown
    only on a terminal.
    """
    import sys

    sinks: list[Sink] = []
    run = RunDir.current()
    if run is not None:
        sinks.append(FolderSink(run))
        if os.environ.get(TRACK_VARIABLE):
            from echelon.observe.sinks.trackers import trackers

            sinks += trackers(run)
    drawn_elsewhere = os.environ.get("ECHELON_SCREEN") == "launcher"
    if not drawn_elsewhere and (run is not None or is_terminal(sys.stderr)):
        from echelon.observe.sinks.progress import ProgressSink

        sinks.append(ProgressSink())
    return sinks
