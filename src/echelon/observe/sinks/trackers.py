"""Trackers by name: send the numbers of metrics.jsonl to TensorBoard, Weights & Biases, MLflow, trackio or a CSV file as well.

`echelon run --track wandb,csv` names them for every script, and passes them to the ranks in `ECHELON_TRACK`. A tracker that
fails, for example without its server, is reported once and then skipped: the run goes on, and metrics.jsonl has its numbers. A
slow server or disk holds up no rank, since trackers are called in a thread of their own (`background`). A CSV file is written at
once.

A run folder is one run of a tracker, however many trainings, processes and attempts it has. A tracker begins once per process and
ends with it; the next process continues the same run of the tracker.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from echelon.common.errors import EchelonError, LoggerError, require
from echelon.contracts.run_dir import TRACK_VARIABLE, RunDir, read_json
from echelon.observe.loggers import CSVLogger, MetricLogger, MLflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger
from echelon.observe.loggers.online import OnlineLogger
from echelon.observe.sinks.background import BackgroundCalls

__all__ = ["TRACKERS", "TrackerSink", "names_of", "trackers"]

logger = logging.getLogger(__name__)


class Tracker(MetricLogger, Protocol):
    """A logger that can send its held numbers before it is closed."""

    def flush(self) -> None: ...


Make = Callable[[RunDir, Mapping[str, Any]], Tracker]

TRACKERS: Mapping[str, Make] = {
    "csv": lambda run, config: CSVLogger(run.path / "metrics.csv"),
    "mlflow": lambda run, config: MLflowLogger(_project(), run.name, run.path, config, _id(run)),
    "tensorboard": lambda run, config: TensorBoardLogger(run.path / "tensorboard"),
    "trackio": lambda run, config: TrackioLogger(_project(), run.name, run.path, config),
    "wandb": lambda run, config: WandbLogger(_project(), run.name, run.path, config, _id(run)),
}
# Fields of a record that are not metrics.
_NO_NUMBERS = ("step", "time", "update")
# Seconds to wait for a tracker: at the end of a training; for one that has not begun by then, before the process ends; at the end
# of the process, silently and in all; and after a failure or a stop request, since a failed rank is killed after ten seconds.
_FLUSH_S, _BEGIN_S, _QUIET_S, _END_S, _HURRIED_S = 5.0, 30.0, 5.0, 60.0, 5.0
_AT_ONCE = frozenset({"csv"})  # files, written at once


def _project() -> str:
    return os.environ.get("ECHELON_PROJECT") or "echelon"


def _id(run: RunDir) -> str:
    """An id that all attempts in a folder share: its name, and part of a hash that differs for folders of this name elsewhere."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", run.name)[:60]
    return f"{name}-{hashlib.sha256(os.fsencode(run.path.absolute())).hexdigest()[:12]}"


def names_of(text: str, what: str = "--track") -> list[str]:
    """The trackers in `tensorboard,wandb`.

    Args:
        what: source of the text, for messages.
    Raises:
        UsageError: a tracker that is unknown, or not installed here.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        require(name in TRACKERS, what, f"names of {', '.join(TRACKERS)}, with commas between them", name, kind=LoggerError)
        if name != "csv" and importlib.util.find_spec(name) is None:
            raise LoggerError(f"{what}: {name} needs a package that is not installed: pip install 'echelon[{name}]'.")
    return list(dict.fromkeys(names))


class TrackerSink:
    """Sends the numbers of records to a tracker.

    Args:
        background: calls the tracker; None calls it at once, in the thread of the records.
    """

    def __init__(self, name: str, made: Tracker, background: BackgroundCalls | None = None) -> None:
        self._name, self._logger, self._background = name, made, background
        self._failed = self._begun = self._ends = self._was_late = self._hurries = False
        if background is not None:
            self._end_last()

    def records(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            numbers = {k: v for k, v in record.items() if k not in _NO_NUMBERS and type(v) in (int, float)}
            if numbers and not self._failed:
                self._do(partial(self._log, numbers, record["step"]))

    def event(self, event: dict[str, Any]) -> None:
        """Note events that leave little time: a rank that failed, or was asked to stop, ends soon. Trackers get no events."""
        if event["event"] in ("exception", "stopped", "train_start"):
            self._hurries = event["event"] != "train_start"
            if isinstance(self._logger, OnlineLogger):
                self._logger.failed = event["event"] == "exception"

    def close(self) -> None:
        """End a training, perhaps not the last of this process: the tracker ends with the process, or by `end`."""
        self._do(partial(self._try, self._logger.flush))
        if self._background is not None and not self._was_late and not self._hurries:  # recording a failure comes first
            self._was_late = not self._background.settle(_FLUSH_S)
            if self._was_late and not self._begun:
                # Python joins this thread before it calls exit functions. A tracker registers its own exit function when it
                # begins. If it began only during the process's end, that function would run before `end`, and cut off the
                # remaining numbers.
                threading.Thread(target=self._background.settle, args=(_BEGIN_S,), name=f"echelon-{self._name}-begins").start()

    def end(self) -> None:
        """End the tracker at the end of the process or its run: wait for outstanding numbers, and report lost ones."""
        if self._background is None:
            self._try(self._logger.close)
            return
        if not self._background.is_here:  # a forked process has this object, but not its thread
            return
        self._ends = True
        atexit.unregister(self.end)
        self._background.give(partial(self._try, self._logger.close))
        most_s = _HURRIED_S if self._hurries else _END_S
        done = self._background.settle(min(_QUIET_S, most_s))
        if not done and most_s > _QUIET_S:
            logger.warning("waiting for %s to take the last numbers, for %.0f s at most", self._name, most_s)
            done = self._background.settle(most_s - _QUIET_S)
        self._background.finish()
        left_out, waiting = self._background.left_out, max(0, self._background.waiting - 1)
        if not done:
            logger.warning(
                "%s had not ended after %.0f s: what it was given last is cut off%s. metrics.jsonl has all numbers.",
                self._name,
                most_s,
                f", {waiting} records of it and more" if waiting else "",
            )
        if left_out and not self._failed:
            logger.warning("%s was too slow: %d records were left out there. metrics.jsonl has them.", self._name, left_out)

    def _do(self, call: Callable[[], None]) -> None:
        if self._background is None:
            call()
        else:
            self._background.give(call)

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        self._try(partial(self._logger.log_dict, numbers, step))
        if self._background is not None and not self._begun and not self._ends:
            self._begun = True
            self._end_last()

    def _end_last(self) -> None:
        """Register `end` anew, to run before the tracker's exit functions, since it waits for the thread.

        The last registered function runs first, and trackers register theirs when they are created or begin.
        """
        atexit.unregister(self._logger.close)
        atexit.unregister(self.end)
        atexit.register(self.end)

    def _try(self, do: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            do()
        except Exception as error:  # a tracker's library, or the network, may raise anything
            self._failed = True
            why = str(error).rstrip(".") if isinstance(error, EchelonError) else repr(error)
            logger.warning("%s gets no more numbers: %s. The run continues; metrics.jsonl has them.", self._name, why[:500])


_made: dict[tuple[int, str, Path], TrackerSink] = {}  # by process (a fork copies them), name and run folder


def trackers(run: RunDir) -> list[TrackerSink]:
    """The trackers that the environment names; for one run folder the same ones at every call.

    Raises:
        UsageError: a tracker is unknown, or not installed.
    """
    names = names_of(os.environ.get(TRACK_VARIABLE, ""), TRACK_VARIABLE)
    keys = {name: (os.getpid(), name, run.path.absolute()) for name in names}
    for key in _made.keys() - keys.values():
        other = _made.pop(key)
        if key[0] == os.getpid():  # wandb has one run at a time
            other.end()
    for name, key in keys.items():
        if key not in _made:
            background = None if name in _AT_ONCE else BackgroundCalls(name)
            _made[key] = TrackerSink(name, TRACKERS[name](run, _config(run)), background)
    return [_made[key] for key in keys.values()]


def _config(run: RunDir) -> dict[str, Any]:
    """The settings of run.json, under flat names."""
    config: dict[str, Any] = {}
    for name, value in (read_json(run.run_json) or {}).items():
        if isinstance(value, dict):
            config |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            config[name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return config
