"""Background saves: a thread on each rank writes that rank's files; rank 0's thread commits when all files are there.

No collective runs in a thread. Each rank's thread writes its files and then a small `.done-N` beside them; rank 0's thread waits
for all of these and commits. In the loop's thread, `poll` makes the ranks agree whether a save is under way, done or failed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from echelon.checkpoint import commit, strict
from echelon.checkpoint import manifest as manifests
from echelon.checkpoint.location import Location, explain_for_rank, read_file, replace_file
from echelon.checkpoint.snapshot import Snapshot
from echelon.checkpoint.strict import Wrong
from echelon.common.errors import CheckpointCorruptError
from echelon.world import agree
from echelon.world.device import in_thread

__all__ = ["Background", "SaveFailure"]

_LOOK_S = 0.01


class SaveFailure(str):
    """What went wrong in a save, and on which rank."""


class Background:
    """Runs at most one save at a time. Methods are collective, except `busy` and `abandon`.

    Args:
        committed: called by rank 0's thread after the commit, to retire older checkpoints.
    """

    def __init__(self, committed: Callable[[Location], None]) -> None:
        self._committed = committed
        self._thread: threading.Thread | None = None
        self._staged: Location | None = None
        self._written, self._given_up = threading.Event(), threading.Event()
        self._failure: str | None = None
        self._is_committed = False

    @property
    def busy(self) -> bool:
        """Whether a save was started whose end `poll` or `wait` has not reported yet; the same on all ranks."""
        return self._thread is not None

    def start(
        self,
        staged: Location,
        step: int,
        taken: Snapshot,
        copied: Callable[[], None],
        ranks: int,
        facts: dict[str, Any],
        name: str | None = None,
    ) -> None:
        """Write a snapshot in a thread, once `copied` has returned. Nothing else may change it. `name`: as in `commit.stage`."""
        assert not self.busy
        self._written, self._given_up = threading.Event(), threading.Event()
        self._failure, self._staged, self._is_committed = None, staged, False

        def work() -> None:
            try:
                copied()
                files = taken.write(staged)
                _say_done(staged, taken.rank, files)
                self._written.set()
                if taken.rank == 0:
                    everyones = self._await_others(staged, ranks)
                    if everyones is not None:
                        self._committed(commit.commit(staged, step, everyones, facts, name))
                        self._is_committed = True
            except BaseException as error:  # told to all ranks at the next step
                self._failure = explain_for_rank(taken.rank, error, staged)
            finally:
                self._written.set()

        self._thread = threading.Thread(target=in_thread(work), name=f"echelon-save-{step}", daemon=True)
        self._thread.start()

    def _await_others(self, staged: Location, ranks: int) -> dict[str, Any] | None:
        """The files of all ranks; None if the save was given up."""
        files: dict[str, Any] = {}
        rank = 0
        while not self._given_up.is_set():
            # One file at a time, however many ranks there are: this spares a shared file system.
            while rank < ranks and (path := staged / f".done-{rank:05d}").exists():
                files |= _done(path)
                path.unlink()
                rank += 1
            if rank == ranks:
                return files
            self._given_up.wait(_LOOK_S)
        return None

    def poll(self) -> tuple[bool, SaveFailure | None]:
        """(whether the save has ended, its failure or None). Call it at every step while a save is under way."""
        if self._thread is None:
            return False, None
        if agree.any_rank(self._failure is not None):
            return True, self._give_up()
        if agree.any_rank(self._thread.is_alive()):
            return False, None
        return True, self.wait()

    def wait(self) -> SaveFailure | None:
        """Wait for the end of the save under way. Returns its failure, or None."""
        if self._thread is None:
            return None
        self._written.wait()
        if agree.any_rank(self._failure is not None):
            return self._give_up()
        self._thread.join()  # only rank 0's thread still runs: it commits
        if agree.any_rank(self._failure is not None):
            return self._give_up()
        self._thread = None
        return None

    def _give_up(self) -> SaveFailure:
        self.abandon()
        failures = agree.gather(self._failure)
        if self._staged is not None:
            staged = self._staged
            commit.on_rank0(lambda: commit.discard(staged))
        return SaveFailure("; ".join(text for text in failures if text is not None))

    def abandon(self) -> bool:
        """End this rank's part of a save without the other ranks, when a run ends by an error. Not collective.

        Returns:
            whether a save was under way and this rank committed it nevertheless.
        """
        self._given_up.set()
        was_busy = self.busy
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        return was_busy and self._is_committed


def _say_done(staged: Location, rank: int, files: dict[str, Any]) -> None:
    # Written atomically: rank 0 reads the file as soon as it exists.
    replace_file(staged / f".done-{rank:05d}", json.dumps(files).encode())


def _done(path: Location) -> dict[str, Any]:
    """The files that a rank reports to have written."""
    try:
        return manifests.check_files(strict.loads(read_file(path, strict.JSON_BYTES)))
    except Wrong as error:
        raise CheckpointCorruptError(f"{path} is not what echelon writes: {error}.", path=str(path)) from None
