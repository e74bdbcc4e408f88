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
from echelon.loop.checkpointing.options import RestoreOptions, SaveOptions, check_group
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


_NOW = {"save_every_n_train_steps": "save_every_n_updates"}


class DistributedCheckpointSaver(Callback):
    """Saves modules, optimizers, schedulers, progress, the loader's position, RNG states and other Statefuls.

    A checkpoint is the folder `dirpath/step-NNNNNNNN`, complete or absent, whichever process is killed at whatever time. Its
    parameters and optimizer state are keyed by name, so it can be restored under another layout and number of ranks. The end of
    training is always saved. Only one live run may write into a folder.

    Args:
        dirpath: a folder, the same on all ranks, on storage that all ranks can reach; or an fsspec URL such as "s3://bucket/run".
        save_every_n_updates, save_every_n_epochs, save_every_n_eval_steps, save_every_n_eval_epochs: None is never. A save that
            is due within an evaluation comes at its end.
        keep_last_n_checkpoints: after each save, remove older checkpoints, or with `best_checkpoint_config` worse ones; None
            keeps all. The newest is always kept.
        best_checkpoint_config: which number of the unit is saved with each checkpoint, and what "best" means.
        async_checkpoint: stop the loop only to copy the state to host memory; a thread writes it. Costs that memory.
        options: further options: a SaveOptions.
        process_group: as in TorchTNT: None or a group of all ranks, because all ranks take part in each save.
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
        save_every_n_updates = translated("DistributedCheckpointSaver", older, _NOW, own)["save_every_n_updates"]
        check_group(process_group)
        flags(async_checkpoint=async_checkpoint, kind=CheckpointOptionError)
        self.options = options = options if options is not None else SaveOptions()
        require(isinstance(options, SaveOptions), "options", "a SaveOptions", options, kind=CheckpointOptionError)
        self._older = older
        self.every = Every(save_every_n_updates, save_every_n_epochs, save_every_n_eval_steps, save_every_n_eval_epochs)
        self.best, self.async_checkpoint = best_checkpoint_config, async_checkpoint
        keep = Keep(keep_last_n_checkpoints, options.keep_every_n_updates, best_checkpoint_config)
        self.folder = RunFolder(location(dirpath), keep, restart=options.restart)
        # Failed saves in a row; seconds for which the latest asynchronous save stopped the loop.
        self.failures, self.stall_s = 0, 0.0
        self.timetable: Timetable | None = None  # for saves by the clock
        self.insists = False  # refuse a run whose evaluations do not log the number that decides the best checkpoint
        # Whether a save is due; updates at the latest check; updates when training began.
        self._due, self._looked_at, self._began_at = False, 0, 0
        self._planned = Planned()
        self._frozen = Frozen() if options.only_trained else None
        self._background = Background(self.folder.retire)
        self._buffers = Buffers()
        self._pending = (0, "", 0.0)  # the running asynchronous save: its step, its folder's name, and when it began

    @property
    def dirpath(self) -> Location:
        return self.folder.path

    # --- when to save

    def on_train_start(self, state: State, unit: TrainedUnit) -> None:
        if self._older and state.train_state is not None:
            refuse_steps("DistributedCheckpointSaver", self._older, _NOW, accumulation_of(unit, state.train_state.dataloader))
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
        # Not by updates % every: this hook does not see updates that are skipped after a rollback.
        self._due = self._due or (every is not None and updates // every > before // every)
        if self.timetable is not None and unit.at_boundary and self.timetable.is_due():
            self._due = True
        if self._due and unit.at_boundary:
            # If the epoch ends with this step, a save waits for that, so that any loader continues with the next epoch.
            if state.train_state is None or not state.train_state.ends_epoch(unit.train_progress):
                self._save(state, unit)
        elif self.async_checkpoint and unit.at_boundary:
            contents.prepare(unit, self._planned, self._frozen, self._buffers)

    def on_train_epoch_end(self, state: State, unit: TrainedUnit) -> None:
        if self._frozen is not None:
            self._frozen.look(unit)
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
        if self._due and unit.at_boundary:  # else the next step that ends a window saves
            self._save(state, unit)

    def on_train_end(self, state: State, unit: TrainedUnit) -> None:
        try:
            self.look_after(state, wait=True)
            self.save(state, unit)
        finally:
            self._release()
        self._tell_best(state)
        trained = _step(unit) != self._began_at and not state.should_stop
        # All is saved by now, so an error loses nothing.
        if self.insists and self.best is not None and state.eval_state is None and trained:
            self.check_best(state, unit)
        # A loop that counts its epochs itself may evaluate after each of its runs.
        in_epochs = monitored.is_own_loop(unit) and state.train_state is not None and state.train_state.has_limit
        if self.best is not None and in_epochs and trained and state.logged.evaluated_at is None and agree.is_rank0():
            name = self.best.monitored_metric
            logger.warning(
                "no checkpoint of this run is the best by %s, because no evaluation has logged it. Call evaluation.log(%r, ...) "
                "in `with echelon.evaluating(model) as evaluation`",
                name,
                name.removeprefix("eval_"),
            )

    def _tell_best(self, state: State) -> None:
        """Report the best checkpoint at the end. On rank 0 only, so that an error in reading must not be raised."""
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
            raise CheckpointOptionError(f"best must be the name of a logged number{also}, got {name!r}: {error}.") from None

    def on_exception(self, state: State, unit: Unit, exc: BaseException) -> None:
        if self._background.abandon():  # the save has ended since the latest step, so it is not reported yet
            step, name, began = self._pending
            self._saved(state, step, name, time.perf_counter() - began, pause=False)
        self._release()

    # --- saving

    def ask(self) -> None:
        """Save at the end of the current step, or of its epoch. All ranks must call it."""
        self._due = True

    def has_saved(self, step: int) -> bool:
        """Whether the folder has a checkpoint of this many updates. Not collective."""
        with contextlib.suppress(CheckpointError, OSError):
            return manifest.is_whole(self.dirpath / manifest.named(step))
        return False

    def note_evaluated(self, state: State, unit: TrainedUnit, step: int) -> None:
        """Add the number of an evaluation outside a run to the checkpoint of this step. Collective."""
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
        """Save during training; if the storage fails, training continues without the checkpoint."""
        self._due = self.best is not None and not state.should_stop and contents.is_unevaluated(state, unit)
        if self._due:
            return  # save after the evaluation, with its number
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
        """Save now and wait for the save; None if this step is saved already. Collective.

        Raises:
            CheckpointError: on all ranks, if one of them could not write its part.
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
            except Exception as error:  # object stores' libraries raise errors of any class
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
        """The current step, and the name of its checkpoint's folder."""
        return (step := _step(unit)), manifest.named(step)

    def take(self, state: State, unit: TrainedUnit) -> tuple[Snapshot, dict[str, Any]]:
        """Snapshot of the current state, and further facts for its manifest. Collective."""
        taken, facts = contents.take(state, unit, self._planned, self.best, self._frozen)
        return taken, {**facts, "keep": self.folder.keep.count}

    def _note_metrics(self, state: State, unit: TrainedUnit, step: int) -> None:
        """Add the number to a checkpoint that was saved for a signal, once the resumed run has done the step's evaluation."""
        if self.best is None or contents.is_unevaluated(state, unit):
            return
        if metrics := contents.monitored(self.best.monitored_metric, state, unit):
            self.note(step, metrics)

    def note(self, step: int, metrics: dict[str, float]) -> None:
        """Add a number to a checkpoint that is saved already. Collective."""
        path = self.dirpath / manifest.named(step)

        def note() -> None:
            commit.note_metrics(path, metrics)
            self.folder.retire(path)

        commit.on_rank0(note, self.dirpath)

    def _start(self, state: State, unit: TrainedUnit) -> None:
        """Start an asynchronous save. The loop stops for this part."""
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
        """Wait for a running save, and forget one that is due. Collective."""
        self.look_after(state, wait=True)
        self._due = False

    # --- after an asynchronous save, and when one fails

    @in_checkpoint()
    def look_after(self, state: State, wait: bool = False) -> None:
        """At a step's end, if an asynchronous save is running: find out whether it has ended, and handle a failure."""
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
            self.timetable.saved(0.0)  # the next try is when the next save is due
        state.event("checkpoint_failed", step=step, error=text)
        if self.failures > self.options.tolerated_failures:
            failures = "the first failure" if self.failures == 1 else f"{self.failures} failures in a row"
            raise CheckpointWriteError(
                f"update {step} could not be saved, {failures}: {text}. Older checkpoints are unchanged."
            ) from cause
        logger.error("update %s could not be saved, training goes on: %s. Older checkpoints are unchanged.", step, text)

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
        """Restore a unit, and the loader if given, to a checkpoint. Collective.

        RNG states and each rank's share of metrics are restored only if the number of ranks is the same as at the save. A file of
        weights (`.safetensors`, `.pt`), or a folder with `model.safetensors.index.json`, restores the unit's one module.

        Returns:
            a report of what a load that is not strict left alone; it is also logged.
        Raises:
            CheckpointNotFoundError: there is no checkpoint at `path`.
            CheckpointUnreadableError: it exists, but cannot be read.
            CheckpointCorruptError: it can be read, but is damaged.
            CheckpointMismatchError: it does not fit the unit, or is of another run; with a table.
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
        """Restore the newest valid checkpoint. False if there is none, under `run --restart`, and under `prove`. Collective.

        Args:
            fall_back: if the newest is corrupt, warn and take the newest older one that is valid; False makes it an error. If all
                are corrupt, that is always an error: a run with progress never starts over by itself.
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
        """Like `restore_from_latest`, but restore the checkpoint with the best value of a metric; False if none has it."""
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


def _step(unit: TrainedUnit) -> int:
    return unit.train_progress.num_updates_completed


# --- when a save is due by the clock, without a message in every update
#
# Ranks' clocks differ, so only rank 0's clock counts, and it is read only after updates whose number all ranks know. Each reading
# decides at which update the next one is, from the time that updates took. Readings come closer together as the save comes near,
# about ten for each save.


_CHEAP_S = 1.0  # the cost of shorter saves is ignored
_NEAR = 4  # a guess of up to this many updates is trusted; if it is more, the next reading is half way


class Timetable:
    """
    Args:
        every_s: seconds between two saves.
        share: largest share of the time that saves may take; costly saves are delayed for it. None is no limit.
        now: rank 0's clock.
    """

    def __init__(self, every_s: float, share: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._share, self._now = every_s, share, now
        self._cost_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Training begins, or goes on after something else."""
        self._saved_at = self._looked_at = self._now()
        # Updates since the latest save; how many of these at the latest reading; updates since the beginning.
        self._updates = self._at_look = self._all = 0
        self._next = 1

    def saved(self, cost_s: float) -> None:
        """A save, for any reason, has stopped the loop for `cost_s` seconds; on all ranks at the same update."""
        self._cost_s = cost_s
        self._saved_at = self._looked_at = self._now()
        # Next reading after half as many updates as before this save.
        self._updates, self._at_look, self._next = 0, 0, max(1, self._updates // 2)

    def is_due(self) -> bool:
        """Whether a save is due. Call it after every update; collective at some of them."""
        self._updates += 1
        self._all += 1
        if self._updates < self._next:
            return False
        wait = agree.from_rank0(self._look)
        self._next = self._updates + wait
        return not wait

    def affords_one(self) -> bool:
        """Whether a save that is due for another reason would stay within `share`. Collective."""
        share = self._share
        if share is None:
            return True
        return agree.from_rank0(lambda: self._cost_s < max(_CHEAP_S, share * (self._now() - self._saved_at)))

    def _look(self) -> int:
        """Number of updates until the next reading; 0 if a save is due."""
        now = self._now()
        pace = (now - self._looked_at) / max(1, self._updates - self._at_look)
        every = self._every_s if self._share is None else max(self._every_s, self._cost_s / self._share)
        left = every - (now - self._saved_at)
        self._looked_at, self._at_look = now, self._updates
        if left <= pace / 2:
            return 0
        updates = left / pace if pace > 0 else math.inf
        # Look ahead by at most as many updates as were measured: the first ones compile and are slow.
        return max(1, int(min(updates if updates <= _NEAR else updates / 2, self._all)))
