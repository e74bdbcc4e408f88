"""torchtnt.framework.callbacks.dcp_saver: echelon's saver, with TorchTNT's further arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from echelon.checkpoint.store import Report
from echelon.compat.torchtnt.framework.callbacks.checkpointer_types import KnobOptions, RestoreOptions
from echelon.loop.checkpointing import saver
from echelon.loop.unit import Unit
from echelon.world import agree

__all__ = ["DistributedCheckpointSaver", "without_effect"]

logger = logging.getLogger(__name__)


def without_effect(what: str, **given: Any) -> None:
    """Warn, on rank 0, of arguments that were given and change nothing."""
    names = [name for name, value in given.items() if value is not None]
    if names and agree.is_rank0():
        logger.warning("%s: %s has no effect here", what, ", ".join(names))


class DistributedCheckpointSaver(saver.DistributedCheckpointSaver):
    """As `echelon.DistributedCheckpointSaver`; arguments that only TorchTNT's storage has are accepted, and a warning says so.

    `predict` writes no checkpoints, so `save_every_n_predict_steps` has no effect either; nor has `process_group`, since ranks
    agree over the group that all of them are in.
    """

    def __init__(
        self,
        dirpath: str | Path,
        *,
        save_every_n_predict_steps: int | None = None,
        knob_options: KnobOptions | None = None,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        given = {"save_every_n_predict_steps": save_every_n_predict_steps, "knob_options": knob_options}
        without_effect("saver", **given, process_group=process_group)
        super().__init__(dirpath, **options)

    @staticmethod
    def restore(  # type: ignore[override]
        path: str | Path,
        unit: Unit,
        *,
        train_dataloader: Iterable[Any] | None = None,
        restore_options: RestoreOptions | None = None,
        **other: Any,
    ) -> Report:
        """As `echelon.DistributedCheckpointSaver.restore`. Only training has a position in its loader."""
        without_effect("restore", **other)
        return saver.DistributedCheckpointSaver.restore(
            path, unit, train_dataloader=train_dataloader, restore_options=restore_options
        )

    @staticmethod
    def restore_with_id(checkpoint_id: int | str, unit: Unit, **options: Any) -> Report:
        """As `restore`; the id is the path."""
        return DistributedCheckpointSaver.restore(str(checkpoint_id), unit, **options)

    @staticmethod
    def restore_from_latest(  # type: ignore[override]
        dirpath: str | Path,
        unit: Unit,
        *,
        train_dataloader: Iterable[Any] | None = None,
        restore_options: RestoreOptions | None = None,
        fall_back: bool = True,
        **other: Any,
    ) -> bool:
        """As `echelon.DistributedCheckpointSaver.restore_from_latest`."""
        without_effect("restore_from_latest", **other)
        return saver.DistributedCheckpointSaver.restore_from_latest(
            dirpath, unit, train_dataloader=train_dataloader, restore_options=restore_options, fall_back=fall_back
        )

    @staticmethod
    def restore_from_best(  # type: ignore[override]
        dirpath: str | Path,
        unit: Unit,
        metric_name: str,
        mode: Literal["min", "max"] = "min",
        *,
        train_dataloader: Iterable[Any] | None = None,
        restore_options: RestoreOptions | None = None,
        fall_back: bool = True,
        **other: Any,
    ) -> bool:
        """As `echelon.DistributedCheckpointSaver.restore_from_best`."""
        without_effect("restore_from_best", **other)
        return saver.DistributedCheckpointSaver.restore_from_best(
            dirpath,
            unit,
            metric_name,
            mode,
            train_dataloader=train_dataloader,
            restore_options=restore_options,
            fall_back=fall_back,
        )
