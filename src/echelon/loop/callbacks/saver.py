"""The checkpoint saver: saves a unit's whole state while it trains, and restores it at any number of ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from echelon.checkpoint import commit, store
from echelon.checkpoint.policy import Every, KeepLast
from echelon.contracts.errors import CheckpointError
from echelon.loop.callback import Callback
from echelon.loop.unit import TrainUnit, Unit
from echelon.parallel.state import states_by_name
from echelon.world import agree, streams
from echelon.world.init import World

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["DistributedCheckpointSaver", "RestoreOptions"]


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoreOptions:
    """What to take from a checkpoint. `strict=False` leaves alone what the checkpoint does not have."""

    restore_modules: bool = True
    restore_train_progress: bool = True
    restore_eval_progress: bool = True
    restore_predict_progress: bool = True
    restore_optimizers: bool = True
    restore_lr_schedulers: bool = True
    strict: bool = True


class DistributedCheckpointSaver(Callback):
    """Saves modules, optimizers, schedulers, progress, the loader's position, random streams and other Statefuls.

    A checkpoint is the folder `dirpath/step-NNNNNNNN`, complete or absent, whatever is killed when. Its parameters and
    optimizer state are keyed by name, so it can be restored under another strategy and number of ranks. The end of training
    is always saved.

    Args:
        dirpath: the same on all ranks, on storage that all can reach.
        save_every_n_train_steps, save_every_n_epochs, save_every_n_eval_epochs: None is never. In the middle of an
            accumulation window the save waits for its end.
        keep_last_n_checkpoints: remove older ones after each save; None keeps all.
    """

    may_stop = False

    def __init__(
        self,
        dirpath: str | Path,
        *,
        save_every_n_train_steps: int | None = None,
        save_every_n_epochs: int | None = None,
        save_every_n_eval_epochs: int | None = None,
        keep_last_n_checkpoints: int | None = None,
    ) -> None:
        self.dirpath = Path(dirpath)
        self.every = Every(save_every_n_train_steps, save_every_n_epochs, save_every_n_eval_epochs)
        self.keep = KeepLast(keep_last_n_checkpoints)
        self._due = False

    def on_train_start(self, state: State, unit: TrainUnit[Any]) -> None:
        newest, step = commit.latest(self.dirpath), unit.train_progress.num_steps_completed
        if newest is not None and commit.step_of(newest) > step:
            raise CheckpointError(
                f"{newest} is ahead of this run, which is at step {step}: it would be mistaken for this run's newest. "
                "Call restore_from_latest first, or save to another folder."
            )

    def on_train_step_end(self, state: State, unit: TrainUnit[Any]) -> None:
        every, steps = self.every.train_steps, unit.train_progress.num_steps_completed
        self._due = self._due or (every is not None and steps % every == 0)
        if self._due and unit.at_boundary:
            self.save(state, unit)

    def on_train_epoch_end(self, state: State, unit: TrainUnit[Any]) -> None:
        if self.every.epochs is not None and unit.train_progress.num_epochs_completed % self.every.epochs == 0:
            self.save(state, unit)

    def on_eval_end(self, state: State, unit: Any) -> None:
        every = self.every.eval_epochs
        if every is not None and isinstance(unit, TrainUnit) and unit.eval_progress.num_epochs_completed % every == 0:  # type: ignore[attr-defined]
            self._due = True
            if unit.at_boundary:  # else at the next step that ends a window
                self.save(state, unit)

    def on_train_end(self, state: State, unit: TrainUnit[Any]) -> None:
        self.save(state, unit)

    def save(self, state: State, unit: TrainUnit[Any]) -> Path | None:
        """Save now; None if this step is saved already. Collective."""
        self._due = False
        began = time.perf_counter()
        step = unit.train_progress.num_steps_completed
        staged = commit.stage(self.dirpath, step)
        if staged is None:
            return None
        metrics = unit.tracked_metrics()
        states = states_by_name({name: value for name, value in unit.app_state().items() if name not in metrics})
        feed = state.train_state.feed if state.train_state is not None else None
        # Empty after an epoch's end, and for a loader without a state.
        states["train_dataloader"] = _Fixed((feed.loader_state() if feed is not None else None) or {})
        own = {"streams": streams.states(), "metrics": {name: metric.state_dict() for name, metric in metrics.items()}}
        store.write_states(staged, states, own)
        world = World.current(torch.device("cpu"))
        facts = {"world_size": world.size, "time": time.time(), "torch": torch.__version__, "echelon": version("echelon")}
        path = commit.publish(staged, step, facts)
        if self.keep.count is not None:
            commit.prune(self.dirpath, self.keep.count)
        if state.recorder is not None:
            state.recorder.event("checkpoint_saved", path=str(path), step=step, seconds=time.perf_counter() - began)
            state.recorder.pause_clock()
        return path

    @staticmethod
    def restore(
        path: str | Path,
        unit: Unit,
        *,
        train_dataloader: Iterable[Any] | None = None,
        restore_options: RestoreOptions | None = None,
    ) -> None:
        """Put a unit, and the loader if given, back to a checkpoint. Collective.

        Random streams, and each rank's share of metrics, are restored if as many ranks run as had saved.

        Raises:
            CheckpointNotFoundError, CheckpointError: nothing there, or it does not fit the unit.
        """
        options = restore_options or RestoreOptions()
        folder = Path(path)
        states = states_by_name(_chosen(unit, options))
        if train_dataloader is not None and hasattr(train_dataloader, "load_state_dict"):
            states["train_dataloader"] = _IfSaved(train_dataloader)
        commit.verify(folder)
        store.read_states(folder, states, strict=options.strict)
        own = store.read_rank(folder)
        # Ranks agree: with streams restored on some and not on others, none would be what it was.
        if not agree.any_rank(own is None) and own is not None:
            streams.load_states(own["streams"])
            for name, metric in unit.tracked_metrics().items():
                if name in own["metrics"]:
                    metric.load_state_dict(own["metrics"][name])
        elif isinstance(unit, TrainUnit):
            streams.renew(unit.train_progress.num_steps_completed)
            if unit.tracked_metrics():
                logger.warning("saved by another number of ranks: the shares of %s begin anew", ", ".join(unit.tracked_metrics()))
        unit.restored()

    @staticmethod
    def restore_from_latest(
        dirpath: str | Path,
        unit: Unit,
        *,
        train_dataloader: Iterable[Any] | None = None,
        restore_options: RestoreOptions | None = None,
    ) -> bool:
        """Restore the newest valid checkpoint in a folder; False if there is none. Collective."""
        path = commit.latest(Path(dirpath))
        if path is None:
            return False
        DistributedCheckpointSaver.restore(path, unit, train_dataloader=train_dataloader, restore_options=restore_options)
        return True


def _chosen(unit: Unit, options: RestoreOptions) -> dict[str, Any]:
    state = unit.app_state()  # first: it builds what is built at first use
    dropped: set[str] = set()
    if not options.restore_modules:
        dropped |= set(unit.tracked_modules())
    if not options.restore_optimizers:
        dropped |= set(unit.tracked_optimizers())
    if not options.restore_lr_schedulers:
        dropped |= set(unit.tracked_lr_schedulers())
    for phase in ("train", "eval", "predict"):
        if not getattr(options, f"restore_{phase}_progress"):
            dropped.add(f"{phase}_progress")
    dropped |= set(unit.tracked_metrics())  # each rank has a share of its own
    return {name: value for name, value in state.items() if name not in dropped}


class _Fixed:
    """A state that was taken already."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("only ever saved")


class _IfSaved:
    """The loader's state; a checkpoint from the end of an epoch holds none, and the next epoch begins at its start."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._loader.load_state_dict(state_dict)
