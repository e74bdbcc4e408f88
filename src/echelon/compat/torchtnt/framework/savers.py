"""torchtnt's DistributedCheckpointSaver and TorchSnapshotSaver: echelon's checkpoints, at TorchTNT's times, under its names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from echelon.checkpoint import commit, manifest
from echelon.checkpoint.location import Location, absolute, location
from echelon.checkpoint.policy import Keep
from echelon.checkpoint.snapshot import Snapshot
from echelon.checkpoint.store import Report
from echelon.common.arguments import options_of
from echelon.common.errors import NotHereError
from echelon.compat.named_saver import NamedFolder, NamedSaver
from echelon.compat.torchtnt.absent import ARGUMENTS
from echelon.compat.torchtnt.framework.base_checkpointer import BaseCheckpointer, KnobOptions
from echelon.compat.torchtnt.utils.checkpoint import (
    CheckpointManager,
    CheckpointPath,
    Phase,
    at,
)
from echelon.loop.checkpointing import contents, restoring
from echelon.loop.checkpointing.folder import left_alone
from echelon.loop.checkpointing.options import RestoreOptions, SaveOptions, check_group
from echelon.loop.state import State
from echelon.loop.unit import Unit
from echelon.world import agree

__all__ = ["DistributedCheckpointSaver", "TorchSnapshotSaver", "without_effect"]

logger = logging.getLogger(__name__)


def without_effect(what: str, **given: Any) -> None:
    """Warn, on rank 0, of arguments that were given and change nothing."""
    names = [name for name, value in given.items() if value is not None]
    if names and agree.is_rank0():
        logger.warning("%s: %s has no effect here", what, ", ".join(names))


class DistributedCheckpointSaver(BaseCheckpointer):
    """Saves as `echelon.DistributedCheckpointSaver` does: complete or not at all, by parameter name, without pickle.

    BaseCheckpointer decides when, and under which names. `evaluate` and `predict` change no weights and never save.

    Args:
        async_checkpoint: the loop stops only to copy the state to host memory; a thread writes.
        knob_options: settings of TorchTNT's storage; no effect.
        options: more options of echelon's saver, a SaveOptions.
        intervals: BaseCheckpointer's arguments.
    Raises:
        NotHereError: `save_every_n_predict_steps` is given.
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
        if intervals.get("save_every_n_predict_steps") is not None:
            remedy = ARGUMENTS["save_every_n_predict_steps"]
            raise NotHereError(f"save_every_n_predict_steps is not part of echelon.compat. Instead: {remedy}")
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

    def on_exception(self, state: State, unit: Unit, exc: BaseException) -> None:
        self._writer.on_exception(state, unit, exc)

    def _generate_checkpoint_and_upkeep(self, state: State, unit: Any, hook: str) -> bool:
        return state.train_state is not None and super()._generate_checkpoint_and_upkeep(state, unit, hook)

    def _checkpoint_impl(self, state: State, unit: Any, *, checkpoint_id: str, hook: str) -> bool:
        self._writer.path = CheckpointPath.from_str(checkpoint_id)
        if hook == "on_train_end":
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
        process_group: dist.ProcessGroup | None = None,
        restore_options: RestoreOptions | None = None,
        **other: Any,
    ) -> Report:
        """As `echelon.DistributedCheckpointSaver.restore`.

        Args:
            other: options of TorchTNT's storage, and loaders of other phases: no effect, as `process_group` has none.
        Raises:
            NotHereError: TorchTNT's own saver wrote the checkpoint; the message says what reads it.
        """
        without_effect("restore", process_group=process_group, **other)
        where = location(path, "path")
        _refuse_theirs(where)
        options = options_of(RestoreOptions, "restore_options", restore_options)
        return restoring.restore(where, unit, train_dataloader, options)

    @classmethod
    def _restore_first(
        cls,
        dirpath: str,
        paths: list[CheckpointPath],
        unit: Unit,
        *,
        train_dataloader: Iterable[Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore_options: RestoreOptions | None = None,
        file_system: Any = None,
        fall_back: bool = True,
        **other: Any,
    ) -> bool:
        """Restore the first valid one of `paths`, or if empty, of checkpoints with echelon's names. False if there is none."""
        ordered = [at(path.path, file_system) for path in paths] or commit.candidates(at(dirpath, file_system))
        without_effect("restore", **other)
        where = location(dirpath)
        if left_alone(where) or not ordered:
            return False
        _refuse_theirs(ordered[0])
        ours = [path for path in ordered if not _is_theirs(path)]
        options = options_of(RestoreOptions, "restore_options", restore_options)
        return restoring.restore_first(where, ours, unit, train_dataloader, options, fall_back)


class _Manager(CheckpointManager):
    """Removes a surplus checkpoint only once the one that replaces it is whole."""

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
        manager: removes its surplus once a checkpoint is whole.
    """

    path: CheckpointPath  # of the checkpoint that is saved now

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
        return self.path.step[Phase.TRAIN], location(self.path.path).name

    def when_whole(self, act: Callable[[], None]) -> None:
        """Call `act` once the latest checkpoint is whole: at once, or in a later step."""
        self._afterwards.append(act)
        if not self._background.busy:
            self._run_afterwards(True)

    def _run_afterwards(self, whole: bool) -> None:
        acts, self._afterwards = self._afterwards, []
        if whole:
            self._manager.remove_doomed()
            for act in acts:
                act()

    def look_after(self, state: State, wait: bool = False) -> None:
        busy, failures = self._background.busy, self.failures
        super().look_after(state, wait)
        if busy and not self._background.busy:
            self._run_afterwards(self.failures <= failures)

    def take(self, state: State, unit: Any) -> tuple[Snapshot, dict[str, Any]]:
        taken, facts = contents.take(state, unit, self._planned, None, self._frozen)
        metric = self.path.metric_data
        return taken, {**facts, "metrics": {metric.name: metric.value} if metric is not None else {}}


def _step_of(name: str) -> int | None:
    """The step in the name of a training checkpoint; None for any other name."""
    try:
        return CheckpointPath.from_str(f"./{name}").step.get(Phase.TRAIN)
    except ValueError:
        return None


def _is_theirs(path: Location) -> bool:
    """Whether TorchTNT wrote the checkpoint, as rank 0 sees it. Collective."""
    return commit.on_rank0(lambda: (path / ".metadata").exists() and not (path / manifest.MANIFEST).exists(), path)


def _refuse_theirs(path: Location) -> None:
    if _is_theirs(path):
        raise NotHereError(
            f"{path} was written by TorchTNT, whose format is not part of echelon.compat. Instead: `python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE` makes a file of it for torch.load, whose "
            "['app_state'] has the states of the unit's attributes for their load_state_dict. Save to another folder."
        )


class TorchSnapshotSaver(DistributedCheckpointSaver):
    """torchsnapshot is no longer maintained, so this saves as DistributedCheckpointSaver does, and says so once.

    Snapshots that torchsnapshot has written cannot be read.
    """

    _told = False

    def __init__(
        self,
        dirpath: str | Path,
        *,
        async_checkpoint: bool = True,
        replicated: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if not TorchSnapshotSaver._told and agree.is_rank0():
            TorchSnapshotSaver._told = True
            logger.warning(
                "TorchSnapshotSaver saves in the format of DistributedCheckpointSaver: torchsnapshot is not maintained"
            )
        without_effect("TorchSnapshotSaver", replicated=replicated, storage_options=storage_options)
        super().__init__(dirpath, async_checkpoint=async_checkpoint, **options)
