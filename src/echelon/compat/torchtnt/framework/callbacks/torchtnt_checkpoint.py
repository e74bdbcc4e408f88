"""Checkpoints that TorchTNT's DistributedCheckpointSaver wrote: their states, as a unit of echelon's takes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from echelon.checkpoint import commit, store
from echelon.checkpoint.layout import NamedState
from echelon.checkpoint.location import Location
from echelon.checkpoint.manifest import MANIFEST
from echelon.checkpoint.store import Report
from echelon.common.errors import CheckpointCorruptError, CheckpointMismatchError
from echelon.common.terminal import printable
from echelon.compat.torchtnt.framework.callbacks.dcp_files import METADATA, Saved
from echelon.loop.checkpointing import restoring
from echelon.loop.checkpointing.options import RestoreOptions
from echelon.loop.unit import TrainUnit, Unit
from echelon.parallel.state.optimizer_state import OptimizerState
from echelon.parallel.state.state import states_by_name
from echelon.world import agree, rng

__all__ = ["is_one", "restore"]

logger = logging.getLogger(__name__)

# What wrappers put into a parameter's name.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def is_one(path: Location) -> bool:
    """Whether a folder is such a checkpoint, as rank 0 sees it. Collective."""
    return commit.on_rank0(lambda: (path / METADATA).exists() and not (path / MANIFEST).exists(), path)


def restore(path: Location, unit: Unit, loaders: Mapping[str, Any], options: RestoreOptions) -> Report:
    """Put a unit back to it: weights, optimizers, schedulers, progress, other Statefuls. Collective.

    Every rank reads what it holds itself, so it may be another number of ranks, and another strategy, than wrote it.

    Raises:
        CheckpointCorruptError: it is not what torch writes, or needs code to be run.
        CheckpointMismatchError: it does not fit the unit; with a table.
    """
    chosen = restoring.chosen_of(unit, options)
    states = {name: state for name, state in states_by_name(unit.app_state()).items() if name in chosen}
    saved = store.on_each(path, lambda: Saved(path))
    rest = store.on_each(path, lambda: _rest(path, saved, states))
    # What TorchTNT does not have: echelon's own, such as the state of an accumulation window.
    others = {**unit.tracked_progress(), **unit.tracked_misc_statefuls()}
    own = {name for name, value in others.items() if type(value).__module__.split(".")[0] == __name__.split(".")[0]}
    states = {name: state for name, state in states.items() if name in rest or name not in own}
    if options.rename:
        raise CheckpointMismatchError(f"{path} was written by TorchTNT: rename= is for checkpoints of echelon's.")
    report = store.fill(path, states, rest, saved, strict=options.strict)
    for name, metric in unit.tracked_metrics().items():
        if options.restore_metrics and name in rest and agree.is_rank0():  # ranks have shares, and one was saved
            metric.load_state_dict(rest[name])
    for phase, loader in loaders.items():
        if loader is not None:
            _restore_loader(f"{phase}_dataloader", loader, rest)
    if isinstance(unit, TrainUnit):
        rng.renew(unit.train_progress.num_steps_completed)
    unit.restored()
    logger.info("Restored the checkpoint with checkpoint_id: %s", path)
    return report


def _restore_loader(name: str, loader: Any, rest: Mapping[str, Any]) -> None:
    if not hasattr(loader, "load_state_dict"):
        logger.warning("%s was passed to `restore` but it does not implement the Stateful protocol to load states", name)
    elif name not in rest:
        logger.warning("%s was passed to `restore` but no dataloader exists in checkpoint metadata.", name)
    else:
        loader.load_state_dict(rest[name])


def _rest(path: Location, saved: Saved, states: Mapping[str, Any]) -> dict[str, Any]:
    """By state what of it is no tensor; the tensors of named states get their names here."""
    names: dict[str, str] = {}
    rest: dict[str, Any] = {}
    values = saved.values()
    optimizers = {name: _Numbered(path, name, state) for name, state in states.items() if isinstance(state, OptimizerState)}
    wanted = {n: set(s.state_dict()) for n, s in states.items() if isinstance(s, NamedState) and n not in optimizers}
    for key, whole in saved.paths.items():
        if len(whole) < 2 or whole[0] != "app_state":
            raise CheckpointCorruptError(f"{path} was not written by TorchTNT: it holds {printable(key)}.", path=str(path))
        state, inner = str(whole[1]), whole[2:]
        if state in optimizers:
            optimizers[state].add(key, inner, values)
        elif state in wanted:
            name = _unwrapped(".".join(map(str, inner)), wanted[state])
            names[key] = f"{state}.{name}"
            rest.setdefault(state, {}).update({name: values[key]} if key in values else {})
        else:
            value = values[key] if key in values else saved.whole(key)
            if key not in values:
                names[key] = key
            _put(rest.setdefault(state, {}), inner, value)
    for state, numbered in optimizers.items():
        if numbered.seen:
            rest[state] = numbered.values()
            names |= {key: f"{state}.{name}" for key, name in numbered.tensors()}
    saved.rename(lambda key: names.get(key, key))
    return {name: value if name in wanted or name in optimizers else _with_lists(value) for name, value in rest.items()}


class _Numbered:
    """An optimizer's state, whose parameters have numbers, or names where it was sharded; by echelon's names.

    Args:
        state: tells the names here.
    """

    def __init__(self, path: Location, name: str, state: OptimizerState) -> None:
        self._path, self._name = path, name
        self._here = [name for group in state.names_by_group() for name in group]
        self._tensors: list[tuple[str, Any, str]] = []
        self._values: dict[str, Any] = {}
        self._options: dict[Any, dict[str, Any]] = {}
        self.seen = False

    def add(self, key: str, inner: tuple[Any, ...], values: Mapping[str, Any]) -> None:
        self.seen = True
        if len(inner) >= 3 and inner[0] == "state":
            what = ".".join(map(str, inner[2:]))
            if key in values:
                self._values[f"state.{self._called(inner[1])}.{what}"] = values[key]
            else:
                self._tensors.append((key, inner[1], what))
        elif len(inner) == 3 and inner[0] == "param_groups" and key in values:
            self._options.setdefault(inner[1], {})[str(inner[2])] = values[key]
        elif key not in values or inner[0] != "state":
            raise CheckpointMismatchError(
                f"{self._path} holds {printable(key)}, which is not read. RestoreOptions(restore_optimizers=False) leaves "
                "optimizers as they are."
            )

    def _called(self, parameter: Any) -> str:
        """A parameter's name here: by its number as torch counts, or by the name it had."""
        text = str(parameter)
        if text in self._here:
            return text
        if text.isdecimal() and int(text) < len(self._here):
            return self._here[int(text)]
        found = _unwrapped(text, set(self._here))
        if found not in self._here:
            raise CheckpointMismatchError(
                f"{self._path} has parameter {printable(text)} in {self._name}, which has {len(self._here)} parameters here. "
                "RestoreOptions(restore_optimizers=False) leaves it as it is."
            )
        return found

    def tensors(self) -> Iterator[tuple[str, str]]:
        """Keys, and what they are called here."""
        for key, parameter, what in self._tensors:
            yield key, f"state.{self._called(parameter)}.{what}"

    def values(self) -> dict[str, Any]:
        found = dict(self._values)
        for group in self._options.values():
            for parameter in group.get("params", ()):
                prefix = f"param_groups.{self._called(parameter)}"
                found |= {f"{prefix}.{option}": value for option, value in group.items() if option != "params"}
        return found


def _unwrapped(name: str, wanted: set[str]) -> str:
    """A name without what wrappers put into it, if that is how it is known here."""
    if name in wanted:
        return name
    inner = ".".join(part for part in name.split(".") if part not in _WRAPPERS[1:])
    while inner not in wanted and inner.startswith("module."):
        inner = inner.removeprefix("module.")
    return inner if inner in wanted else name


def _put(nested: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        inner = nested.setdefault(key, {})
        if not isinstance(inner, dict):
            raise CheckpointCorruptError(f"the checkpoint has two values at {printable(str(path))}.")
        nested = inner
    if path:
        nested[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Lists were written as if they were dicts with numbers."""
    if not isinstance(value, dict):
        return value
    made = {key: _with_lists(each) for key, each in value.items()}
    if made and all(isinstance(key, int) for key in made) and sorted(made) == list(range(len(made))):
        return [made[i] for i in range(len(made))]
    return made
