"""The checkpoint saver: saves a unit's whole state while it trains, and restores it at any number of ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from echelon.checkpoint import commit, manifest
from echelon.checkpoint.background import Background
from echelon.checkpoint.buffers import Buffers
from echelon.checkpoint.location import Location, Remote, explain_for_rank, location
from echelon.checkpoint.policy import BestCheckpointConfig, Every, Keep
from echelon.checkpoint.snapshot import Planned, Snapshot
from echelon.checkpoint.store import Report
from echelon.common.arguments import flags, options_of
from echelon.common.errors import CheckpointError, CheckpointOptionError, CheckpointWriteError, require
from echelon.common.older_words import translated
from echelon.loop.callback import Callback
from echelon.loop.checkpointing import contents, restoring
from echelon.loop.checkpointing.folder import RunFolder, left_alone
from echelon.loop.checkpointing.frozen import Frozen
from echelon.loop.checkpointing.options import OLDER, RestoreOptions, SaveOptions, check_group
from echelon.loop.records import monitored
from echelon.loop.unit import TrainedUnit, Unit
from echelon.loop.validate import accumulation_of, refuse_steps
from echelon.world import agree
from echelon.world.clock import in_checkpoint

if TYPE_CHECKING:
    import torch.distributed as dist

    from echelon.loop.state import State

__all__ = ["BestCheckpointConfig", "DistributedCheckpointSaver", "RestoreOptions", "Timetable"]

logger = logging.getLogger(__name__)


class _Older(TypedDict, total=False):
    save_every_n_train_steps: int | None


class DistributedCheckpointSaver(Callback):
    """Saves modules, optimizers, schedulers, progress, the loader's position, RNGs and other Statefuls.

    A checkpoint is the folder `dirpath/step-NNNNNNNN`, complete or absent, whatever is killed when. Its parameters and
    optimizer state are keyed by name, so it can be restored under another layout and number of ranks. The end of training
    is always saved. One live run may write into a folder.

    Args:
        dirpath: a folder, the same on all ranks, on storage that all can reach; or an fsspec URL such as "s3://bucket/run".
        save_every_n_updates, save_every_n_epochs, save_every_n_eval_steps, save_every_n_eval_epochs: None is never. In an
            evaluation the save waits for its end.
        keep_last_n_checkpoints: remove older ones after each save, or with `best_checkpoint_config` those that are less good;
            None keeps all. The newest always stays.
        best_checkpoint_config: which number of the unit is written down with each checkpoint, and what "best" means.
        async_checkpoint: the loop stops only to copy the state to host memory; a thread writes. Costs that memory.
        options: what else: a SaveOptions.
        process_group: as in TorchTNT: None or a group of all ranks, since all of them take part in each save.
        older: `save_every_n_train_steps`, which counted micro-batches.
    """

    may_stop, saves, meets = False, True, True

    def __init__(
        self,
        dirpath: str | Path,
        *,
        save_every_n_updates: int | None = None,
        save_every_n_epochs: int | None = None,
        save_every_n_eval_steps: int | None = None,
        save_every_n_eval_epochs: int | None = None,
        keep_last_n_checkpoints: int | None = None,
        best_checkpoint_config: BestCheckpointConfig | None = None,
        async_checkpoint: bool = False,
        options: SaveOptions | None = None,
        process_group: dist.ProcessGroup | None = None,
        **older: Unpack[_Older],
    ) -> None:
        own = {"save_every_n_updates": save_every_n_updates}
        save_every_n_updates = translated("DistributedCheckpointSaver", older, OLDER, own)["save_every_n_updates"]
        check_group(process_group)
        flags(async_checkpoint=async_checkpoint, kind=CheckpointOptionError)
        self.options = options = options if options is not None else SaveOptions()
        require(isinstance(options, SaveOptions), "options", "a SaveOptions", options, kind=CheckpointOptionError)
        self._in_steps = {**older, **options.in_steps}
        self.every = Every(save_every_n_updates, save_every_n_epochs, save_every_n_eval_steps, save_every_n_eval_epochs)
        self.best, self.async_checkpoint = best_checkpoint_config, async_checkpoint
        keep = Keep(keep_last_n_checkpoints, options.keep_every_n_updates, best_checkpoint_config)
        self.folder = RunFolder(location(dirpath), keep, restart=options.restart)
        self.failures, self.stall_s = 0, 0.0  # in a row; for which the loop stopped for the latest asynchronous save
        self.timetable: Timetable | None = None  # by the clock
        self.insists = False  # on the name of the best one's number
        self._due, self._looked_at, self._began_at = False, 0, 0  # a save, and the step at which it was last asked
        self._planned = Planned()
        self._frozen = Frozen() if options.only_trained else None
        self._background = Background(self.folder.retire)
        self._buffers = Buffers()
        self._pending = (0, "", 0.0)  # of the save under way: its step, its folder's name, and when it began

    @property
    def dirpath(self) -> Location:
        return self.folder.path

    # --- when

    def on_train_start(self, state: State, unit: TrainedUnit) -> None:
        if self._in_steps and state.train_state is not None:
            refuse_steps("DistributedCheckpointSaver", self._in_steps, OLDER, accumulation_of(unit, state.train_state.dataloader))
        self.folder.take_over(unit, state)
        self._looked_at = self._began_at = _step(unit)
        if self.timetable is not None:
            self.timetable.begin()
        if self._frozen is not None:
            self._frozen.begin(unit)
        for prepared in unit.prepared_modules().values():
            prepared.extras.keep()

    def on_train_step_end(self, state: State, unit: TrainedUnit) -> None:
        every, updates, before = self.every.updates, _step(unit), self._looked_at
        self._looked_at = updates
        if self._background.busy:
            self.look_after(state)
        # Not by updates % every: one that is left out after a rollback comes by unseen.
        self._due = self._due or (every is not None and updates // every > before // every)
        if self.timetable is not None and unit.at_boundary and self.timetable.is_due():
            self._due = True
        if self._due and unit.at_boundary and not _ends_epoch(state, unit):
            self._save(state, unit)
        elif self.async_checkpoint and unit.at_boundary:
            contents.prepare(unit, self._planned, self._frozen, self._buffers)

    def on_train_epoch_end(self, state: State, unit: TrainedUnit) -> None:
        every = self.every.epochs
        is_due = every is not None and unit.train_progress.num_epochs_completed % every == 0
        if self._due or (is_due and (self.timetable is None or self.timetable.affords_one())):
            self._save(state, unit)

    def on_eval_step_end(self, state: State, unit: Any) -> None:
        every = self.every.eval_steps
        if every is not None and isinstance(unit, TrainedUnit) and unit.eval_progress.num_steps_completed % every == 0:  # type: ignore[attr-defined]
            self._due = True

    def on_eval_end(self, state: State, unit: Any) -> None:
        if not isinstance(unit, TrainedUnit) or state.train_state is None:
            return
        if self.insists and self.best is not None and not contents.is_unevaluated(state, unit):
            self.check_best(state, unit)
        every = self.every.eval_epochs
        self._due = self._due or (every is not None and unit.eval_progress.num_epochs_completed % every == 0)  # type: ignore[attr-defined]
        if self._due and unit.at_boundary:  # else at the next step that ends a window
            self._save(state, unit)

    def on_train_end(self, state: State, unit: TrainedUnit) -> None:
        try:
            self.look_after(state, wait=True)
            self.save(state, unit)
        finally:
            self._release()
        self._tell_best(state)
        trained = _step(unit) != self._began_at and not state.should_stop
        if self.insists and self.best is not None and state.eval_state is None and trained:  # nothing is lost by an error now
            self.check_best(state, unit)
        # A loop that counts its epochs itself may evaluate behind each of its runs.
        in_epochs = monitored.is_own_loop(unit) and state.train_state is not None and state.train_state.has_limit
        if self.best is not None and in_epochs and trained and state.logged.evaluated_at is None and agree.is_rank0():
            name = self.best.monitored_metric
            logger.warning(
                "no checkpoint of this run is the best by %s, which no evaluation has logged. Call evaluation.log(%r, ...) in "
                "`with echelon.evaluating(model) as evaluation`",
                name,
                name.removeprefix("eval_"),
            )

    def _tell_best(self, state: State) -> None:
        """Which one it is: at the end, and rank 0 alone, whose reading has to fail without the others."""
        with contextlib.suppress(CheckpointError, OSError):
            if self.best is not None and (state.recorder or state.notes) and (best := self.folder.find_best()) is not None:
                path, value = best
                state.event("best_checkpoint", path=str(path), name=self.best.monitored_metric, value=value)

    def check_best(self, state: State, unit: TrainedUnit) -> None:
        """
        Raises:
            UsageError: on all ranks: there is no number of that name.
        """
        assert self.best is not None
        name = self.best.monitored_metric
        try:
            monitored.number(name, state, unit, "eval")
        except monitored.Unknown as error:
            also = "" if monitored.is_own_loop(unit) else ", or of an attribute of the unit"
            raise CheckpointOptionError(
                f"best must be the name of a number that is logged{also}, got {name!r}: {error}."
            ) from None

    def on_exception(self, state: State, unit: Unit, exc: BaseException) -> None:
        if self._background.abandon():  # since the latest step, at whose end the ranks would have heard of it
            step, name, began = self._pending
            self._saved(state, step, name, time.perf_counter() - began, pause=False)
        self._release()

    # --- saving

    def ask(self) -> None:
        """Save at the end of the step under way, or of its epoch. On all ranks."""
        self._due = True

    def has_saved(self, step: int) -> bool:
        """Whether the folder has a checkpoint of this many updates. For a rank alone."""
        with contextlib.suppress(CheckpointError, OSError):
            return manifest.is_whole(self.dirpath / manifest.named(step))
        return False

    def note_evaluated(self, state: State, unit: TrainedUnit, step: int) -> None:
        """What was saved at this step has been evaluated since, outside of a run. Collective."""
        if not commit.is_saved(self.dirpath, step):
            return
        self.folder.take()
        try:
            self._note_metrics(state, unit, step)
        finally:
            self._release()

    def _release(self) -> None:
        if not self._background.busy:
            self._buffers.clear()
        self.folder.release()

    @in_checkpoint()
    def _save(self, state: State, unit: TrainedUnit) -> None:
        """Save in the middle of training; if the storage fails, training continues without."""
        self._due = self.best is not None and not state.should_stop and contents.is_unevaluated(state, unit)
        if self._due:
            return  # so that the number that is written down is of these weights
        if self._background.busy:
            if self.options.on_busy == "skip":
                logger.warning("update %s is not saved: the save before it is still being written", self.place(unit)[0])
                return
            self.look_after(state, wait=True)
        try:
            if self.async_checkpoint:
                self._start(state, unit)
            elif self.save(state, unit) is not None:
                self.failures = 0
        except CheckpointWriteError as error:
            self._failed(state, self.place(unit)[0], str(error), error)

    @in_checkpoint()
    def save(self, state: State, unit: TrainedUnit) -> Location | None:
        """Save now and wait for it; None if this step is saved already. Collective.

        Raises:
            CheckpointError: on all ranks, if one could not write its part.
        """
        self._due = False
        self.look_after(state, wait=True)
        began, held, (step, name) = time.perf_counter(), self.folder.held, self.place(unit)
        if not held and commit.is_saved(self.dirpath, step, name):
            return None
        self.folder.take()
        try:
            staged = commit.stage(self.dirpath, step, name)
            if staged is None:
                self._note_metrics(state, unit, step)
                return None
            taken, facts = self.take(state, unit)
            problem, files = None, {}
            try:
                files = taken.write(staged)
            except Exception as error:  # libraries of object stores have errors of their own
                problem = explain_for_rank(taken.rank, error, staged)
            try:
                agree.raise_on_all(problem, CheckpointWriteError)
                path = commit.publish(staged, step, files, facts, name)
            except CheckpointWriteError:
                commit.on_rank0(lambda: commit.discard(staged))
                raise
            commit.on_rank0(lambda: self.folder.retire(path))
        finally:
            if not held:
                self._release()
        seconds = time.perf_counter() - began
        if self.timetable is not None:
            self.timetable.saved(seconds)
        self._saved(state, step, name, seconds)
        return path

    def place(self, unit: TrainedUnit) -> tuple[int, str]:
        """The step of the state as it is now, and the name of its folder."""
        return (step := _step(unit)), manifest.named(step)

    def take(self, state: State, unit: TrainedUnit) -> tuple[Snapshot, dict[str, Any]]:
        """What is saved of the state as it is now, and what its manifest says besides. Collective."""
        taken, facts = contents.take(state, unit, self._planned, self.best, self._frozen)
        return taken, {**facts, "keep": self.folder.keep.count}

    def _note_metrics(self, state: State, unit: TrainedUnit, step: int) -> None:
        """A step was saved as a signal came, and its evaluation was made by the run that resumed: now the number is known."""
        if self.best is None or contents.is_unevaluated(state, unit):
            return
        if metrics := contents.monitored(self.best.monitored_metric, state, unit):
            self.note(step, metrics)

    def note(self, step: int, metrics: dict[str, float]) -> None:
        """The number of a checkpoint that is saved already. Collective."""
        path = self.dirpath / manifest.named(step)

        def note() -> None:
            commit.note_metrics(path, metrics)
            self.folder.retire(path)

        commit.on_rank0(note, self.dirpath)

    def _start(self, state: State, unit: TrainedUnit) -> None:
        """The part of an asynchronous save for which the loop stops."""
        began, (step, name) = time.perf_counter(), self.place(unit)
        staged = commit.stage(self.dirpath, step, name)
        if staged is None:
            self._note_metrics(state, unit, step)
            return
        taken, facts = self.take(state, unit)
        self._pending = (step, name, began)
        self._background.start(staged, step, taken, taken.copy(self._buffers), facts["config"]["world_size"], facts, name)
        self.stall_s = time.perf_counter() - began
        if self.timetable is not None:
            self.timetable.saved(self.stall_s)
        state.event("checkpoint_started", step=step, stall_s=self.stall_s)
        if state.recorder is not None:
            state.recorder.pause_clock()

    def settle(self, state: State) -> None:
        """Wait for a save under way, and forget one that is due. Collective."""
        self.look_after(state, wait=True)
        self._due = False

    # --- after an asynchronous save, and when one fails

    @in_checkpoint()
    def look_after(self, state: State, wait: bool = False) -> None:
        """At a step's end while a save is under way: has it ended, and how?"""
        if not self._background.busy:
            return
        ended, failure = (True, self._background.wait()) if wait else self._background.poll()
        if not ended:
            return
        step, name, began = self._pending
        if failure is not None:
            self._failed(state, step, failure, None)
        else:
            self.failures = 0
            self._saved(state, step, name, time.perf_counter() - began, pause=False)

    def _failed(self, state: State, step: int, text: str, cause: BaseException | None) -> None:
        """Report a failed save on every rank and continue; too many in a row end the run."""
        self.failures += 1
        if self.timetable is not None:
            self.timetable.saved(0.0)  # and tried again when the next is due
        state.event("checkpoint_failed", step=step, error=text)
        if self.failures > self.options.tolerated_failures:
            failures = "the first failure" if self.failures == 1 else f"{self.failures} failures in a row"
            raise CheckpointWriteError(
                f"update {step} could not be saved, {failures}: {text}. Older checkpoints are as they were."
            ) from cause
        logger.error("update %s could not be saved, training goes on: %s. Older checkpoints are as they were.", step, text)

    def _saved(self, state: State, step: int, name: str, seconds: float, pause: bool = True) -> None:
        state.event("checkpoint_saved", path=str(self.dirpath / name), step=step, seconds=seconds)
        if state.recorder is not None and pause:
            state.recorder.pause_clock()

    # --- restoring

    @staticmethod
    def restore(
        path: str | Path | Remote,
        unit: Unit,
        *,
        train_dataloader: Iterable[Any] | None = None,
        restore_options: RestoreOptions | None = None,
    ) -> Report:
        """Put a unit, and the loader if given, back to a checkpoint. Collective.

        Random streams, and each rank's share of metrics, are restored if as many ranks run as had saved. A file of weights
        (`.safetensors`, `.pt`), or a folder with `model.safetensors.index.json`, restores the unit's one module.

        Returns:
            what a load that is not strict left alone; it is also logged.
        Raises:
            CheckpointNotFoundError, CheckpointUnreadableError, CheckpointCorruptError: three different answers.
            CheckpointMismatchError: it does not fit the unit, or another run was saved; with a table.
        """
        options = options_of(RestoreOptions, "restore_options", restore_options, kind=CheckpointOptionError)
        return restoring.restore(location(path, "path"), unit, train_dataloader, options)

    @staticmethod
    def restore_from_latest(
        dirpath: str | Path,
        unit: Unit,
        *,
        train_dataloader: Iterable[Any] | None = None,
        restore_options: RestoreOptions | None = None,
        fall_back: bool = True,
    ) -> bool:
        """Restore the newest valid checkpoint; False if there is none, under `run --restart`, and under `prove`. Collective.

        Args:
            fall_back: when the newest is corrupt, say what is wrong with it and take the newest older one that is not; False
                makes it an error. If all are corrupt it is an error in any case: a run with progress never starts over by itself.
        """
        folder = location(dirpath)
        options = options_of(RestoreOptions, "restore_options", restore_options, kind=CheckpointOptionError)
        if left_alone(folder):
            return False
        return restoring.restore_first(folder, commit.candidates(folder), unit, train_dataloader, options, fall_back)

    @staticmethod
    def restore_from_best(
        dirpath: str | Path,
        unit: Unit,
        metric_name: str,
        mode: Literal["min", "max"] = "min",
        *,
        train_dataloader: Iterable[Any] | None = None,
        restore_options: RestoreOptions | None = None,
        fall_back: bool = True,
    ) -> bool:
        """As `restore_from_latest`, of the checkpoints that have the metric the best; False if none has it."""
        folder = location(dirpath)
        options = options_of(RestoreOptions, "restore_options", restore_options, kind=CheckpointOptionError)
        best = BestCheckpointConfig(metric_name, mode)

        def names() -> list[str]:
            metrics = {commit.step_of(p): manifest.read(p).get("metrics", {}) for p in commit.committed(folder)}
            return [manifest.named(step) for step in best.best_first(metrics)]

        ordered = [folder / name for name in commit.on_rank0(names)]
        if not ordered:
            logger.warning("no checkpoint in %s has a metric %r: nothing is restored", folder, metric_name)
        return restoring.restore_first(folder, ordered, unit, train_dataloader, options, fall_back)


def _ends_epoch(state: State, unit: TrainedUnit) -> bool:
    """Whether the epoch ends with this step: saved after its end, any loader continues with the next one."""
    return state.train_state is not None and state.train_state.ends_epoch(unit.train_progress)


def _step(unit: TrainedUnit) -> int:
    return unit.train_progress.num_updates_completed


# --- when a save is due by the clock, without a message in every update
#
# Ranks' clocks differ, so rank 0's alone is looked at, and only after updates of which all ranks know the number: each look says
# when the next one is, from how long updates took. As the moment comes near the looks come closer, about ten for one save.


_CHEAP_S = 1.0  # of a save: nobody counts what so short ones cost
_NEAR = 4  # updates: a guess over so few is taken at its word, over more the next look is half way


class Timetable:
    """
    Args:
        every_s: seconds between two saves.
        share: of the time, that saves may take at most: with dear ones the next is later. None is any.
        now: rank 0's clock.
    """

    def __init__(self, every_s: float, share: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._share, self._now = every_s, share, now
        self._cost_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Training begins, or goes on after something else."""
        self._saved_at = self._looked_at = self._now()
        self._updates = self._at_look = self._all = 0  # since the latest save; of these, at the latest look; since the beginning
        self._next = 1

    def saved(self, cost_s: float) -> None:
        """A save began, for whatever reason, for which the loop stopped so long; on all ranks at the same update."""
        self._cost_s = cost_s
        self._saved_at = self._looked_at = self._now()
        # Not half way of what it was before the latest: that may have come early.
        self._updates, self._at_look, self._next = 0, 0, max(1, self._updates // 2)

    def is_due(self) -> bool:
        """Call it after every update. Collective now and then."""
        self._updates += 1
        self._all += 1
        if self._updates < self._next:
            return False
        wait = agree.from_rank0(self._look)
        self._next = self._updates + wait
        return not wait

    def affords_one(self) -> bool:
        """Whether a save for another reason than the clock's is worth its time now. Collective."""
        share = self._share
        if share is None:
            return True
        return agree.from_rank0(lambda: self._cost_s < max(_CHEAP_S, share * (self._now() - self._saved_at)))

    def _look(self) -> int:
        """How many updates until the next look; 0 if a save is due."""
        now = self._now()
        pace = (now - self._looked_at) / max(1, self._updates - self._at_look)
        every = self._every_s if self._share is None else max(self._every_s, self._cost_s / self._share)
        left = every - (now - self._saved_at)
        self._looked_at, self._at_look = now, self._updates
        if left <= pace / 2:
            return 0
        updates = left / pace if pace > 0 else math.inf
        # What was measured over few updates, the first of which compiles, says nothing of many.
        return max(1, int(min(updates if updates <= _NEAR else updates / 2, self._all)))
