"""Read a module out of a checkpoint: echelon's folder, or a `.ckpt` file that Lightning wrote. Per rank, without a group."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from echelon.checkpoint import manifest
from echelon.checkpoint.layout import STATE
from echelon.checkpoint.tensors import Tensors, local_files
from echelon.common.errors import CheckpointNotFoundError, CheckpointUnreadableError, UsageError
from echelon.compat.lightning.pytorch.hparams import arguments_for

__all__ = ["KEPT", "build", "facts_of", "weights_of"]

logger = logging.getLogger(__name__)

KEPT = "lightning"  # the state in a checkpoint that has what a LightningModule saves besides tensors


def facts_of(path: Path) -> dict[str, Any]:
    """What was saved besides weights and optimizers: "epoch", "global_step", "hyper_parameters", hooks' own keys."""
    if path.is_dir():
        with local_files(path) as files:
            kept: dict[str, Any] = files.state(STATE).get(KEPT, {})
        return kept
    return {name: value for name, value in _file(path).items() if name != "state_dict"}


def weights_of(path: Path, map_location: Any = None) -> dict[str, torch.Tensor]:
    """The module's state_dict, whole."""
    if not path.is_dir():
        found: dict[str, torch.Tensor] = _file(path, map_location)["state_dict"]
        return found
    with local_files(path, manifest.read(path)) as files:
        saved = Tensors(files)
        names = [name for name in saved.index if name.startswith("module.")]
        found = {name.removeprefix("module."): saved.whole(name).clone() for name in names}
        return {name: t.to(map_location) for name, t in found.items()} if map_location is not None else found


def _file(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    if not path.exists():
        raise CheckpointNotFoundError(f"there is no checkpoint {path}.", path=str(path))
    try:
        found = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # whatever unpickling may raise
        raise CheckpointUnreadableError(
            f"{path} cannot be read without executing what is pickled in it: {error}. If you trust it, load it with torch.load, "
            "and module.load_state_dict(...)."
        ) from None
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), dict):
        raise CheckpointUnreadableError(f"{path} is no checkpoint of Lightning's: it has no 'state_dict'.")
    return found


def build(cls: Any, path: Path, map_location: Any, strict: bool | None, given: dict[str, Any]) -> Any:
    """An object of a LightningModule's or LightningDataModule's class."""
    if not path.exists():
        raise CheckpointNotFoundError(f"there is no checkpoint {path}.", path=str(path))
    facts = facts_of(path)
    arguments = arguments_for(cls, facts.get("hyper_parameters") or {}, given)
    try:
        made = cls(**arguments)
    except TypeError as error:
        raise UsageError(
            f"{cls.__name__} cannot be built from the hyperparameters in {path}: {error}. Call self.save_hyperparameters() in "
            "its __init__, or give its arguments to load_from_checkpoint."
        ) from error
    if hasattr(made, "configure_model"):
        made.configure_model()
    made.on_load_checkpoint(facts)
    left = made.load_state_dict(weights_of(path, map_location), strict=made.strict_loading if strict is None else strict)
    if left.missing_keys or left.unexpected_keys:
        logger.warning("%s: missing %s, left over %s", path, left.missing_keys, left.unexpected_keys)
    return made
