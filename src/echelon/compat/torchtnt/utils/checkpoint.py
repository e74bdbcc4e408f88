"""torchtnt.utils.checkpoint: names of checkpoints, such as `epoch_1_train_step_500_eval_step_20_loss=0.25`, and folders of them.

A checkpoint of echelon's has a manifest, which counts as the metadata file of TorchTNT's savers.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

import torch.distributed as dist

from echelon.checkpoint import commit, manifest, policy
from echelon.checkpoint.location import Location, Remote, location
from echelon.common.errors import CheckpointUnreadableError, UsageError
from echelon.world import agree

__all__ = [
    "BestCheckpointConfig",
    "CheckpointManager",
    "CheckpointPath",
    "MetricData",
    "Phase",
    "does_checkpoint_exist",
    "get_best_checkpoint_path",
    "get_checkpoint_dirpaths",
    "get_latest_checkpoint_path",
]

logger = logging.getLogger(__name__)

Group = dist.ProcessGroup | None
Names = str | Sequence[str] | None

# Whole checkpoints of TorchTNT's savers have one of these.
_THEIRS = (".metadata", ".snapshot_metadata")


@dataclass(frozen=True)
class BestCheckpointConfig(policy.BestCheckpointConfig):
    """As `echelon.callbacks.BestCheckpointConfig`. As in TorchTNT, the saver refuses a wrong mode."""

    def __post_init__(self) -> None: ...


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
    """Two checkpoints have different metrics."""


# Slashes and the like in a metric's name are quoted, so that it fits into one folder's name.
_METRIC = r"(?:_(?P<metric>[\w%.~-]+)=(?P<value>-?\d+\.?\d*(?:e[+-]?\d+)?))?"
_NAME = re.compile(
    r"(?P<before>.*)epoch_(?P<epoch>\d+)(?:_step_(?P<none>\d+)|(?=_(?:train|eval|predict)_step_\d)"
    r"(?:_train_step_(?P<train>\d+))?(?:_eval_step_(?P<evaluate>\d+))?(?:_predict_step_(?P<predict>\d+))?)" + _METRIC,
    re.DOTALL,
)
_PARTS = {Phase.NONE: "step", Phase.TRAIN: "train_step", Phase.EVALUATE: "eval_step", Phase.PREDICT: "predict_step"}


@total_ordering
class CheckpointPath:
    """The path of a checkpoint. Paths are ordered by age: the greatest is the newest.

    Args:
        dirpath: the saver's folder, or URL.
        epoch: completed epochs.
        step: completed steps of each phase; or one number, as the oldest names have it.
        metric_data: the number by which `more_optimal_than` compares. It is part of the name.
    Raises:
        UsageError, a ValueError: the metric is nan or infinite.
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
        """Parse a folder's path. Nothing is read.

        Raises:
            UsageError, a ValueError: the folder is not named like a checkpoint of TorchTNT's.
        """
        path = cls.__new__(cls)
        path.__setstate__(str(checkpoint_path))
        return path

    @property
    def path(self) -> str:
        steps = "".join(f"_{part}_{self.step[phase]}" for phase, part in _PARTS.items() if phase in self.step)
        metric = "" if self.metric_data is None else f"_{_quoted(self.metric_data.name)}={self._value}"
        return os.path.join(self.dirpath, f"epoch_{self.epoch}{steps}{metric}")

    def newer_than(self, other: CheckpointPath) -> bool:
        """Compare epochs, then steps; times of files do not matter."""
        if self.epoch != other.epoch:
            return self.epoch > other.epoch
        by_phase, theirs = Phase.NONE not in self.step, Phase.NONE not in other.step
        if by_phase != theirs:  # names with steps by phase came later than those with one number
            return (sum(self.step.values()), by_phase) > (sum(other.step.values()), theirs)
        return self._age() > other._age()

    def _age(self) -> tuple[int, ...]:
        """A key to sort by: an evaluation comes after the training of its epoch."""
        steps = [self.step.get(phase, 0) for phase in (Phase.NONE, Phase.PREDICT, Phase.EVALUATE, Phase.TRAIN)]
        return (int(Phase.EVALUATE in self.step), *steps)

    def more_optimal_than(self, other: CheckpointPath, mode: Literal["min", "max"]) -> bool:
        """Compare metrics. A checkpoint with a metric is better than one without; of two without, the newer is better.

        Raises:
            DifferentMetricsError: an AssertionError, as in TorchTNT: their metrics have different names.
        """
        own, theirs = self.metric_data, other.metric_data
        if own is None or theirs is None:
            return self.newer_than(other) if own is theirs else own is not None
        if own.name != theirs.name:
            raise DifferentMetricsError(
                f"Attempted to compare optimality of checkpoints tracking different metrics: {self} and {other}"
            )
        return own.value < theirs.value if mode == "min" else own.value > theirs.value

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
        folder, slash, name = state.rstrip("/").rpartition("/")
        match = _NAME.fullmatch(name)
        if match is None or not (slash or match["before"]):
            raise UsageError(f"Attempted to parse malformed checkpoint path: {state}.")
        self.dirpath, self.epoch = (folder + slash + match["before"]).rstrip("/"), int(match["epoch"])
        self.step = {phase: int(match[phase.value]) for phase in _PARTS if match[phase.value] is not None}
        self.metric_data = MetricData(unquote(match["metric"]), float(match["value"])) if match["metric"] else None
        self._value = match["value"] or ""  # as in the folder's name, 1 or 1.0


def _quoted(name: str) -> str:
    """The name, quoted so that it fits into a folder's name."""
    return "".join(c if c.isalnum() or c in "_.~-" else quote(c, safe="") for c in name)


# --- checkpoints in a folder


def get_checkpoint_dirpaths(
    dirpath: str,
    metadata_fname: Names = None,
    metric_name: str | None = None,
    file_system: Any = None,
    process_group: Group = None,
) -> list[CheckpointPath]:
    """The checkpoints in a folder, oldest first. The group's first rank looks, and all get what it saw.

    Args:
        metadata_fname: only those with this file, or with one of these.
        metric_name: only those with this metric in their name.
        file_system: fsspec's; by default that of the path.
    """
    folder = at(dirpath, file_system)

    def look() -> list[str]:
        parent = os.path.abspath(dirpath) if isinstance(folder, Path) else dirpath.rstrip("/")
        try:
            if not folder.exists():
                logger.warning("Input dirpath doesn't exist: %s", dirpath)
                return []
            names = [each.name for each in folder.iterdir() if each.is_dir()]
        except OSError as error:
            raise CheckpointUnreadableError(f"{dirpath} is there but cannot be read: {error.strerror or error}.") from error
        if not names:
            logger.warning("Input dirpath doesn't contain any subdirectories: %s", dirpath)
        paths = []
        for path in parsed(parent, names):
            if metric_name and (path.metric_data is None or path.metric_data.name != metric_name):
                continue
            if metadata_fname and not _has_metadata(folder / path.path.rpartition("/")[2], metadata_fname):
                logger.warning("Snapshot metadata (%s) missing from %s! Skipping this path", metadata_fname, path)
                continue
            paths.append(path.path)
        return paths

    return [CheckpointPath.from_str(path) for path in commit.on_rank0(look, folder, process_group)]


def get_latest_checkpoint_path(
    dirpath: str, metadata_fname: Names = None, file_system: Any = None, process_group: Group = None
) -> str | None:
    """The newest checkpoint in a folder, by its name; None if there is none."""
    paths = get_checkpoint_dirpaths(dirpath, metadata_fname, None, file_system, process_group)
    return paths[-1].path if paths else None


def get_best_checkpoint_path(
    dirpath: str,
    metric_name: str,
    mode: Literal["min", "max"],
    metadata_fname: Names = None,
    file_system: Any = None,
    process_group: Group = None,
) -> str | None:
    """The checkpoint with the least, or greatest, metric; None if none has it."""
    paths = get_checkpoint_dirpaths(dirpath, metadata_fname, metric_name, file_system, process_group)
    return best_first(paths, mode)[0].path if paths else None


def does_checkpoint_exist(ckpt_path: str, metadata_fname: Names, file_system: Any = None, process_group: Group = None) -> bool:
    """Whether a folder has this file, or one of these, as the group's first rank sees it; False if no file is named."""
    folder = at(ckpt_path, file_system)
    return bool(metadata_fname) and commit.on_rank0(lambda: _has_metadata(folder, metadata_fname or ()), folder, process_group)


def at(path: str, file_system: Any = None) -> Location:
    """A path as a Location, on the given fsspec file system if there is one."""
    if file_system is None:
        return location(path)
    protocol = file_system.protocol if isinstance(file_system.protocol, str) else file_system.protocol[0]
    return Remote(file_system, path.removeprefix(f"{protocol}://"), protocol)


def parsed(parent: str, names: Sequence[str]) -> list[CheckpointPath]:
    """Paths for those names that are checkpoints' names, oldest first."""
    paths = []
    for name in names:
        with contextlib.suppress(ValueError):
            paths.append(CheckpointPath.from_str(f"{parent}/{name}"))
    return sorted(paths)


def best_first(paths: Sequence[CheckpointPath], mode: Literal["min", "max"]) -> list[CheckpointPath]:
    """Sorted by their metric, which all must have; equal ones stay in the given order."""
    return sorted(paths, key=lambda path: _value(path) if mode == "min" else -_value(path))


def _has_metadata(folder: Location, names: str | Sequence[str]) -> bool:
    names = [names] if isinstance(names, str) else list(names)
    ours = [manifest.MANIFEST] if any(name in _THEIRS for name in names) else []
    return any((folder / name).exists() for name in [*names, *ours])


def _value(path: CheckpointPath) -> float:
    assert path.metric_data is not None
    return path.metric_data.value


class CheckpointManager:
    """Names checkpoints and removes surplus ones. It writes none.

    Methods that look at the folder are collective; the group's first rank looks and removes.

    Args:
        dirpath: the first rank's is used on all.
        best_checkpoint_config: its metric decides which stay; a checkpoint without the metric is not counted.
        keep_last_n_checkpoints: how many stay, including those that exist already; None keeps all.
        metadata_fnames: a whole checkpoint has one of these files.
        file_system: fsspec's; by default that of the path.
    """

    def __init__(
        self,
        dirpath: str,
        best_checkpoint_config: policy.BestCheckpointConfig | None = None,
        keep_last_n_checkpoints: int | None = None,
        metadata_fnames: Names = None,
        process_group: Group = None,
        file_system: Any = None,
    ) -> None:
        self.dirpath: str = agree.from_rank0(lambda: str(dirpath), process_group)
        self._best_checkpoint_config, self._keep_last_n_checkpoints = best_checkpoint_config, keep_last_n_checkpoints
        self._metadata_fnames, self._group, self._file_system = metadata_fnames, process_group, file_system
        self._ckpt_paths: list[CheckpointPath] = []
        if keep_last_n_checkpoints:
            best = best_checkpoint_config
            metric = best.monitored_metric if best else None
            paths = get_checkpoint_dirpaths(self.dirpath, metadata_fnames, metric, file_system, process_group)
            # The worst first.
            self._ckpt_paths = best_first(paths, "max" if best.mode == "min" else "min") if best else paths

    def prune_surplus_checkpoints(self) -> None:
        """At a run's start, remove checkpoints beyond `keep_last_n_checkpoints`: the oldest, or the worst."""
        surplus = len(self._ckpt_paths) - self._keep_last_n_checkpoints if self._keep_last_n_checkpoints else 0
        if surplus > 0:
            logger.warning(
                "%s checkpoints found in %s. Deleting %s oldest checkpoints to enforce ``keep_last_n_checkpoints`` argument.",
                len(self._ckpt_paths),
                self.dirpath,
                surplus,
            )
        for _ in range(surplus):
            self.remove_checkpoint()

    def generate_checkpoint_path(
        self,
        epoch: int,
        step: int | Mapping[Phase, int],
        metric_data: MetricData | None = None,
        process_group: Group = None,
    ) -> CheckpointPath:
        """The path for a checkpoint that is saved now; the first rank's on all.

        Raises:
            DifferentMetricsError: an AssertionError, as in TorchTNT: the metric was not configured.
        """
        best = self._best_checkpoint_config
        if metric_data is not None and best is None:
            raise DifferentMetricsError("Attempted to get a checkpoint with metric but best checkpoint config is not set")
        if metric_data is not None and best is not None and best.monitored_metric != metric_data.name:
            raise DifferentMetricsError(
                f"Attempted to get a checkpoint with metric '{metric_data.name}', "
                f"but best checkpoint config is for '{best.monitored_metric}'"
            )
        path = CheckpointPath(self.dirpath, epoch, step, metric_data=metric_data)
        first = agree.from_rank0(lambda: path.path, process_group if process_group is not None else self._group)
        return path if first == path.path else CheckpointPath.from_str(first)

    def should_save_checkpoint(self, checkpoint: CheckpointPath) -> bool:
        """Whether the checkpoint would stay."""
        best = self._best_checkpoint_config
        if not self._is_full() or best is None:
            return True
        return checkpoint.more_optimal_than(self._ckpt_paths[0], mode=best.mode)

    def get_last_checkpoint(self) -> CheckpointPath | None:
        """The newest counted checkpoint, or with a metric the best."""
        return self._ckpt_paths[-1] if self._ckpt_paths else None

    def append_checkpoint(self, ckpt: CheckpointPath) -> None:
        """Count a saved checkpoint, and remove one if there are too many."""
        best = self._best_checkpoint_config
        if self._is_full():
            self.make_room()
        if best is None:
            self._ckpt_paths.append(ckpt)
        elif ckpt.metric_data is not None:
            # Of equals, the newer is nearer to the end in "max", and to the front in "min".
            sign, insert = (-1, bisect.bisect_left) if best.mode == "min" else (1, bisect.bisect_right)
            values = [sign * _value(each) for each in self._ckpt_paths]
            self._ckpt_paths.insert(insert(values, sign * _value(ckpt)), ckpt)

    def _is_full(self) -> bool:
        return bool(self._keep_last_n_checkpoints) and len(self._ckpt_paths) >= (self._keep_last_n_checkpoints or 0)

    def does_checkpoint_exist(self, ckpt: CheckpointPath, process_group: Group = None) -> bool:
        """Whether the checkpoint is there and whole. Without `metadata_fnames` this is unknown, and False."""
        return does_checkpoint_exist(ckpt.path, self._metadata_fnames, self._file_system, process_group)

    def make_room(self) -> None:
        """Remove one, for a checkpoint that is about to be counted."""
        self.remove_checkpoint()

    def remove_checkpoint(self) -> None:
        """Remove the oldest, or with a metric the worst. A failure is logged."""
        self.remove(self._ckpt_paths.pop(0))

    def remove(self, doomed: CheckpointPath) -> None:
        """Remove a checkpoint, so that a kill leaves no half of it under a valid name."""
        if agree.is_joined() and dist.get_rank(self._group) != 0:
            return
        try:
            commit.retire(at(self.dirpath, self._file_system), [os.path.basename(doomed.path)])
        except Exception as error:  # object stores have errors of their own, and the run does not depend on it
            logger.error(
                "Failed to remove checkpoint '%s' for bookkeeping purposes. Do not use it to restore since it may be corrupted! "
                "Exception: %s",
                doomed,
                error,
            )
