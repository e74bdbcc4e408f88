"""torchtnt.utils.checkpoint: find checkpoints in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from echelon.checkpoint import policy
from echelon.compat.torchtnt.absent import absent
from echelon.compat.torchtnt.utils import checkpoint_folder as folder
from echelon.compat.torchtnt.utils.checkpoint_manager import CheckpointManager
from echelon.compat.torchtnt.utils.checkpoint_path import CheckpointPath, MetricData, Phase

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


@dataclass(frozen=True)
class BestCheckpointConfig(policy.BestCheckpointConfig):
    """As `echelon.callbacks.BestCheckpointConfig`. It is the saver that refuses a wrong mode, as there."""

    def __post_init__(self) -> None: ...


def get_checkpoint_dirpaths(
    dirpath: str,
    metadata_fname: str | list[str] | None = None,
    metric_name: str | None = None,
    file_system: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[CheckpointPath]:
    """The checkpoints in a folder, oldest first. The group's first rank looks, and all get what it saw.

    Args:
        metadata_fname: only those with this file, or with one of these. A checkpoint of echelon's has ".metadata", so to speak.
        metric_name: only those with this metric in their name.
        file_system: fsspec's, in place of the one that the path tells.
    """
    return folder.paths(dirpath, metadata_fname, metric_name, file_system, process_group)


def get_latest_checkpoint_path(
    dirpath: str,
    metadata_fname: str | list[str] | None = None,
    file_system: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> str | None:
    """The newest checkpoint in a folder, by its name; None if there is none."""
    found = folder.paths(dirpath, metadata_fname, None, file_system, process_group)
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
    found = folder.paths(dirpath, metadata_fname, metric_name, file_system, process_group)
    best = None
    for path in found:
        best = path if best is None or path.more_optimal_than(best, mode) else best
    return best.path if best is not None else None


def does_checkpoint_exist(
    ckpt_path: str,
    metadata_fname: str | list[str] | None,
    file_system: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> bool:
    """Whether a folder has this file, or one of these, as the group's first rank sees it; False without any."""
    return folder.exists(ckpt_path, metadata_fname, file_system, process_group)


__getattr__ = absent("utils.checkpoint")
