"""How DistributedCheckpointSaver restores: echelon's checkpoints under TorchTNT's names or its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist

from echelon.checkpoint import commit, manifest, store
from echelon.checkpoint.location import Location, location
from echelon.checkpoint.store import Report
from echelon.common.arguments import options_of
from echelon.common.errors import CheckpointCorruptError, NotHereError
from echelon.compat.torchtnt.utils import checkpoint_folder as folder
from echelon.compat.torchtnt.utils.checkpoint_path import CheckpointPath, Phase
from echelon.loop.checkpointing import restoring
from echelon.loop.checkpointing.folder import left_alone
from echelon.loop.checkpointing.options import RestoreOptions
from echelon.loop.unit import Unit
from echelon.world import agree

__all__ = ["best_first", "newest_first", "restore", "restore_first"]

logger = logging.getLogger(__name__)

Loaders = Mapping[str, Any]


def newest_first(
    dirpath: str, metadata: list[str], file_system: Any = None, group: dist.ProcessGroup | None = None
) -> list[Location]:
    """A folder's checkpoints, and if none has a name of TorchTNT's, those that have echelon's. Collective."""
    found = [folder.at(path.path, file_system) for path in reversed(folder.paths(dirpath, metadata, None, file_system, group))]
    return found or commit.candidates(folder.at(dirpath, file_system))


def best_first(
    dirpath: str,
    metadata: list[str],
    metric_name: str,
    mode: Literal["min", "max"],
    file_system: Any = None,
    group: dist.ProcessGroup | None = None,
) -> list[Location]:
    """Those that have the metric in their name, the older of equals first. Collective."""
    found = folder.paths(dirpath, metadata, metric_name, file_system, group)
    sign = -1 if mode == "max" else 1
    found.sort(key=lambda path: sign * path.metric_data.value if path.metric_data is not None else 0.0)
    if not found and agree.is_rank0():
        logger.warning("No checkpoints with metric name %s were found in %s. Not loading any checkpoint.", metric_name, dirpath)
    return [folder.at(path.path, file_system) for path in found]


def restore_first(
    dirpath: str, ordered: list[Location], unit: Unit, loaders: Loaders, options: RestoreOptions | None, fall_back: bool
) -> bool:
    """Restore the first that is valid; False if there is none."""
    where = location(dirpath)
    if left_alone(where):
        return False
    if not ordered:
        return False
    _refuse_theirs(ordered[0])
    ours = [path for path in ordered if not _is_theirs(path)]
    options = options_of(RestoreOptions, "restore_options", options)
    if not _of_training(ours[0]):
        restore(ours[0], unit, loaders, options)
        return True
    done = restoring.restore_first(where, ours, unit, loaders.get("train"), options, fall_back)
    if loaders.get("eval") is not None or loaders.get("predict") is not None:
        logger.warning("eval_dataloader and predict_dataloader are restored by `restore` of one checkpoint, not here")
    return done


def restore(path: Location, unit: Unit, loaders: Loaders, options: RestoreOptions | None) -> Report:
    """Put a unit, and the loaders that are given, back to a checkpoint. Collective."""
    options = options_of(RestoreOptions, "restore_options", options)
    _refuse_theirs(path)
    if not _of_training(path):
        logger.info(
            "Will not restore model parameters, optimizers, or lr schedulers from %s, since it is a prediction or evaluation "
            "checkpoint.",
            path,
        )
        options = dataclasses.replace(
            _plain(options), restore_modules=False, restore_optimizers=False, restore_lr_schedulers=False
        )
    report = restoring.restore(path, unit, loaders.get("train"), options)
    given = {phase: loader for phase, loader in loaders.items() if phase != "train" and loader is not None}
    if given:
        _restore_loaders(path, given)
    return report


def _is_theirs(path: Location) -> bool:
    """Whether TorchTNT wrote it, as rank 0 sees it. Collective."""
    return commit.on_rank0(lambda: (path / ".metadata").exists() and not (path / manifest.MANIFEST).exists(), path)


def _refuse_theirs(path: Location) -> None:
    if _is_theirs(path):
        raise NotHereError(
            f"{path} was written by TorchTNT, whose format is not part of echelon.compat. Instead: `python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE` makes a file of it for torch.load, whose "
            "['app_state'] has the states of the unit's attributes for their load_state_dict. Save to another folder."
        )


def _restore_loaders(path: Location, loaders: Loaders) -> None:
    facts = commit.on_rank0(lambda: manifest.read(path), path)
    own = store.on_each(path, lambda: store.read_rank(path, facts))
    for phase, loader in loaders.items():
        saved = (own or {}).get(f"{phase}_dataloader")
        if not hasattr(loader, "load_state_dict"):
            logger.warning(
                "dataloader for %s phase was passed to `restore` but it does not implement the Stateful protocol to load states",
                phase,
            )
        elif agree.any_rank(saved is None):
            logger.warning("dataloader (%s) was passed to `restore` but no dataloader exists in checkpoint metadata.", phase)
        elif not isinstance(saved, dict):
            raise CheckpointCorruptError(f"{path} should hold the state of a loader, and does not.", path=str(path))
        else:
            loader.load_state_dict(saved)


def _of_training(path: Location) -> bool:
    try:
        found = CheckpointPath.from_str(str(path))
    except ValueError:
        return True
    return Phase.TRAIN in found.step or Phase.NONE in found.step


def _plain(options: RestoreOptions) -> RestoreOptions:
    """Not of a subclass with a constructor of its own, which `replace` would call."""
    return RestoreOptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(RestoreOptions)})
