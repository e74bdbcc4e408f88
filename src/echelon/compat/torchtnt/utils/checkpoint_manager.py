"""torchtnt.utils.checkpoint's CheckpointManager: which checkpoints of a folder stay, and what a new one is called."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from echelon.checkpoint.location import Location, remove_tree
from echelon.checkpoint.policy import BestCheckpointConfig
from echelon.compat.torchtnt.utils import checkpoint_folder as folder
from echelon.compat.torchtnt.utils.checkpoint_path import CheckpointPath, DifferentMetricsError, MetricData, Phase
from echelon.world import agree

__all__ = ["CheckpointManager"]

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Names checkpoints and removes those that are too many. It writes none.

    Collective where it looks at the folder; the group's first rank looks and removes.

    Args:
        dirpath: the first rank's counts, on all.
        best_checkpoint_config: of those that stay, the metric says which; a checkpoint without it is not counted.
        keep_last_n_checkpoints: how many stay, those that are there already included; None keeps all.
        metadata_fnames: files of which a whole checkpoint has one; in 0.2.4 `metadata_fname`, and one alone.
        file_system: fsspec's, in place of the one that the path tells.
    """

    def __init__(
        self,
        dirpath: str,
        best_checkpoint_config: BestCheckpointConfig | None = None,
        keep_last_n_checkpoints: int | None = None,
        metadata_fnames: list[str] | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        file_system: Any = None,
        *,
        metadata_fname: str | None = None,
    ) -> None:
        self.dirpath: str = agree.from_rank0(lambda: str(dirpath), process_group)
        self._best_checkpoint_config = best_checkpoint_config
        self._keep_last_n_checkpoints = keep_last_n_checkpoints
        names = metadata_fnames or metadata_fname or []
        self._metadata_fnames = [names] if isinstance(names, str) else list(names)
        self._group, self._file_system = process_group, file_system
        self._ckpt_paths: list[CheckpointPath] = []
        if keep_last_n_checkpoints:
            metric = best_checkpoint_config.monitored_metric if best_checkpoint_config else None
            found = folder.paths(self.dirpath, self._metadata_fnames, metric, file_system, process_group)
            self._ckpt_paths = sorted(found)
            if best_checkpoint_config:  # the worst first
                self._ckpt_paths.sort(key=_value, reverse=best_checkpoint_config.mode == "min")

    def prune_surplus_checkpoints(self) -> None:
        """Remove what is more than `keep_last_n_checkpoints`, as a run begins: the oldest, or the worst."""
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
        process_group: dist.ProcessGroup | None = None,
    ) -> CheckpointPath:
        """The path of a checkpoint that is taken now, the first rank's on all.

        Raises:
            DifferentMetricsError: an AssertionError, as there: a metric that was not configured.
        """
        if metric_data is not None:
            best = self._best_checkpoint_config
            if best is None:
                raise DifferentMetricsError("Attempted to get a checkpoint with metric but best checkpoint config is not set")
            if best.monitored_metric != metric_data.name:
                raise DifferentMetricsError(
                    f"Attempted to get a checkpoint with metric '{metric_data.name}', "
                    f"but best checkpoint config is for '{best.monitored_metric}'"
                )
        mine = CheckpointPath(self.dirpath, epoch, step, metric_data=metric_data)
        first = agree.from_rank0(lambda: mine.path, process_group if process_group is not None else self._group)
        return mine if first == mine.path else CheckpointPath.from_str(first)

    def should_save_checkpoint(self, checkpoint: CheckpointPath) -> bool:
        """Whether it would stay."""
        best = self._best_checkpoint_config
        if not self._keep_last_n_checkpoints or len(self._ckpt_paths) < self._keep_last_n_checkpoints or best is None:
            return True
        return checkpoint.more_optimal_than(self._ckpt_paths[0], mode=best.mode)

    def get_last_checkpoint(self) -> CheckpointPath | None:
        """The newest that is counted, or with a metric the best."""
        return self._ckpt_paths[-1] if self._ckpt_paths else None

    def append_checkpoint(self, ckpt: CheckpointPath) -> None:
        """Count a checkpoint that was saved, and remove what is too much then."""
        self._append(ckpt, self.remove_checkpoint)

    def _append(self, ckpt: CheckpointPath, make_room: Callable[[], None]) -> None:
        best = self._best_checkpoint_config
        if self._keep_last_n_checkpoints and len(self._ckpt_paths) >= self._keep_last_n_checkpoints:
            make_room()
        if best is None:
            self._ckpt_paths.append(ckpt)
        elif ckpt.metric_data is not None:
            sign = (
                -1 if best.mode == "min" else 1
            )  # of equals, the newer is nearer to the end in "max", and to the front in "min"
            values = [sign * _value(each) for each in self._ckpt_paths]
            at = (bisect.bisect_left if best.mode == "min" else bisect.bisect_right)(values, sign * _value(ckpt))
            self._ckpt_paths.insert(at, ckpt)

    def does_checkpoint_exist(self, ckpt: CheckpointPath, process_group: dist.ProcessGroup | None = None) -> bool:
        """Whether it is there and whole; without `metadata_fnames` nobody knows, and it is not."""
        return folder.exists(ckpt.path, self._metadata_fnames, self._file_system, process_group)

    def does_checkpoint_metadata_exist(self, checkpoint_path: str, metadata_fname: str) -> bool:
        """As this rank sees it."""
        return folder.has_metadata(folder.at(checkpoint_path, self._file_system), [metadata_fname])

    def remove_checkpoint(self) -> None:
        """Remove the oldest, or with a metric the worst. What cannot be removed is logged."""
        self._remove(self._ckpt_paths.pop(0))

    def _remove(self, doomed: CheckpointPath) -> None:
        if agree.is_joined() and dist.get_rank(self._group) != 0:
            return
        path: Location = folder.at(doomed.path, self._file_system)
        try:
            folder.hide(path, remove_tree)
        except Exception as error:  # object stores have errors of their own, and the run does not depend on it
            logger.error(
                "Failed to remove checkpoint '%s' for bookkeeping purposes. Do not use it to restore since it may be corrupted! "
                "Exception: %s",
                doomed,
                error,
            )


def _value(path: CheckpointPath) -> float:
    assert path.metric_data is not None
    return path.metric_data.value
