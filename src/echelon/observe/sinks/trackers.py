"""Trackers by name: the numbers of metrics.jsonl, also to TensorBoard, Weights & Biases, MLflow, trackio or a CSV file.

`echelon run --track wandb,csv` names them for every script; it reaches the ranks by `ECHELON_TRACK`. A tracker that fails, as
when its server is away, is said once and left out: the run goes on, and metrics.jsonl has its numbers. One whose server or disk
is slow holds nobody: it is called in a thread of its own (`background`). A CSV file is written at once.

A run folder is one run of a tracker, however many trainings, processes and attempts it has: a tracker is begun once in a
process and ends with it, and the next process goes on with the same run there.
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
    """A logger that can give on what it holds, and go on."""

    def flush(self) -> None: ...


Make = Callable[[RunDir, Mapping[str, Any]], Tracker]

TRACKERS: Mapping[str, Make] = {
    "csv": lambda run, config: CSVLogger(run.path / "metrics.csv"),
    "mlflow": lambda run, config: MLflowLogger(_project(), run.name, run.path, config, _id(run)),
    "tensorboard": lambda run, config: TensorBoardLogger(run.path / "tensorboard"),
    "trackio": lambda run, config: TrackioLogger(_project(), run.name, run.path, config),
    "wandb": lambda run, config: WandbLogger(_project(), run.name, run.path, config, _id(run)),
}
# What a record says of itself.
_NO_NUMBERS = ("step", "time", "update")
# How long to wait for a tracker: as a training ends; for one that has not begun then, before the process ends; as it ends,
# without a word and in all; and where that was not its own wish: a rank that failed is killed after ten seconds.
_FLUSH_S, _BEGIN_S, _QUIET_S, _END_S, _HURRIED_S = 5.0, 30.0, 5.0, 60.0, 5.0
_AT_ONCE = frozenset({"csv"})  # files, whose lines are there when they are given


def _project() -> str:
    return os.environ.get("ECHELON_PROJECT") or "echelon"


def _id(run: RunDir) -> str:
    """The same for each attempt in a folder: its name, and enough of a hash that folders of one name elsewhere are others."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", run.name)[:60]
    return f"{name}-{hashlib.sha256(os.fsencode(run.path.absolute())).hexdigest()[:12]}"


def names_of(text: str, what: str = "--track") -> list[str]:
    """The trackers of `tensorboard,wandb`.

    Args:
        what: gave the text, for messages.
    Raises:
        UsageError: one that is not known, or not installed here.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        require(name in TRACKERS, what, f"names of {', '.join(TRACKERS)}, with commas between them", name, kind=LoggerError)
        if name != "csv" and importlib.util.find_spec(name) is None:
            raise LoggerError(f"{what}: {name} needs a package that is not installed: pip install 'echelon[{name}]'.")
    return list(dict.fromkeys(names))


class TrackerSink:
    """Gives a tracker the numbers of records.

    Args:
        background: where the tracker is called; None calls it at once, in the thread that has the records.
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
        """Events are the run folder's. But a rank that failed, or was asked to stop, has not long to end."""
        if event["event"] in ("exception", "stopped", "train_start"):
            self._hurries = event["event"] != "train_start"
            if isinstance(self._logger, OnlineLogger):
                self._logger.failed = event["event"] == "exception"

    def close(self) -> None:
        """A training is over, perhaps not the last of this process: the tracker ends with that, or by `end`."""
        self._do(partial(self._try, self._logger.flush))
        if self._background is not None and not self._was_late and not self._hurries:  # a failure is first to be recorded
            self._was_late = not self._background.settle(_FLUSH_S)
            if self._was_late and not self._begun:
                # Python joins it before it calls exit functions. A tracker registers its own as it begins: were it still about to
                # at the end of the process, that would be called before `end`, and cut off what it was given.
                threading.Thread(target=self._background.settle, args=(_BEGIN_S,), name=f"echelon-{self._name}-begins").start()

    def end(self) -> None:
        """The process ends, or the tracker's run: waits for what it has not been told, and says what it will never be."""
        if self._background is None:
            self._try(self._logger.close)
            return
        if not self._background.is_here:  # a process that was forked has it, and not its thread
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
        """What the tracker does at the end of the process comes after `end`, which waits for the thread: the last registered is
        called first, and trackers register theirs when they are made or begin."""
        atexit.unregister(self._logger.close)
        atexit.unregister(self.end)
        atexit.register(self.end)

    def _try(self, do: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            do()
        except Exception as error:  # whatever a library of others, or the network, comes up with
            self._failed = True
            why = str(error).rstrip(".") if isinstance(error, EchelonError) else repr(error)
            logger.warning("%s gets no more numbers: %s. The run continues; metrics.jsonl has them.", self._name, why[:500])


_made: dict[tuple[int, str, Path], TrackerSink] = {}  # by process, as a fork takes them along, name and the run's folder


def trackers(run: RunDir) -> list[TrackerSink]:
    """Those that the environment asks for; of one run folder the same at each call.

    Raises:
        UsageError: one is not known, or not installed.
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
    """What run.json says of the run, as names of one level."""
    config: dict[str, Any] = {}
    for name, value in (read_json(run.run_json) or {}).items():
        if isinstance(value, dict):
            config |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            config[name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return config
