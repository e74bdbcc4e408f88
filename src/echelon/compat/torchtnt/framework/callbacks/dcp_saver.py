"""torchtnt.framework.callbacks.dcp_saver: echelon's checkpoints, at TorchTNT's times and under its names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from echelon.checkpoint.location import location
from echelon.checkpoint.policy import BestCheckpointConfig
from echelon.checkpoint.store import Report
from echelon.compat.torchtnt.framework.callbacks import checkpoint_restoring as restoring
from echelon.compat.torchtnt.framework.callbacks.base_checkpointer import BaseCheckpointer
from echelon.compat.torchtnt.framework.callbacks.checkpoint_writer import Manager, Writer
from echelon.compat.torchtnt.framework.callbacks.checkpointer_types import KnobOptions, RestoreOptions
from echelon.compat.torchtnt.utils.checkpoint_path import CheckpointPath
from echelon.loop.checkpointing.options import SaveOptions, check_group
from echelon.loop.state import State
from echelon.loop.unit import Unit
from echelon.world import agree

__all__ = ["DistributedCheckpointSaver", "without_effect"]

logger = logging.getLogger(__name__)


def without_effect(what: str, **given: Any) -> None:
    """Warn, on rank 0, of arguments that were given and change nothing."""
    names = [name for name, value in given.items() if value is not None]
    if names and agree.is_rank0():
        logger.warning("%s: %s has no effect here", what, ", ".join(names))


class DistributedCheckpointSaver(BaseCheckpointer):
    """Saves as `echelon.DistributedCheckpointSaver` does: complete or not at all, by parameter name, without pickle; when and
    under which names as BaseCheckpointer says. Checkpoints of `evaluate` and `predict` hold no weights.

    Args:
        async_checkpoint: the loop stops only to copy the state to host memory; a thread writes.
        knob_options: of TorchTNT's storage, without effect.
        options: what else echelon's saver can be told: a SaveOptions.
    """

    metadata_fnames: Sequence[str] = (".metadata",)

    def __init__(
        self,
        dirpath: str | Path,
        *,
        save_every_n_train_steps: int | None = None,
        save_every_n_epochs: int | None = None,
        save_every_n_eval_steps: int | None = None,
        save_every_n_eval_epochs: int | None = None,
        save_every_n_predict_steps: int | None = None,
        keep_last_n_checkpoints: int | None = None,
        best_checkpoint_config: BestCheckpointConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        async_checkpoint: bool = False,
        knob_options: KnobOptions | None = None,
        options: SaveOptions | None = None,
    ) -> None:
        check_group(process_group)
        without_effect("saver", knob_options=knob_options)
        super().__init__(
            str(dirpath),
            save_every_n_train_steps=save_every_n_train_steps,
            save_every_n_epochs=save_every_n_epochs,
            save_every_n_eval_epochs=save_every_n_eval_epochs,
            save_every_n_eval_steps=save_every_n_eval_steps,
            save_every_n_predict_steps=save_every_n_predict_steps,
            keep_last_n_checkpoints=keep_last_n_checkpoints,
            best_checkpoint_config=best_checkpoint_config,
            process_group=process_group,
        )
        manager = self._checkpoint_manager = Manager.of(self._checkpoint_manager)
        self._writer = Writer(self.dirpath, async_checkpoint, options, manager)

    # --- when

    def on_train_start(self, state: State, unit: Any) -> None:
        self._writer.begin(state, unit)
        super().on_train_start(state, unit)

    def on_train_step_end(self, state: State, unit: Any) -> None:
        self._writer.look(state, unit)
        super().on_train_step_end(state, unit)

    def on_train_end(self, state: State, unit: Any) -> None:
        with self._writer.ending(state):
            super().on_train_end(state, unit)

    def on_eval_end(self, state: State, unit: Any) -> None:
        if state.train_state is not None:
            super().on_eval_end(state, unit)
            return
        with self._writer.ending(state):
            super().on_eval_end(state, unit)

    def on_predict_end(self, state: State, unit: Any) -> None:
        with self._writer.ending(state):
            super().on_predict_end(state, unit)

    def on_exception(self, state: State, unit: Unit, exc: BaseException) -> None:
        self._writer.on_exception(state, unit, exc)

    def _checkpoint_impl(self, state: State, unit: Any, *, checkpoint_id: str, hook: str) -> bool:
        return self._writer.write(state, unit, CheckpointPath.from_str(checkpoint_id), hook)

    def _tell_unit(self, state: State, unit: Any, path: CheckpointPath) -> None:
        self._writer.when_whole(lambda: super(DistributedCheckpointSaver, self)._tell_unit(state, unit, path))

    # --- restoring

    @staticmethod
    def restore(
        path: str | Path,
        unit: Unit,
        *,
        train_dataloader: Iterable[Any] | None = None,
        eval_dataloader: Iterable[Any] | None = None,
        predict_dataloader: Iterable[Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore_options: RestoreOptions | None = None,
        **other: Any,
    ) -> Report:
        """As `echelon.DistributedCheckpointSaver.restore`; also what TorchTNT's DistributedCheckpointSaver wrote, whose pickles
        are read without running any code.

        Weights, optimizers and schedulers are left alone by a checkpoint of `evaluate` or `predict`, which has none.

        Args:
            other: of TorchTNT's storage, without effect, as `process_group`.
        """
        without_effect("restore", process_group=process_group, **other)
        loaders = {"train": train_dataloader, "eval": eval_dataloader, "predict": predict_dataloader}
        return restoring.restore(location(path, "path"), unit, loaders, restore_options)

    @classmethod
    def restore_from_latest(
        cls,
        dirpath: str | Path,
        unit: Unit,
        *,
        train_dataloader: Iterable[Any] | None = None,
        eval_dataloader: Iterable[Any] | None = None,
        predict_dataloader: Iterable[Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore_options: RestoreOptions | None = None,
        file_system: Any = None,
        fall_back: bool = True,
        **other: Any,
    ) -> bool:
        """Restore the newest valid checkpoint in a folder, as `echelon.DistributedCheckpointSaver.restore_from_latest`."""
        without_effect("restore_from_latest", **other)
        loaders = {"train": train_dataloader, "eval": eval_dataloader, "predict": predict_dataloader}
        ordered = restoring.newest_first(str(dirpath), cls._metadata(), file_system, process_group)
        return restoring.restore_first(str(dirpath), ordered, unit, loaders, restore_options, fall_back)

    @classmethod
    def restore_from_best(
        cls,
        dirpath: str | Path,
        unit: Unit,
        metric_name: str,
        mode: Literal["min", "max"] = "min",
        *,
        train_dataloader: Iterable[Any] | None = None,
        eval_dataloader: Iterable[Any] | None = None,
        predict_dataloader: Iterable[Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore_options: RestoreOptions | None = None,
        file_system: Any = None,
        fall_back: bool = True,
        **other: Any,
    ) -> bool:
        """As `restore_from_latest`, of the checkpoints that have the metric the best; False if none has it."""
        without_effect("restore_from_best", **other)
        loaders = {"train": train_dataloader, "eval": eval_dataloader, "predict": predict_dataloader}
        ordered = restoring.best_first(str(dirpath), cls._metadata(), metric_name, mode, file_system, process_group)
        return restoring.restore_first(str(dirpath), ordered, unit, loaders, restore_options, fall_back)
