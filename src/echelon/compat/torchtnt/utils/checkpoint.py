"""torchtnt.utils.checkpoint: find checkpoints in a folder. Their folders are echelon's, `step-00000500`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import total_ordering
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from echelon.checkpoint import commit, manifest
from echelon.checkpoint.location import location
from echelon.checkpoint.policy import BestCheckpointConfig
from echelon.compat.names import later
from echelon.contracts.errors import CheckpointError, UsageError
from echelon.parallel.materialize import materialize

__all__ = [
    "BestCheckpointConfig",
    "CheckpointPath",
    "MetricData",
    "Phase",
    "does_checkpoint_exist",
    "get_best_checkpoint_path",
    "get_checkpoint_dirpaths",
    "get_latest_checkpoint_path",
    "load_from_full_model_state_dict",
]

__getattr__ = later(
    "torchtnt",
    "utils.checkpoint",
    {},
    {
        "CheckpointManager": "DistributedCheckpointSaver(keep_last_n_checkpoints=..., best_checkpoint_config=...), which names, "
        "commits and removes checkpoints itself. Subclass it for checkpoints of your own."
    },
)


class Phase(Enum):
    NONE = 0
    TRAIN = 1
    EVALUATE = 2
    PREDICT = 3


@dataclass(frozen=True)
class MetricData:
    name: str
    value: float


@total_ordering
class CheckpointPath:
    """Where a checkpoint lies. It is named after the completed training steps alone; its metrics are inside it.

    Args:
        dirpath: the saver's folder, or URL.
        epoch: kept, and no part of the name.
        step: completed training steps, or a dict with them under Phase.TRAIN.
        metric_data: what `more_optimal_than` compares.
    """

    def __init__(self, dirpath: str, epoch: int, step: int | Mapping[Phase, int], metric_data: MetricData | None = None) -> None:
        if isinstance(step, Mapping) and Phase.TRAIN not in step:
            raise UsageError(f"CheckpointPath(step={dict(step)}): folders are named after training steps: give Phase.TRAIN.")
        self.dirpath, self.epoch, self.metric_data = str(dirpath).rstrip("/") or "/", epoch, metric_data
        self.step = step[Phase.TRAIN] if isinstance(step, Mapping) else step

    @classmethod
    def from_str(cls, checkpoint_path: str) -> CheckpointPath:
        """From a checkpoint's folder. Nothing is read, so the epoch is 0 and there is no metric.

        Raises:
            UsageError, a ValueError: it is not named like a checkpoint of echelon's.
        """
        path = location(str(checkpoint_path).rstrip("/"))
        try:
            step = manifest.step_of(path)
        except CheckpointError as error:
            raise UsageError(
                f"{error} Folders such as epoch_1_train_step_100 are TorchTNT's, and cannot be read as a whole: save the "
                "module's state_dict() there, and restore that file."
            ) from None
        return cls(str(path.parent), 0, step)

    @property
    def path(self) -> str:
        return str(location(self.dirpath) / manifest.named(self.step))

    def newer_than(self, other: CheckpointPath) -> bool:
        return self.step > other.step

    def more_optimal_than(self, other: CheckpointPath, mode: Literal["min", "max"]) -> bool:
        """
        Raises:
            UsageError: the two do not have a value of the same metric.
        """
        mine, theirs = self.metric_data, other.metric_data
        if mine is None or theirs is None or mine.name != theirs.name:
            raise UsageError(f"{self.path} and {other.path} have no metric in common: {mine} and {theirs}.")
        BestCheckpointConfig(mine.name, mode)  # checks the mode
        return mine.value < theirs.value if mode == "min" else mine.value > theirs.value

    def __lt__(self, other: CheckpointPath) -> bool:
        return other.newer_than(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointPath) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __str__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"CheckpointPath({self.path})"


def _all(dirpath: str, file_system: object, process_group: dist.ProcessGroup | None) -> list[tuple[int, dict[str, Any]]]:
    """(step, metrics) of every whole checkpoint in a folder, oldest first, as the group's first rank sees them."""
    _refuse(file_system)
    folder = location(dirpath)

    def found() -> list[tuple[int, dict[str, Any]]]:
        return [(manifest.step_of(each), manifest.read(each).get("metrics", {})) for each in manifest.committed(folder)]

    return [(step, metrics) for step, metrics in commit.on_rank0(found, folder, process_group)]


def _refuse(file_system: object) -> None:
    if file_system is not None:
        raise UsageError("file_system=...: give the URL instead, such as s3://bucket/run, which says which one it is.")


def get_checkpoint_dirpaths(
    dirpath: str,
    metadata_fname: str | list[str] | None = None,
    metric_name: str | None = None,
    file_system: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[CheckpointPath]:
    """The checkpoints in a folder, oldest first. The group's first rank looks, and all get what it saw.

    Args:
        metadata_fname: accepted; only whole checkpoints are found.
        metric_name: only those that have this metric, with its value.
    """
    paths = []
    for step, metrics in _all(dirpath, file_system, process_group):
        data = MetricData(metric_name, metrics[metric_name]) if metric_name is not None and metric_name in metrics else None
        if metric_name is None or data is not None:
            paths.append(CheckpointPath(dirpath, 0, step, data))
    return paths


def get_latest_checkpoint_path(
    dirpath: str,
    metadata_fname: str | list[str] | None = None,
    file_system: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> str | None:
    """The newest checkpoint in a folder; None if there is none."""
    found = get_checkpoint_dirpaths(dirpath, None, None, file_system, process_group)
    return found[-1].path if found else None


def get_best_checkpoint_path(
    dirpath: str,
    metric_name: str,
    mode: Literal["min", "max"],
    metadata_fname: str | list[str] | None = None,
    file_system: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> str | None:
    """The checkpoint with the least, or greatest, metric; None if none has it."""
    best = BestCheckpointConfig(metric_name, mode).best_first(dict(_all(dirpath, file_system, process_group)))
    return CheckpointPath(dirpath, 0, best[0]).path if best else None


def does_checkpoint_exist(
    ckpt_path: str,
    metadata_fname: str | list[str] | None = None,
    file_system: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> bool:
    """Whether there is a whole checkpoint in this folder, as the group's first rank sees it."""
    _refuse(file_system)
    path = location(ckpt_path)
    return commit.on_rank0(lambda: manifest.is_whole(path), path, process_group)


def load_from_full_model_state_dict(
    model: nn.Module,
    full_sd: dict[str, Any],
    device: torch.device,
    strict: bool = False,
    cpu_offload: bool = False,
    release_sd: bool = True,
) -> Any:
    """Fill a model, sharded or not, with whole tensors, which every rank has. Collective if the model is sharded.

    Args:
        device: where a model on the meta device gets its memory.
        strict: names that only one of the two has are an error.
        cpu_offload: accepted; parameters stay where the model has them.
        release_sd: empty `full_sd` afterwards.
    Returns:
        missing and unexpected names, as a module's `load_state_dict`.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    materialize(model, device)
    done = set_model_state_dict(model, dict(full_sd), options=StateDictOptions(full_state_dict=True, strict=strict))
    if release_sd:
        full_sd.clear()
    return done
