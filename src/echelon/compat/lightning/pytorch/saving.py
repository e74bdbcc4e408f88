"""Checkpoints under names that callbacks choose: echelon's folders, whole or not there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from echelon.checkpoint import commit, manifest, store
from echelon.checkpoint.location import is_there, remove_tree
from echelon.common.errors import UsageError
from echelon.common.files import sync
from echelon.compat.lightning.pytorch import reading
from echelon.loop.checkpointing.options import RestoreOptions
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
from echelon.loop.state import State
from echelon.world import agree

__all__ = ["Loaded", "restore_module", "restore_training", "write"]

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


class Loaded(dict[str, Any]):
    """The dict of `on_load_checkpoint`. Its "state_dict", the weights, is read when somebody asks for it, and may be changed.

    Args:
        facts: what was saved beside tensors.
        weights: reads the weights, whole, on the CPU.
    """

    def __init__(self, facts: dict[str, Any], weights: Callable[[], dict[str, torch.Tensor]]) -> None:
        super().__init__(facts)
        self._weights = weights

    @property
    def changed_weights(self) -> dict[str, torch.Tensor] | None:
        """None if nobody has asked for them."""
        return dict.get(self, "state_dict")

    def __contains__(self, name: object) -> bool:
        return name == "state_dict" or super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name == "state_dict":
            self[name] = self._weights()
            return self[name]
        if name in ("optimizer_states", "lr_schedulers", "loops"):
            raise UsageError(
                f"checkpoint[{name!r}] is not there in on_load_checkpoint: optimizers, schedules and progress are restored by "
                "themselves, after configure_optimizers."
            )
        raise KeyError(name)

    def forget_weights(self) -> None:
        dict.pop(self, "state_dict", None)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def restore_module(path: Path, trainer: Any, unit: Any, *, trains: bool) -> None:
    """Put the module back to a checkpoint, and call what loads: before there are optimizers, as Lightning does. Collective.

    In this order: the module's hook, its weights, the data module, the callbacks' hooks, the callbacks' states.

    Raises:
        UsageError: optimizers are to be restored from a file of Lightning's own, of which only weights are read.
    """
    is_ours = agree.from_rank0(path.is_dir)
    if trains and not is_ours and agree.from_rank0(path.exists):
        raise UsageError(
            f"{path} is a file of Lightning's own, of which optimizers and progress are not read. Build the module from it with "
            "load_from_checkpoint, and call fit without ckpt_path."
        )
    if is_ours:
        commit.verify(path)
    module = unit.lightning_module
    facts = store.on_each(path, lambda: reading.facts_of(path))
    saved = Loaded(facts, lambda: reading.weights_of(path))
    trainer.load_module_hook(saved)
    if is_ours and saved.changed_weights is None:
        options = replace(RestoreOptions.weights_only(strict=module.strict_loading), show_changes=not trains)
        DistributedCheckpointSaver.restore(path, unit, restore_options=options)
    else:
        left = module.load_state_dict(saved["state_dict"], strict=module.strict_loading)
        if left.missing_keys or left.unexpected_keys:
            logger.warning("%s: missing %s, left over %s", path, left.missing_keys, left.unexpected_keys)
    saved.forget_weights()
    if is_ours:
        trainer.load_states(saved)


def restore_training(path: Path, unit: Any, loader: Any) -> None:
    """Put optimizers, schedules and progress back to a checkpoint, once they are built. Collective."""
    options = RestoreOptions(restore_modules=False, strict=unit.lightning_module.strict_loading)
    DistributedCheckpointSaver.restore(path, unit, train_dataloader=loader, restore_options=options)
