"""Checkpoints under names that callbacks choose: echelon's folders, whole or not there."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from echelon.checkpoint import commit, manifest
from echelon.checkpoint.location import is_there, remove_tree
from echelon.compat.lightning.pytorch import reading
from echelon.contracts.errors import CheckpointNotFoundError, UsageError
from echelon.contracts.files import sync
from echelon.loop.checkpointing.options import RestoreOptions
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
from echelon.loop.state import State
from echelon.parallel.shards import is_split

__all__ = ["restore", "write"]

logger = logging.getLogger(__name__)


class _Writer(DistributedCheckpointSaver):
    """Saves once, under one name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self._name = path.name

    def _place(self, unit: Any) -> tuple[int, str]:
        return unit.train_progress.num_steps_completed, self._name


def write(path: Path, state: State, unit: Any) -> None:
    """Save under this name. What was saved under it before makes way when the new one is whole. Collective."""
    path = path.absolute()
    new, old = path.with_name(f".new-{path.name}"), path.with_name(f".old-{path.name}")

    def is_taken() -> bool:
        for left in filter(is_there, (new, old)):  # by a run that was killed
            remove_tree(left)
        return manifest.is_whole(path)

    def put() -> None:
        os.rename(path, old)
        os.rename(new, path)
        sync(path.parent)
        remove_tree(old)

    if commit.on_rank0(is_taken, path.parent):
        _Writer(new).save(state, unit)
        commit.on_rank0(put, path.parent)
    else:
        _Writer(path).save(state, unit)


def restore(path: Path, unit: Any, loader: Any, *, trains: bool) -> None:
    """Put a unit back to a checkpoint, or a module to the weights of a `.ckpt` file of Lightning's own. Collective.

    Args:
        trains: optimizers, schedules and progress, too.
    """
    if path.is_dir():
        options = RestoreOptions() if trains else RestoreOptions.weights_only()
        if trains:
            DistributedCheckpointSaver.restore(path, unit, train_dataloader=loader, restore_options=options)
        else:
            DistributedCheckpointSaver.restore(path, unit, restore_options=options)
        return
    if not path.exists():
        raise CheckpointNotFoundError(f"there is no checkpoint {path}.")
    if trains:
        raise UsageError(
            f"{path} is a file of Lightning's own, of which optimizers and progress are not read. Build the module from it with "
            "load_from_checkpoint, and call fit without ckpt_path."
        )
    module = unit.lightning_module
    if any(is_split(p) for p in module.parameters()):
        raise UsageError(f"{path} is a file of Lightning's own: load it before the module is sharded, with load_from_checkpoint.")
    module.on_load_checkpoint(reading.facts_of(path))
    module.load_state_dict(reading.weights_of(path, unit.device), strict=module.strict_loading)
