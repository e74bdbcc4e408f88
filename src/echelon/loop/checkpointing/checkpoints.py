"""`Checkpoints`: the folder of a run's checkpoints, when to save there, and what to keep, as one value."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from echelon.checkpoint.location import location
from echelon.checkpoint.policy import BestCheckpointConfig, Keep
from echelon.common.arguments import Given, options_of
from echelon.common.errors import CheckpointOptionError, UsageError
from echelon.contracts.overrides import overrides
from echelon.launcher.job import parse_duration
from echelon.loop.checkpointing.options import RestoreOptions, SaveOptions
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver, Timetable
from echelon.loop.records.monitored import mode_of
from echelon.loop.unit import TrainedUnit

__all__ = ["Checkpoints", "saver_of", "take_up"]

_given = Given(CheckpointOptionError)

_EVERY_S, _SHARE = 600.0, 0.05  # defaults


@dataclass(frozen=True)
class Checkpoints:
    """Where and when a run is saved, and which checkpoints are kept. A path alone means `Checkpoints(path)`.

    Before training, the newest checkpoint there is restored, if there is one and the unit has not trained yet. The run is saved
    when a save is due, when a signal stops the run, and always at the end.

    Args:
        folder: the same on all ranks, on storage that all ranks can reach; or an fsspec URL such as "s3://bucket/run". Only one
            live run may write there.
        every: a number of updates; "epoch"; or a duration by rank 0's clock, such as "30min". Default: about every ten minutes,
            but less often if saving would take more than a twentieth of the time; a user's own loop is also saved at each epoch's
            end, because its `break` gives no notice.
        keep: keep the newest n checkpoints, and the best. None keeps all. Checkpoints of a run that kept all are not removed.
        best: name of a number that evaluations log, or of an attribute of the unit: a checkpoint is saved after every evaluation,
            and the best one is kept. A pair says what is better, `("reward", "max")`; with "accuracy", "loss" and similar names,
            the name is enough.
        asynchronous: stop the loop only to copy the state to host memory; a thread writes it. Costs that memory.
        save_options: further options: a SaveOptions.
        restore_options: what to take from the newest checkpoint: a RestoreOptions.
    Raises:
        UsageError: an invalid value.
    """

    folder: str | Path
    _: KW_ONLY
    every: int | str | None = None
    keep: int | None = 3
    best: str | tuple[str, Literal["min", "max"]] | None = None
    asynchronous: bool = False
    save_options: SaveOptions | None = None
    restore_options: RestoreOptions | None = None

    def __post_init__(self) -> None:
        location(self.folder, "folder")
        _given.flags_of(self)
        options_of(SaveOptions, "save_options", self.save_options, kind=CheckpointOptionError)
        options_of(RestoreOptions, "restore_options", self.restore_options, kind=CheckpointOptionError)
        if self.keep is not None:
            object.__setattr__(self, "keep", _given.whole("keep", self.keep, at_least=1, or_none="for all"))
        if isinstance(self.every, str):
            self._seconds()
        elif self.every is not None:
            object.__setattr__(
                self, "every", _given.whole("every", self.every, at_least=1, or_none="for about every ten minutes")
            )
        self._best()

    def _seconds(self) -> float | None:
        """The duration, if `every` is one."""
        if not isinstance(self.every, str) or self.every == "epoch":
            return None
        try:
            return parse_duration(self.every, "every")
        except UsageError:
            raise CheckpointOptionError(
                f"every must be a number of updates, 'epoch', or a duration such as '10min' or '1h', got {self.every!r}."
            ) from None

    def _best(self) -> BestCheckpointConfig | None:
        if self.best is None:
            return None
        is_pair = isinstance(self.best, (tuple, list)) and len(self.best) == 2
        name, mode = (self.best, None) if isinstance(self.best, str) else tuple(self.best) if is_pair else ("", None)
        wanted = "the name of a number, or a pair of it and 'min' or 'max'"
        _given.require(isinstance(name, str) and name != "", "best", wanted, self.best)
        if (checked_mode := mode_of(name, mode, kind=CheckpointOptionError)) is None:
            raise CheckpointOptionError(
                f"best must be a pair such as ({name!r}, 'max'), got {self.best!r}, whose name does not tell what is better."
            )
        return BestCheckpointConfig(name, checked_mode)

    def saver(self, *, own_loop: bool = False) -> DistributedCheckpointSaver:
        """Make the callback that saves.

        Args:
            own_loop: for a user's own loop, which may be left without notice, and evaluates at any time.
        """
        best, seconds = self._best(), self._seconds()
        made = DistributedCheckpointSaver(
            self.folder,
            save_every_n_updates=self.every if isinstance(self.every, int) else None,
            save_every_n_epochs=1 if self.every == "epoch" or (own_loop and self.every is None) else None,
            save_every_n_eval_epochs=1 if best is not None else None,
            best_checkpoint_config=best,
            async_checkpoint=self.asynchronous,
            options=self.save_options,
        )
        made.folder.keep = Keep(self.keep, made.options.keep_every_n_updates, best, spares_kept=True, newest=True)
        if self.every is None:
            made.timetable = Timetable(_EVERY_S, _SHARE)
        elif seconds is not None:
            made.timetable = Timetable(seconds)
        made.insists = not own_loop
        return made


def saver_of(checkpoints: Any, *, own_loop: bool = False) -> DistributedCheckpointSaver:
    """The saver for any value of `checkpoints=`; see `Checkpoints.saver`.

    Raises:
        UsageError: the value is not allowed.
    """
    if isinstance(checkpoints, DistributedCheckpointSaver):
        return checkpoints
    if isinstance(checkpoints, Checkpoints):
        return checkpoints.saver(own_loop=own_loop)
    is_folder = isinstance(checkpoints, (str, os.PathLike)) and str(checkpoints) != ""
    _given.require(is_folder, "checkpoints", "a folder, a Checkpoints(folder, ...) or a DistributedCheckpointSaver", checkpoints)
    return Checkpoints(checkpoints).saver(own_loop=own_loop)


def take_up(checkpoints: Any, saver: DistributedCheckpointSaver, unit: Any, loader: Iterable[Any]) -> bool:
    """Restore the newest checkpoint, if the unit has not trained yet. Collective.

    A unit that has trained continues from where it stands; the saver refuses a folder that is ahead of it.
    """
    if overrides().observes or not isinstance(unit, TrainedUnit) or unit.train_progress.num_steps_completed:
        return False
    options = checkpoints.restore_options if isinstance(checkpoints, Checkpoints) else None
    folder = str(saver.dirpath)
    return DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=loader, restore_options=options)
