"""How DistributedCheckpointSaver writes: echelon's saver, told when and under which name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from echelon.checkpoint import commit, manifest
from echelon.checkpoint.background import Background
from echelon.checkpoint.location import Location, location
from echelon.checkpoint.snapshot import Snapshot, snapshot
from echelon.compat.torchtnt.utils import checkpoint_folder as folder
from echelon.compat.torchtnt.utils.checkpoint_manager import CheckpointManager
from echelon.compat.torchtnt.utils.checkpoint_path import CheckpointPath, Phase
from echelon.loop.checkpointing import changes, contents, saver
from echelon.loop.checkpointing.folder import RunFolder
from echelon.loop.checkpointing.options import SaveOptions
from echelon.loop.records.metrics import share_of
from echelon.loop.state import EntryPoint, State
from echelon.parallel.state.state import states_by_name
from echelon.world import rng

__all__ = ["Manager", "Writer"]

logger = logging.getLogger(__name__)


class Manager(CheckpointManager):
    """Removes what is too much only once the checkpoint that takes its place is whole."""

    doomed: list[CheckpointPath]

    @classmethod
    def of(cls, plain: CheckpointManager) -> Manager:
        made = cls.__new__(cls)
        vars(made).update(vars(plain))
        made.doomed = []
        return made

    def append_checkpoint(self, ckpt: CheckpointPath) -> None:
        self._append(ckpt, lambda: self.doomed.append(self._ckpt_paths.pop(0)))

    def remove_doomed(self) -> None:
        doomed, self.doomed = self.doomed, []
        for path in doomed:
            self._remove(path)


class NamedFolder(RunFolder):
    """A folder whose checkpoints have TorchTNT's names. Those that TorchTNT wrote are left alone."""

    counts_anew, counts = False, "step"

    def _now(self, unit: Any) -> int:
        return int(unit.train_progress.num_steps_completed)

    def _found(self) -> list[tuple[Location, int]]:
        """Of training."""

        def find() -> list[tuple[str, int]]:
            inside = self.path.iterdir() if self.path.is_dir() else ()
            paths = folder.parsed(".", [each.name for each in inside if (each / manifest.MANIFEST).exists()])
            return [(p.path.removeprefix("./"), p.step[Phase.TRAIN]) for p in reversed(paths) if Phase.TRAIN in p.step]

        return [(self.path / name, step) for name, step in commit.on_rank0(find, self.path)]

    def _is_saved(self, step: int) -> bool:
        at_step = [path for path, saved in self._found() if saved == step]
        return commit.on_rank0(lambda: any(manifest.is_whole(path) for path in at_step), self.path)


class Writer(saver.DistributedCheckpointSaver):
    """Echelon's saver, whose own intervals and names are not used.

    Args:
        manager: whose surplus goes when a checkpoint is whole.
    """

    def __init__(self, dirpath: str, async_checkpoint: bool, options: SaveOptions | None, manager: Manager) -> None:
        super().__init__(dirpath, async_checkpoint=async_checkpoint, options=options)
        self.folder = NamedFolder(self.folder.path, self.folder.keep, restart=self.options.restart)
        self._background = Background(self.folder.retire)
        self._manager = manager
        self._at: CheckpointPath | None = None
        self._afterwards: list[Callable[[], None]] = []

    def begin(self, state: State, unit: Any) -> None:
        """At the start of training: no checkpoint may be ahead of it. Collective."""
        self.folder.take_over(unit, state)
        for prepared in unit.prepared_modules().values():
            prepared.extras.keep()
        if self._frozen is not None:
            self._frozen.begin(unit)

    def look(self, state: State, unit: Any) -> None:
        """At the end of a step, while a save may be under way."""
        if self._background.busy:
            self._look_after(state)
        elif self.async_checkpoint and unit.at_boundary:
            contents.prepare(unit, self._planned, self._frozen, self._buffers)

    @contextlib.contextmanager
    def ending(self, state: State) -> Iterator[None]:
        """Context of the last save of a run, after which the folder is free again."""
        try:
            yield
            self._look_after(state, wait=True)
        finally:
            self._release()

    def write(self, state: State, unit: Any, path: CheckpointPath, hook: str) -> bool:
        """Write a checkpoint, or begin to; False if it is there already, or the storage failed. Collective."""
        self._at = path
        if hook in ("on_train_end", "on_predict_end"):
            return self.save(state, unit) is not None
        if self.async_checkpoint:
            self.folder.take()
        failures, before = self.failures, self._pending
        self._save(state, unit)
        return self._pending is not before if self.async_checkpoint else self.failures == failures

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

    # --- what echelon's saver asks

    def _place(self, unit: Any) -> tuple[int, str]:
        assert self._at is not None
        step = next((self._at.step[p] for p in (Phase.TRAIN, Phase.EVALUATE, Phase.PREDICT) if p in self._at.step), 0)
        return step, location(self._at.path).name

    def _take(self, state: State, unit: Any) -> tuple[Snapshot, dict[str, Any]]:
        assert self._at is not None
        more = {}
        for phase in ("eval", "predict"):
            here = getattr(state, f"{phase}_state")
            progress = getattr(unit, f"{phase}_progress", None)
            position = here.loader_state(progress) if here is not None and here.feed is not None and progress else None
            if position is not None:
                more[f"{phase}_dataloader"] = position
        if state.entry_point in (EntryPoint.EVALUATE, EntryPoint.PREDICT):
            taken, facts = self._without_weights(unit, more)
        else:
            taken, facts = contents.take(state, unit, self._planned, None, self._frozen, more)
        metric = self._at.metric_data
        return taken, {**facts, "metrics": {metric.name: metric.value} if metric is not None else {}}

    def _without_weights(self, unit: Any, more: dict[str, Any]) -> tuple[Snapshot, dict[str, Any]]:
        """What an evaluation or a prediction changes."""
        metrics = unit.tracked_metrics()
        left = {*unit.tracked_modules(), *unit.tracked_optimizers(), *unit.tracked_lr_schedulers(), *metrics}
        states = states_by_name({name: value for name, value in unit.app_state().items() if name not in left})
        own = {"streams": rng.states(), "metrics": {name: share_of(metric) for name, metric in metrics.items()}, **more}
        return snapshot(states, own), {"config": changes.facts(unit, None)}

    def _look_after(self, state: State, wait: bool = False) -> None:
        busy, failures = self._background.busy, self.failures
        super()._look_after(state, wait)
        if busy and not self._background.busy:
            self._run_afterwards(self.failures <= failures)
