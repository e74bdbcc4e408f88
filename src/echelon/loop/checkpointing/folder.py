"""The folder of a run's checkpoints: which run may write into it, what must not be there, and what stays."""

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

# Folders in which this process has started over; what is in them since then is its own.
_begun: set[str] = set()


def is_begun_anew(folder: Location) -> bool:
    """Whether what is in it is to be left alone, since the run was started with `--restart`."""
    return begins_anew() and str(folder) not in _begun


def left_alone(folder: Location) -> bool:
    """Whether nothing in it is to be restored; why is logged. `echelon prove` and `plan` look at runs from their beginning."""
    anew = is_begun_anew(absolute(folder))
    if anew or overrides().observes:
        why = "--restart was given" if anew else "a run that is proved or planned starts from its beginning"
        logger.warning("%s: nothing in %s is restored", why, folder)
        return True
    return False


class RunFolder:
    """
    Args:
        path: wherever the program goes from here, the same folder.
        keep: which checkpoints stay.
        restart: set checkpoints that are ahead of the run aside.
    Attributes:
        held: this run has the lease; the same on all ranks, though only rank 0 has it.
        counts: what its numbers are.
    """

    counts = "update"

    def __init__(self, path: Location, keep: Keep, *, restart: bool) -> None:
        self._given, self.path, self.keep, self.restart = str(path), absolute(path), keep, restart
        self.held = False
        self._lease = Lease(self.path)

    def take(self) -> None:
        """Hold the lease, and sweep up what a killed run left. Collective.

        Raises:
            RanksDisagreeError: each rank has a folder of its own, as if it were named by the time.
        """

        def take() -> None:
            make_folder(self.path)
            if self._lease.acquire():
                commit.sweep(self.path)

        if not self.held:
            remedy = "All ranks write into one: if its name has the time in it, let rank 0 choose it, or the launch command."
            agree.same_on_all("the folder of checkpoints", self._given, remedy)
            commit.on_rank0(take, self.path)
            self.held = True

    def release(self) -> None:
        self.held = False
        self._lease.release()

    def take_over(self, unit: TrainedUnit, state: State) -> None:
        """As `take`, at the beginning of a run: set aside what must not be there. Collective, once in a run.

        A run that is complete and saved has nothing to write: the folder may be read-only then.
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
            # Another run's beginning is not this one's.
            if saved > step or (restart and step == 0):
                self.meet_newer(path, step, restart)
        if anew:
            commit.on_rank0(note_begun, self.path)
            _begun.add(str(self.path))

    def now(self, unit: TrainedUnit) -> int:
        """Where a unit stands, counted as `found` counts."""
        return unit.train_progress.num_updates_completed

    def found(self) -> list[tuple[Location, int]]:
        """What is named like a checkpoint, and its step, newest first. Collective."""
        return [(path, commit.step_of(path)) for path in commit.candidates(self.path)]

    def is_saved(self, step: int) -> bool:
        return commit.is_saved(self.path, step)

    def meet_newer(self, path: Location, step: int, restart: bool) -> None:
        """What is ahead of this run would be mistaken for its newest. A corrupt one was passed over when the run was restored."""
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
                    f"{first} to another folder, or set it aside with SaveOptions(restart=True) or `echelon run --restart`."
                )
        commit.on_rank0(lambda: commit.set_aside(path, why))

    def find_best(self) -> tuple[Location, float] | None:
        """The best checkpoint and its number, if one is known. Rank 0 alone."""
        if self.keep.best is None:
            return None
        whole = {commit.step_of(p): p for p in commit.committed(self.path)}
        metrics = {step: manifest.read(p).get("metrics", {}) for step, p in whole.items()}
        first = next(iter(self.keep.best.best_first(metrics)), None)
        return None if first is None else (whole[first], metrics[first][self.keep.best.monitored_metric])

    def retire(self, newest: Location) -> None:
        """Remove what need not stay, after a commit. Rank 0 alone, perhaps in a thread."""
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
