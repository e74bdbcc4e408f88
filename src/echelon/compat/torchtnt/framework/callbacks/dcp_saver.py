"""torchtnt.framework.callbacks.dcp_saver: echelon's checkpoints, at TorchTNT's times and under its names."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from echelon.checkpoint import commit, manifest, store
from echelon.checkpoint.location import Location, absolute, location
from echelon.checkpoint.policy import Keep
from echelon.checkpoint.snapshot import Snapshot, snapshot
from echelon.checkpoint.store import Report
from echelon.common.arguments import options_of
from echelon.common.errors import CheckpointCorruptError, NotHereError
from echelon.compat.torchtnt.framework.callbacks.base_checkpointer import BaseCheckpointer
from echelon.compat.torchtnt.framework.callbacks.checkpointer_types import KnobOptions
from echelon.compat.torchtnt.utils.checkpoint import (
    CheckpointManager,
    CheckpointPath,
    Phase,
    at,
    best_first,
    get_checkpoint_dirpaths,
)
from echelon.loop.checkpointing import changes, contents, restoring
from echelon.loop.checkpointing.folder import NamedFolder, left_alone
from echelon.loop.checkpointing.options import RestoreOptions, SaveOptions, check_group
from echelon.loop.checkpointing.saver import NamedSaver
from echelon.loop.records.metrics import share_of
from echelon.loop.state import EntryPoint, State
from echelon.loop.unit import Unit
from echelon.parallel.state.state import states_by_name
from echelon.world import agree, rng

__all__ = ["DistributedCheckpointSaver", "without_effect"]

logger = logging.getLogger(__name__)

Loaders = Mapping[str, Any]


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
        intervals: BaseCheckpointer's arguments.
    """

    metadata_fnames: Sequence[str] = (".metadata",)

    def __init__(
        self,
        dirpath: str | Path,
        *,
        process_group: dist.ProcessGroup | None = None,
        async_checkpoint: bool = False,
        knob_options: KnobOptions | None = None,
        options: SaveOptions | None = None,
        **intervals: Any,
    ) -> None:
        check_group(process_group)
        without_effect("saver", knob_options=knob_options)
        super().__init__(str(dirpath), process_group=process_group, **intervals)
        self._writer = _Writer(self._checkpoint_manager, async_checkpoint, options or SaveOptions())

    def _manager(self, *args: Any) -> CheckpointManager:
        return _Manager(*args)

    # --- when

    def on_train_start(self, state: State, unit: Any) -> None:
        self._writer.on_train_start(state, unit)
        super().on_train_start(state, unit)

    def on_train_step_end(self, state: State, unit: Any) -> None:
        self._writer.on_train_step_end(state, unit)
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
        self._writer.path = CheckpointPath.from_str(checkpoint_id)
        if hook in ("on_train_end", "on_predict_end"):
            return self._writer.save(state, unit) is not None
        return self._writer.write(state, unit)

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
        """As `echelon.DistributedCheckpointSaver.restore`.

        Weights, optimizers and schedulers are left alone by a checkpoint of `evaluate` or `predict`, which has none.

        Args:
            other: of TorchTNT's storage, without effect, as `process_group`.
        Raises:
            NotHereError: TorchTNT's own saver wrote it; with what reads it.
        """
        without_effect("restore", process_group=process_group, **other)
        loaders = {"train": train_dataloader, "eval": eval_dataloader, "predict": predict_dataloader}
        return _restore(location(path, "path"), unit, loaders, restore_options)

    @classmethod
    def restore_from_latest(
        cls,
        dirpath: str | Path,
        unit: Unit,
        *,
        train_dataloader: Iterable[Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore_options: RestoreOptions | None = None,
        file_system: Any = None,
        fall_back: bool = True,
        **other: Any,
    ) -> bool:
        """Restore the newest valid checkpoint in a folder, as `echelon.DistributedCheckpointSaver.restore_from_latest`; if none
        has a name of TorchTNT's, of those that have echelon's.

        Args:
            other: `eval_dataloader` and `predict_dataloader`, which are restored of what `evaluate` and `predict` saved; else
                of TorchTNT's storage, without effect.
        """
        found = get_checkpoint_dirpaths(str(dirpath), cls._metadata(), None, file_system, process_group)
        ordered = [at(path.path, file_system) for path in reversed(found)] or commit.candidates(at(str(dirpath), file_system))
        return _restore_first(str(dirpath), ordered, unit, {"train": train_dataloader, **other}, restore_options, fall_back)

    @classmethod
    def restore_from_best(
        cls,
        dirpath: str | Path,
        unit: Unit,
        metric_name: str,
        mode: Literal["min", "max"] = "min",
        *,
        train_dataloader: Iterable[Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore_options: RestoreOptions | None = None,
        file_system: Any = None,
        fall_back: bool = True,
        **other: Any,
    ) -> bool:
        """As `restore_from_latest`, of the checkpoints that have the metric the best; False if none has it."""
        found = get_checkpoint_dirpaths(str(dirpath), cls._metadata(), metric_name, file_system, process_group)
        if not found and agree.is_rank0():
            logger.warning(
                "No checkpoints with metric name %s were found in %s. Not loading any checkpoint.", metric_name, dirpath
            )
        ordered = [at(path.path, file_system) for path in best_first(found, mode)]
        return _restore_first(str(dirpath), ordered, unit, {"train": train_dataloader, **other}, restore_options, fall_back)


class _Manager(CheckpointManager):
    """Removes what is too much only once the checkpoint that takes its place is whole."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._doomed: list[CheckpointPath] = []

    def make_room(self) -> None:
        self._doomed.append(self._ckpt_paths.pop(0))

    def remove_doomed(self) -> None:
        doomed, self._doomed = self._doomed, []
        for path in doomed:
            self.remove(path)


class _Writer(NamedSaver):
    """
    Args:
        manager: whose surplus goes when a checkpoint is whole.
    """

    path: CheckpointPath  # of the checkpoint that is taken now

    def __init__(self, manager: Any, async_checkpoint: bool, options: SaveOptions) -> None:
        folder = NamedFolder(
            absolute(location(manager.dirpath)),
            Keep(None),
            restart=options.restart,
            step_of=_step_of,
            now=lambda unit: unit.train_progress.num_steps_completed,
        )
        super().__init__(folder, lambda unit: self._name(), async_checkpoint=async_checkpoint, options=options)
        self._manager = manager
        self._afterwards: list[Callable[[], None]] = []

    def _name(self) -> tuple[int, str]:
        steps = self.path.step
        step = next((steps[phase] for phase in (Phase.TRAIN, Phase.EVALUATE, Phase.PREDICT) if phase in steps), 0)
        return step, location(self.path.path).name

    def when_whole(self, act: Callable[[], None]) -> None:
        """Do this when the checkpoint that was written last is whole: at once, or in a later step."""
        self._afterwards.append(act)
        if not self._background.busy:
            self._run_afterwards(True)

    def _run_afterwards(self, whole: bool) -> None:
        acts, self._afterwards = self._afterwards, []
        if whole:
            self._manager.remove_doomed()
            for act in acts:
                act()

    def _look_after(self, state: State, wait: bool = False) -> None:
        busy, failures = self._background.busy, self.failures
        super()._look_after(state, wait)
        if busy and not self._background.busy:
            self._run_afterwards(self.failures <= failures)

    def _take(self, state: State, unit: Any) -> tuple[Snapshot, dict[str, Any]]:
        more = {}
        for phase in ("eval", "predict"):
            here = getattr(state, f"{phase}_state")
            progress = getattr(unit, f"{phase}_progress", None)
            position = here.loader_state(progress) if here is not None and here.feed is not None and progress else None
            if position is not None:
                more[f"{phase}_dataloader"] = position
        if state.entry_point in (EntryPoint.EVALUATE, EntryPoint.PREDICT):
            taken, facts = _without_weights(unit, more)
        else:
            taken, facts = contents.take(state, unit, self._planned, None, self._frozen, more)
        metric = self.path.metric_data
        return taken, {**facts, "metrics": {metric.name: metric.value} if metric is not None else {}}


def _without_weights(unit: Any, more: dict[str, Any]) -> tuple[Snapshot, dict[str, Any]]:
    """What an evaluation or a prediction changes."""
    metrics = unit.tracked_metrics()
    left = {*unit.tracked_modules(), *unit.tracked_optimizers(), *unit.tracked_lr_schedulers(), *metrics}
    states = states_by_name({name: value for name, value in unit.app_state().items() if name not in left})
    own = {"streams": rng.states(), "metrics": {name: share_of(metric) for name, metric in metrics.items()}, **more}
    return snapshot(states, own), {"config": changes.facts(unit, None)}


def _step_of(name: str) -> int | None:
    """Of a checkpoint of training; others are no part of a run."""
    try:
        return CheckpointPath.from_str(f"./{name}").step.get(Phase.TRAIN)
    except ValueError:
        return None


def _is_of_training(path: Location) -> bool:
    try:
        found = CheckpointPath.from_str(str(path))
    except ValueError:
        return True
    return Phase.TRAIN in found.step or Phase.NONE in found.step


def _restore_first(
    dirpath: str, ordered: list[Location], unit: Unit, given: dict[str, Any], options: RestoreOptions | None, fall_back: bool
) -> bool:
    """Restore the first that is valid; False if there is none."""
    loaders = {phase: given.pop(key, None) for phase, key in _LOADERS.items()}
    without_effect("restore", **given)
    where = location(dirpath)
    if left_alone(where) or not ordered:
        return False
    _refuse_theirs(ordered[0])
    ours = [path for path in ordered if not _is_theirs(path)]
    if not _is_of_training(ours[0]):
        _restore(ours[0], unit, loaders, options)
        return True
    options = options_of(RestoreOptions, "restore_options", options)
    done = restoring.restore_first(where, ours, unit, loaders["train"], options, fall_back)
    if loaders["eval"] is not None or loaders["predict"] is not None:
        logger.warning("eval_dataloader and predict_dataloader are restored by `restore` of one checkpoint, not here")
    return done


_LOADERS = {"train": "train", "eval": "eval_dataloader", "predict": "predict_dataloader"}


def _restore(path: Location, unit: Unit, loaders: Loaders, options: RestoreOptions | None) -> Report:
    """Put a unit, and the loaders that are given, back to a checkpoint. Collective."""
    options = options_of(RestoreOptions, "restore_options", options)
    _refuse_theirs(path)
    if not _is_of_training(path):
        logger.info(
            "Will not restore model parameters, optimizers, or lr schedulers from %s, since it is a prediction or evaluation "
            "checkpoint.",
            path,
        )
        options = dataclasses.replace(options, restore_modules=False, restore_optimizers=False, restore_lr_schedulers=False)
    report = restoring.restore(path, unit, loaders["train"], options)
    given = {phase: loader for phase, loader in loaders.items() if phase != "train" and loader is not None}
    if given:
        _restore_loaders(path, given)
    return report


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
