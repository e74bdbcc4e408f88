"""Checkpoints under names that callbacks choose: echelon's folders; and `.ckpt` files that Lightning wrote, which are only read.

Beside the tensors of modules and optimizers, by name, a checkpoint has `Kept`: hyperparameters, callbacks, hooks' own keys.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from echelon.checkpoint import commit, manifest, plain, store
from echelon.checkpoint.layout import STATE
from echelon.checkpoint.location import exists, remove_tree
from echelon.checkpoint.tensors import Tensors, local_files
from echelon.common.errors import CheckpointError, CheckpointNotFoundError, CheckpointUnreadableError, UsageError
from echelon.common.files import sync
from echelon.compat.lightning.pytorch.hparams import arguments_for
from echelon.loop.checkpointing.options import RestoreOptions
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
from echelon.loop.state import State
from echelon.parallel.names import class_name
from echelon.world import agree

__all__ = ["Kept", "build", "restore_module", "restore_training", "write"]

logger = logging.getLogger(__name__)

# --- what is saved beside tensors


_IN_SAVE = (
    "is not there in on_save_checkpoint: the module's and the optimizers' tensors are saved by name, not in this dict. Save "
    "other tensors under a key of your own, such as checkpoint['ema'], and take them in on_load_checkpoint."
)
_IN_LOAD = (
    "is not there in on_load_checkpoint: optimizers, schedules and progress are restored by themselves, after "
    "configure_optimizers."
)


class _Explained(dict[str, Any]):
    """A checkpoint's dict, as hooks get it. Using a name of Lightning's that is not there says why.

    Args:
        weights: reads "state_dict", whole, on the CPU, at its first use; it may be changed. None: it is not there.
    """

    def __init__(self, facts: dict[str, Any], why: str, weights: Callable[[], dict[str, torch.Tensor]] | None = None) -> None:
        super().__init__(facts)
        self._why, self._weights = why, weights

    def _check(self, name: str) -> None:
        if name in ("optimizer_states", "lr_schedulers", "loops") or (name == "state_dict" and self._weights is None):
            raise UsageError(f"checkpoint[{name!r}] {self._why}")

    def __contains__(self, name: object) -> bool:
        return (name == "state_dict" and self._weights is not None) or super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        self._check(name)
        if name != "state_dict" or self._weights is None:
            raise KeyError(name)
        self[name] = self._weights()
        return self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


class Kept:
    """The unit's attribute `lightning`, whose state is what a checkpoint has beside tensors."""

    name = "lightning"

    def __init__(self, session: Any) -> None:
        self._session = session

    def state_dict(self) -> dict[str, Any]:
        session, trainer, module = self._session, self._session.trainer, self._session.module
        facts = {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "class_name": class_name(module)}
        dump = _Explained(facts, _IN_SAVE)
        dump["hyper_parameters"] = {name: value for name, value in module.hparams.items() if _is_plain(value)}
        # A run that goes on may ask for them before it evaluates again.
        dump["callback_metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if session.unit is not None and session.unit.is_in_epoch:
            dump["logged"] = session.results["train"].state(module)
        dump["datamodule"] = session.datamodule.state_dict()
        for callback in trainer.lightning_callbacks:
            if hasattr(callback, "on_save_checkpoint"):
                callback.on_save_checkpoint(trainer, module, dump)
        module.on_save_checkpoint(dump)
        keys = {each.state_key: each.state_dict() for each in trainer.lightning_callbacks if hasattr(each, "state_key")}
        dump["callbacks"] = {name: state for name, state in keys.items() if state}
        return dict(dump)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore logged values. `restore_module` has restored callbacks and called hooks before."""
        session, trainer = self._session, self._session.trainer
        numbers = state_dict.get("callback_metrics", {})
        trainer.callback_metrics.update({name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()})
        session.results["train"].load_state(state_dict.get("logged", []), session.module)


def _is_plain(value: Any) -> bool:
    try:
        plain.encode(value, {})
    except CheckpointError:
        return False
    return True


# --- written


class _Writer(DistributedCheckpointSaver):
    """Saves once, under one name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self._name = path.name

    def place(self, unit: Any) -> tuple[int, str]:
        return unit.train_progress.num_steps_completed, self._name


def write(path: Path, state: State, unit: Any) -> None:
    """Save under this name. An older checkpoint of this name is replaced when the new one is whole. Collective."""
    path = path.absolute()
    new, old = path.with_name(f".new-{path.name}"), path.with_name(f".old-{path.name}")

    def is_taken() -> bool:
        for left in filter(exists, (new, old)):  # left by a run that was killed
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


# --- read


def facts_of(path: Path) -> dict[str, Any]:
    """What was saved besides weights and optimizers: "epoch", "global_step", "hyper_parameters", hooks' own keys."""
    if path.is_dir():
        with local_files(path) as files:
            kept: dict[str, Any] = files.state(STATE).get(Kept.name, {})
        return kept
    return {name: value for name, value in _file(path).items() if name != "state_dict"}


def weights_of(path: Path, map_location: Any = None) -> dict[str, torch.Tensor]:
    """The module's state_dict, whole."""
    if not path.is_dir():
        weights: dict[str, torch.Tensor] = _file(path, map_location)["state_dict"]
        return weights
    with local_files(path, manifest.read(path)) as files:
        saved = Tensors(files)
        names = [name for name in saved.index if name.startswith("module.")]
        weights = {name.removeprefix("module."): saved.whole(name).clone() for name in names}
        return {name: t.to(map_location) for name, t in weights.items()} if map_location is not None else weights


def _file(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    if not path.exists():
        raise CheckpointNotFoundError(f"there is no checkpoint {path}.", path=str(path))
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # whatever unpickling may raise
        raise CheckpointUnreadableError(
            f"{path} cannot be read without executing what is pickled in it: {error}. If you trust it, load it with torch.load, "
            "and module.load_state_dict(...)."
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise CheckpointUnreadableError(f"{path} is no checkpoint of Lightning's: it has no 'state_dict'.")
    return content


def build(cls: Any, path: Path, map_location: Any, strict: bool | None, given: dict[str, Any]) -> Any:
    """Build a LightningModule or LightningDataModule from a checkpoint."""
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
    _load(made, weights_of(path, map_location), path, made.strict_loading if strict is None else strict)
    return made


def _load(module: Any, weights: dict[str, torch.Tensor], path: Path, strict: bool) -> None:
    left = module.load_state_dict(weights, strict=strict)
    if left.missing_keys or left.unexpected_keys:
        logger.warning("%s: missing %s, left over %s", path, left.missing_keys, left.unexpected_keys)


# --- restored


def restore_module(path: Path, session: Any, *, trains: bool) -> None:
    """Restore the module and call the hooks that load. As in Lightning, optimizers are not built yet. Collective.

    In this order: the module's hook, its weights, the data module, the callbacks' hooks, the callbacks' states.

    Raises:
        UsageError: training is to continue from a file of Lightning's own, of which only weights are read.
    """
    is_ours = agree.from_rank0(path.is_dir)
    if trains and not is_ours and agree.from_rank0(path.exists):
        raise UsageError(
            f"{path} is a file of Lightning's own, of which optimizers and progress are not read. Build the module from it with "
            "load_from_checkpoint, and call fit without ckpt_path."
        )
    if is_ours:
        commit.verify(path)
    module = session.module
    facts = store.on_each(path, lambda: facts_of(path))
    saved = _Explained(facts, _IN_LOAD, lambda: weights_of(path))
    module.on_load_checkpoint(saved)
    if is_ours and dict.get(saved, "state_dict") is None:  # no hook has looked at the weights
        options = replace(RestoreOptions.weights_only(strict=module.strict_loading), show_changes=not trains)
        DistributedCheckpointSaver.restore(path, session.unit, restore_options=options)
    else:
        _load(module, saved["state_dict"], path, module.strict_loading)
    dict.pop(saved, "state_dict", None)
    if is_ours:
        _load_states(session, saved)


def _load_states(session: Any, saved: dict[str, Any]) -> None:
    """Restore the states of data module and callbacks, after the module's weights."""
    if saved.get("datamodule"):
        session.datamodule.load_state_dict(saved["datamodule"])
    for callback in session.trainer.lightning_callbacks:
        if hasattr(callback, "on_load_checkpoint"):
            callback.on_load_checkpoint(session.trainer, session.module, saved)
    states = saved.get("callbacks") or {}
    for callback in session.trainer.lightning_callbacks:
        if state := states.get(getattr(callback, "state_key", "")):
            callback.load_state_dict(copy.deepcopy(state))


def restore_training(path: Path, unit: Any, loader: Any) -> None:
    """Restore optimizers, schedules and progress from a checkpoint, once they are built. Collective."""
    options = RestoreOptions(restore_modules=False, strict=unit.lightning_module.strict_loading)
    DistributedCheckpointSaver.restore(path, unit, train_dataloader=loader, restore_options=options)
