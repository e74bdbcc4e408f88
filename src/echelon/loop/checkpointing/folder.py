"""The folder of a run's checkpoints: which run may write into it, which checkpoints must not be there, and which are kept."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from echelon.checkpoint import commit, manifest
from echelon.checkpoint.lease import Lease
from echelon.checkpoint.location import Location, absolute, make_folder
from echelon.checkpoint.policy import Keep
from echelon.common.errors import CheckpointCorruptError, CheckpointError, CheckpointWriteError
from echelon.contracts.overrides import overrides
from echelon.contracts.restart_notes import begins_anew, note_begun
from echelon.loop.unit import TrainedUnit
from echelon.world import agree

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["RunFolder", "is_begun_anew", "left_alone"]

logger = logging.getLogger(__name__)

# Folders in which this process has started over; checkpoints in them are its own since then.
_begun: set[str] = set()


def is_begun_anew(folder: Location) -> bool:
    """Whether the folder's checkpoints must be ignored, because the run was started with `--restart`."""
    return begins_anew() and str(folder) not in _begun


def left_alone(folder: Location) -> bool:
    """Whether nothing in the folder may be restored; logs why. `echelon prove` and `plan` start runs from their beginning."""
    anew = is_begun_anew(absolute(folder))
    if anew or overrides().observes:
        why = "--restart was given" if anew else "`echelon prove` and `plan` start a run from its beginning"
        logger.warning("%s: nothing in %s is restored", why, folder)
        return True
    return False


class RunFolder:
    """
    Args:
        path: the folder; made absolute, so that a later change of the working directory has no effect.
        keep: which checkpoints are kept.
        restart: set checkpoints aside that are ahead of the run.
    Attributes:
        held: this run holds the lease; the same on all ranks, though only rank 0 has the lease.
        counts: what the numbers in checkpoints' names count, for messages.
    """

    counts = "update"

    def __init__(self, path: Location, keep: Keep, *, restart: bool) -> None:
        self._given, self.path, self.keep, self.restart = str(path), absolute(path), keep, restart
        self.held = False
        self._lease = Lease(self.path)

    def take(self) -> None:
        """Take the lease, and remove what a killed run left. Collective.

        Raises:
            RanksDisagreeError: ranks have different folders, for example because its name contains the time.
        """

        def take() -> None:
            make_folder(self.path)
            if self._lease.acquire():
                commit.sweep(self.path)

        if not self.held:
            remedy = "All ranks write into one. If its name contains the time, let rank 0 or the launch command choose it."
            agree.same_on_all("the folder of checkpoints", self._given, remedy)
            commit.on_rank0(take, self.path)
            self.held = True

    def release(self) -> None:
        self.held = False
        self._lease.release()

    def take_over(self, unit: TrainedUnit, state: State) -> None:
        """Take the folder at the beginning of a run, and set aside checkpoints that must not be there. Collective, once in a run.

        For a run that is complete and saved, the folder may be read-only: there is nothing to write.
        """
        if self.held:
            return
        step, anew = self.now(unit), is_begun_anew(self.path)
        try:
            self.take()
        except CheckpointWriteError as error:
            phase_state = state.train_state
            if phase_state is None or not phase_state.is_complete(unit.train_progress) or not self.is_saved(step):
                raise
            logger.info("the run is complete, and its folder is left as it is: %s", error)
        restart = self.restart or anew
        for path, saved in self.found():
            # With `restart`, a run that begins also sets aside the other run's checkpoint of update 0.
            if saved > step or (restart and step == 0):
                self.meet_newer(path, step, restart)
        if anew:
            commit.on_rank0(note_begun, self.path)
            _begun.add(str(self.path))

    def now(self, unit: TrainedUnit) -> int:
        """The unit's current step, in the numbers of `found`."""
        return unit.train_progress.num_updates_completed

    def found(self) -> list[tuple[Location, int]]:
        """Folders named like checkpoints, with their steps, newest first. Collective."""
        return [(path, commit.step_of(path)) for path in commit.candidates(self.path)]

    def is_saved(self, step: int) -> bool:
        return commit.is_saved(self.path, step)

    def meet_newer(self, path: Location, step: int, restart: bool) -> None:
        """Refuse a checkpoint that is ahead of this run, or set it aside: it would be mistaken for this run's newest. A corrupt
        one is set aside without asking, because the restore has skipped it.
        """
        why = "replaced"
        if not restart:
            try:
                commit.verify(path)
            except (CheckpointCorruptError, FileNotFoundError) as error:
                why = "corrupt"
                logger.warning("%s", error)
            else:
                self.release()
                first = "Call restore_from_latest first, save" if step == 0 else "Save"
                raise CheckpointError(
                    f"{path} is ahead of this run, which is at {self.counts} {step}: it would be mistaken for this run's newest. "
                    f"{first} to another folder, or set the checkpoint aside with SaveOptions(restart=True) or "
                    "`echelon run --restart`."
                )
        commit.on_rank0(lambda: commit.set_aside(path, why))

    def find_best(self) -> tuple[Location, float] | None:
        """The best checkpoint and its number, if one is known. On rank 0 only."""
        if self.keep.best is None:
            return None
        whole = {commit.step_of(p): p for p in commit.committed(self.path)}
        metrics = {step: manifest.read(p).get("metrics", {}) for step, p in whole.items()}
        first = next(iter(self.keep.best.best_first(metrics)), None)
        return None if first is None else (whole[first], metrics[first][self.keep.best.monitored_metric])

    def retire(self, newest: Location) -> None:
        """Remove checkpoints that are not kept, after a commit. On rank 0 only, perhaps in a thread."""
        try:
            self._lease.refresh()
            if self.keep.count is None:
                return
            whole = {commit.step_of(p): p for p in commit.committed(self.path)}
            if self.keep.spares_kept:
                whole = {step: p for step, p in whole.items() if manifest.read(p).get("keep") is not None}
            metrics = {step: manifest.read(p).get("metrics", {}) for step, p in whole.items()} if self.keep.best else {}
            commit.retire(self.path, [whole[step].name for step in self.keep.to_delete(list(whole), metrics)])
        except Exception as error:  # the save itself is committed
            logger.error("%s is saved; older checkpoints could not be removed: %s", newest, error)
