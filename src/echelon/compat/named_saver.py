"""Checkpoints under another library's names, saved when and where that library says: TorchTNT's and transformers'."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from echelon.checkpoint import commit, manifest
from echelon.checkpoint.background import Background
from echelon.checkpoint.location import Location
from echelon.checkpoint.policy import Keep
from echelon.loop.checkpointing.folder import RunFolder
from echelon.loop.checkpointing.options import SaveOptions
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
from echelon.loop.unit import TrainedUnit

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["NamedFolder", "NamedSaver", "named_in"]


def named_in(path: Location, step_of: Callable[[str], int | None]) -> list[tuple[str, int]]:
    """Names and steps of a folder's checkpoints that have a manifest, newest first. Call it on rank 0."""
    names = [each.name for each in (path.iterdir() if path.is_dir() else ())]
    found = [(name, step) for name in names if (step := step_of(name)) is not None]
    found.sort(key=lambda each: each[1], reverse=True)
    return [(name, step) for name, step in found if (path / name / manifest.MANIFEST).exists()]


class NamedFolder(RunFolder):
    """A folder whose checkpoints have another library's names. Those without a manifest, which the library itself wrote, stay.

    Args:
        step_of: the step in a name; None if it is not the name of a training checkpoint.
        now: how far a unit has trained, in the unit of `step_of`.
    """

    counts = "step"

    def __init__(
        self,
        path: Location,
        keep: Keep,
        *,
        restart: bool,
        step_of: Callable[[str], int | None],
        now: Callable[[TrainedUnit], int],
    ) -> None:
        super().__init__(path, keep, restart=restart)
        self._step_of, self._stands_at = step_of, now

    def now(self, unit: TrainedUnit) -> int:
        return self._stands_at(unit)

    def named(self) -> list[tuple[str, int]]:
        return named_in(self.path, self._step_of)

    def found(self) -> list[tuple[Location, int]]:
        return [(self.path / name, step) for name, step in commit.on_rank0(self.named, self.path)]

    def is_saved(self, step: int) -> bool:
        def look() -> bool:
            return any(manifest.is_whole(self.path / name) for name, saved in self.named() if saved == step)

        return commit.on_rank0(look, self.path)


class NamedSaver(DistributedCheckpointSaver):
    """A saver that uses another library's names. It has no interval: `write` saves when that library asks for it.

    Args:
        folder: the folder that knows these names.
        name_of: (step, name) of the checkpoint that a unit would save now.
    """

    def __init__(
        self,
        folder: NamedFolder,
        name_of: Callable[[Any], tuple[int, str]],
        *,
        async_checkpoint: bool = False,
        options: SaveOptions | None = None,
    ) -> None:
        super().__init__(str(folder.path), async_checkpoint=async_checkpoint, options=options)
        self.folder: RunFolder = folder
        self._name_of = name_of
        self._background = Background(folder.retire)

    def place(self, unit: Any) -> tuple[int, str]:
        return self._name_of(unit)

    def write(self, state: State, unit: Any) -> bool:
        """Save during a run, or begin an asynchronous save. False if the storage failed; the run goes on. Collective."""
        if self.async_checkpoint:
            self.folder.take()
        failures, before = self.failures, self._pending
        self._save(state, unit)
        return self._pending is not before if self.async_checkpoint else self.failures == failures

    @contextlib.contextmanager
    def ending(self, state: State) -> Iterator[None]:
        """Context of a run's last save; afterwards the folder is free for other runs."""
        try:
            yield
            self.look_after(state, wait=True)
        finally:
            self._release()
