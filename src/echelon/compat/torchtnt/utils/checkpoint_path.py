"""The names of TorchTNT's checkpoints: `epoch_1_train_step_500_eval_step_20_loss=0.25`, and how they compare."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering
from typing import Literal
from urllib.parse import quote, unquote

from echelon.common.errors import UsageError

__all__ = ["CheckpointPath", "DifferentMetricsError", "MetricData", "Phase"]


class Phase(StrEnum):
    """Equal to its text, which is what `State.active_phase.into_phase()` gives."""

    NONE = "none"
    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    TEST = "test"


@dataclass
class MetricData:
    name: str
    value: float


class DifferentMetricsError(UsageError, AssertionError):
    """Two checkpoints whose metrics have nothing to do with each other."""


_NUMBER = r"-?\d+\.?\d*(?:e[+-]?\d+)?"
# A metric's name has its slashes and the like quoted, so that it is a part of one folder's name.
_METRIC = rf"(?:_(?P<metric>[\w%.~-]+)=(?P<value>{_NUMBER}))?"
_NAIVE = re.compile(rf"(?P<before>.*)epoch_(?P<epoch>\d+)_step_(?P<step>\d+){_METRIC}", re.DOTALL)
_AWARE = re.compile(
    r"(?P<before>.*)epoch_(?P<epoch>\d+)(?:_train_step_(?P<train>\d+))?(?:_eval_step_(?P<evaluate>\d+))?"
    rf"(?:_predict_step_(?P<predict>\d+))?{_METRIC}",
    re.DOTALL,
)
_PARTS = {Phase.TRAIN: "train", Phase.EVALUATE: "eval", Phase.PREDICT: "predict"}


@total_ordering
class CheckpointPath:
    """Where a checkpoint lies. The order of several is that of their age: the greatest is the newest.

    Args:
        dirpath: the saver's folder, or URL.
        epoch: completed epochs.
        step: completed steps of each phase; or one number, as the oldest names have it.
        metric_data: the number by which `more_optimal_than` compares. It is part of the name.
    Raises:
        UsageError, a ValueError: a metric that is nan or infinite.
    """

    def __init__(self, dirpath: str, epoch: int, step: Mapping[Phase, int] | int, metric_data: MetricData | None = None) -> None:
        if metric_data is not None and not math.isfinite(metric_data.value):
            kind = "NaN" if math.isnan(metric_data.value) else "inf"
            raise UsageError(f"Value of monitored metric '{metric_data.name}' can't be {kind} in CheckpointPath.")
        self.dirpath, self.epoch, self.metric_data = str(dirpath).rstrip("/"), epoch, metric_data
        self.step: dict[Phase, int] = dict(step) if isinstance(step, Mapping) else {Phase.NONE: step}
        self._value = str(metric_data.value) if metric_data is not None else ""

    @classmethod
    def from_str(cls, checkpoint_path: str) -> CheckpointPath:
        """From a folder's name. Nothing is read.

        Raises:
            UsageError, a ValueError: it is not named like a checkpoint of TorchTNT's.
        """
        path = cls.__new__(cls)
        path.__setstate__(str(checkpoint_path))
        return path

    @property
    def path(self) -> str:
        name = f"epoch_{self.epoch}"
        if not self._is_phase_aware():
            name += f"_step_{self.step[Phase.NONE]}"
        name += "".join(f"_{part}_step_{self.step[phase]}" for phase, part in _PARTS.items() if phase in self.step)
        if self.metric_data is not None:
            name += f"_{_quoted(self.metric_data.name)}={self._value}"
        return os.path.join(self.dirpath, name)

    def _is_phase_aware(self) -> bool:
        return Phase.NONE not in self.step

    def newer_than(self, other: CheckpointPath) -> bool:
        """By epochs, then by steps; whatever clocks say."""
        if self.epoch != other.epoch:
            return self.epoch > other.epoch
        mine, theirs = self._is_phase_aware(), other._is_phase_aware()
        if mine != theirs:  # the steps of phases came later than the one number
            return (sum(self.step.values()), mine) > (sum(other.step.values()), theirs)
        return self._age() > other._age()

    def _age(self) -> tuple[int, ...]:
        """An evaluation comes after the training of its epoch."""
        if not self._is_phase_aware():
            return (self.step[Phase.NONE],)
        steps = [self.step.get(phase, 0) for phase in (Phase.PREDICT, Phase.EVALUATE, Phase.TRAIN)]
        return (int(Phase.EVALUATE in self.step), *steps)

    def more_optimal_than(self, other: CheckpointPath, mode: Literal["min", "max"]) -> bool:
        """By their metric. One that has it is better than one without; of two without, the newer.

        Raises:
            DifferentMetricsError: an AssertionError, as there.
        """
        mine, theirs = self.metric_data, other.metric_data
        if mine is None or theirs is None:
            return self.newer_than(other) if mine is theirs else mine is not None
        if mine.name != theirs.name:
            raise DifferentMetricsError(
                f"Attempted to compare optimality of checkpoints tracking different metrics: {self} and {other}"
            )
        return mine.value < theirs.value if mode == "min" else mine.value > theirs.value

    def __str__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"CheckpointPath(dirpath={self.dirpath}, epoch={self.epoch}, step={self.step}, metric_data={self.metric_data})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointPath) and self._parts() == other._parts()

    def _parts(self) -> tuple[object, ...]:
        return self.dirpath, self.epoch, self.step, self.metric_data

    def __hash__(self) -> int:
        return hash((self.dirpath, self.epoch, tuple(sorted((phase.value, n) for phase, n in self.step.items()))))

    def __gt__(self, other: CheckpointPath) -> bool:
        return self.newer_than(other)

    def __getstate__(self) -> str:
        return self.path

    def __setstate__(self, state: str) -> None:
        found = _parsed(state)
        if found is None:
            raise UsageError(f"Attempted to parse malformed checkpoint path: {state}.")
        metric, phases = None, {"train": Phase.TRAIN, "evaluate": Phase.EVALUATE, "predict": Phase.PREDICT, "step": Phase.NONE}
        if found["metric"]:
            metric = MetricData(unquote(found["metric"]), float(found["value"]))
        step = {phase: int(found[part]) for part, phase in phases.items() if found.get(part) is not None}
        self.dirpath, self.epoch, self.step, self.metric_data = found["before"], int(found["epoch"]), step, metric
        self._value = found["value"] or ""  # as the folder has it, be it 1 or 1.0


def _parsed(path: str) -> dict[str, str] | None:
    folder, slash, name = path.rstrip("/").rpartition("/")
    aware = _AWARE.fullmatch(name)
    steps = aware is not None and any(aware[part] for part in ("train", "evaluate", "predict"))
    match = aware if steps else _NAIVE.fullmatch(name)
    if match is None or not (slash or match["before"]):
        return None
    return {**match.groupdict(), "before": (folder + slash + match["before"]).rstrip("/")}


def _quoted(name: str) -> str:
    """As one part of a folder's name."""
    return "".join(c if c.isalnum() or c in "_.~-" else quote(c, safe="") for c in name)
