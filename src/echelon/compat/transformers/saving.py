"""A Trainer's checkpoints: echelon's format, in folders named `checkpoint-N` after N updates."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from echelon.checkpoint import commit, manifest
from echelon.checkpoint.location import Location, absolute, location
from echelon.checkpoint.policy import Keep
from echelon.common.errors import CheckpointError, UsageError
from echelon.compat.named_saver import NamedFolder, NamedSaver, named_in
from echelon.compat.trainer.rank import kept, planned
from echelon.loop.checkpointing import restoring
from echelon.loop.checkpointing.changes import command_here
from echelon.loop.checkpointing.folder import is_begun_anew, left_alone
from echelon.loop.checkpointing.options import RestoreOptions, SaveOptions

__all__ = ["Saver", "newest", "ranks_that_share", "resume", "was_cut_short"]

logger = logging.getLogger(__name__)

# Key in the manifest of a run's last checkpoint: how the run ended, "stopped" by a signal or "complete".
_ENDED = "ended"

_NAME = re.compile(r"checkpoint-([0-9]{1,18})")


def _step_of(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def _updates(unit: Any) -> int:
    return int(unit.train_progress.num_updates_completed)


class _Folder(NamedFolder):
    """
    Attributes:
        limit: how many checkpoints stay; None keeps all.
        best: name of the checkpoint that always stays.
    """

    limit: int | None = None
    best: str | None = None

    def meet_newer(self, path: Location, step: int, restart: bool) -> None:
        if not restart and commit.on_rank0(lambda: manifest.is_whole(path), self.path):
            self.release()
            raise CheckpointError(
                f"{path} is ahead of this run, which is at step {step}: it would be mistaken for this run's newest. "
                "Go on from it with train(resume_from_checkpoint=True), give another output_dir, or set it aside with "
                "TrainingArguments(overwrite_output_dir=True) or `echelon run --restart`."
            )
        super().meet_newer(path, step, restart)

    def retire(self, newest: Location) -> None:
        """After a commit, remove the checkpoints beyond the limit. Called on rank 0 only."""
        try:
            self._lease.refresh()
            if not self.limit:
                return
            names = [name for name, _ in reversed(self.named()) if manifest.is_whole(self.path / name)]
            older = [name for name in names if name not in (newest.name, self.best)]
            stay = max(0, self.limit - len(names) + len(older))
            commit.retire(self.path, older[: len(older) - stay])
        except Exception as error:  # the save itself is committed
            logger.error("%s is saved; older checkpoints could not be removed: %s", newest, error)


class Saver(NamedSaver):
    """Echelon's saver under transformers' names. Flow calls `write` when a callback asks for a save, `save` after a signal.

    Args:
        folder: where the checkpoints' folders are.
        limit: how many checkpoints stay, the newest and the best among them.
        restart: set checkpoints of another run aside.
        only_trained: leave out frozen parameters, such as the base model of an adapter.
        late: the saver is made during a run; its first save replaces another run's checkpoint of the same number.
    """

    def __init__(self, folder: str, limit: int | None, *, restart: bool, only_trained: bool = False, late: bool = False) -> None:
        now = (lambda unit: _updates(unit) - 1) if late else _updates
        own = _Folder(location(folder, "output_dir"), Keep(), restart=restart, step_of=_step_of, now=now)
        own.limit = limit
        options = SaveOptions(restart=restart, only_trained=only_trained)
        super().__init__(own, lambda unit: (_updates(unit), f"checkpoint-{_updates(unit)}"), options=options)

    def keep(self, best: str | None) -> None:
        """Never remove the checkpoint with this path."""
        assert isinstance(self.folder, _Folder)
        self.folder.best = Path(best).name if best is not None else None

    def path_at(self, updates: int) -> str:
        return str(self.dirpath / f"checkpoint-{updates}")

    def end(self, unit: Any, how: str) -> None:
        """Note in the last checkpoint, if it is saved, how training ended, and free the folder for other runs. Collective."""
        path = self.dirpath / f"checkpoint-{unit.train_progress.num_updates_completed}"

        def note() -> None:
            try:
                if manifest.is_whole(path):
                    commit.note(path, _ENDED, how)
            except (CheckpointError, OSError) as error:  # for example a read-only folder
                logger.warning("%s: how the run ended could not be written down: %s", path, error)

        commit.on_rank0(note, self.dirpath)
        self._release()


def newest(output_dir: str) -> Location | None:
    """The newest checkpoint there, unless the run is to begin anew. Collective."""
    folder = location(output_dir)
    names = commit.on_rank0(lambda: named_in(folder, _step_of), folder)
    return folder / names[0][0] if names and not is_begun_anew(absolute(folder)) else None


def was_cut_short(path: Location) -> bool:
    """Whether the run that saved the checkpoint was stopped by a signal, or was killed and had this same command. Collective."""

    def look() -> bool:
        saved = manifest.read(path)
        ended, command = saved.get(_ENDED), saved.get("config", {}).get("command")
        return ended == "stopped" or (ended is None and bool(command) and command == command_here())

    try:
        return commit.on_rank0(look, path)
    except CheckpointError:  # reported when the checkpoint is restored
        return False


def ranks_that_share(path: Location, each: int, ranks: int, accumulation: int) -> int:
    """How many ranks a global batch is computed for: as many as when the checkpoint was saved, if fewer run now. Collective.

    Args:
        each: samples of an update on a rank, now. If it was another number then, the script has chosen another batch.
        ranks: how many ranks have different samples, now.
    Raises:
        UsageError: on all ranks: they cannot share the checkpoint's global batch.
    """
    saved = commit.on_rank0(lambda: manifest.read(path) if manifest.is_whole(path) else {}, path)
    whole = kept(path, saved, each, ranks, accumulation, "per_device_train_batch_size")
    return max(ranks, planned(ranks)) if whole is None else whole // each


def resume(which: str | bool, output_dir: str, unit: Any, loader: Any) -> None:
    """Restore a checkpoint; True restores the newest in `output_dir`, unless the run is to begin anew. Collective.

    Raises:
        UsageError: there is no checkpoint, or transformers' own Trainer wrote it.
    """
    if which is True:
        folder = location(output_dir)
        if left_alone(folder):
            return
        names = commit.on_rank0(lambda: named_in(folder, _step_of), folder)
        if not restoring.restore_first(folder, [folder / name for name, _ in names], unit, loader, RestoreOptions(), True):
            raise UsageError(f"No valid checkpoint found in output directory ({output_dir})")
        return
    path = location(str(which))
    theirs = commit.on_rank0(lambda: not (path / manifest.MANIFEST).exists() and (path / "trainer_state.json").exists(), path)
    if theirs:
        raise UsageError(
            f"{which} was written by transformers' own Trainer, whose optimizer.pt is a pickle. Its weights are had by "
            "from_pretrained(...); train from there, or finish the run with transformers under `echelon run`."
        )
    restoring.restore(path, unit, loader, RestoreOptions())
