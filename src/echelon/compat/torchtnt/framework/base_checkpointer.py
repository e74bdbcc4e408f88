"""torchtnt.framework.callbacks.base_checkpointer: when to save, under which name, and what stays; a subclass writes."""

from __future__ import annotations

import inspect
import logging
from abc import ABCMeta, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from echelon.checkpoint.policy import BestCheckpointConfig
from echelon.common.errors import UsageError
from echelon.compat.torchtnt.utils.checkpoint import (
    CheckpointManager,
    CheckpointPath,
    MetricData,
    Phase,
    best_first,
    get_checkpoint_dirpaths,
)
from echelon.compat.torchtnt.utils.distributed import get_world_size
from echelon.loop.callback import Callback
from echelon.loop.checkpointing import options
from echelon.loop.checkpointing.contents import is_unevaluated, monitored
from echelon.loop.state import EntryPoint, State
from echelon.world import agree, stop

__all__ = ["BaseCheckpointer", "KnobOptions", "RestoreOptions"]


@dataclass(frozen=True)
class RestoreOptions(options.RestoreOptions):
    """As `echelon.callbacks.RestoreOptions`.

    Args:
        init_optim_states: no effect: an optimizer's state is made when it is needed.
    """

    init_optim_states: bool = True


@dataclass
class KnobOptions:
    """Settings of TorchTNT's storage, which is not used here: accepted, and without effect."""

    max_per_rank_io_concurrency: int | None = None
    enable_storage_optimization: bool = True
    use_collectives: bool = True


logger = logging.getLogger("echelon.compat.torchtnt.framework.callbacks.base_checkpointer")  # programs filter by this name

# The phases whose steps are in a checkpoint's name. The first one's epochs are in it, too.
_PHASES = {
    EntryPoint.TRAIN: {"train": Phase.TRAIN},
    EntryPoint.FIT: {"train": Phase.TRAIN, "eval": Phase.EVALUATE},
    EntryPoint.EVALUATE: {"eval": Phase.EVALUATE},
    EntryPoint.PREDICT: {"predict": Phase.PREDICT},
}


class BaseCheckpointer(Callback, metaclass=ABCMeta):
    """Base of savers: a subclass has `_checkpoint_impl`, which writes, and `restore`.

    Folders are called `epoch_E_train_step_S`; in `fit` they add `_eval_step_V`, in `evaluate` and `predict` they have only the
    step of these; a metric adds `_metric=value`. The end of training and of a prediction is always saved. A save in the middle
    of an accumulation window waits for its end.

    Args:
        dirpath: a folder; rank 0's is used on all ranks.
        save_every_n_train_steps, save_every_n_epochs, save_every_n_eval_epochs, save_every_n_eval_steps,
            save_every_n_predict_steps: None never saves.
        keep_last_n_checkpoints: how many stay: the newest, or with `best_checkpoint_config` the best; None keeps all. Those
            of `evaluate` and `predict` all stay.
        best_checkpoint_config: which number of `state.log` or attribute of the unit is the metric. Within `fit`, a save that is
            due before an evaluation waits for it, so that the metric is that of these weights.
        process_group: None or a group of all ranks, over which they agree.
    Raises:
        RuntimeError: several ranks were launched, but there is no process group yet.
    Attributes:
        metadata_fnames: a whole checkpoint has one of these files; if empty, every folder with such a name is a checkpoint.
    """

    metadata_fnames: Sequence[str] = ()
    may_stop, saves = False, True

    def __init__(
        self,
        dirpath: str,
        *,
        save_every_n_train_steps: int | None = None,
        save_every_n_epochs: int | None = None,
        save_every_n_eval_epochs: int | None = None,
        save_every_n_eval_steps: int | None = None,
        save_every_n_predict_steps: int | None = None,
        keep_last_n_checkpoints: int | None = None,
        best_checkpoint_config: BestCheckpointConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if get_world_size() > 1 and not dist.is_initialized():
            raise RuntimeError(
                "Running in a distributed environment without default process group initialized. "
                "Call `torch.distributed.init_process_group` before initializing this callback. "
                "Using `AutoUnit` will do this automatically."
            )
        counts = {
            "save_every_n_train_steps": save_every_n_train_steps,
            "save_every_n_epochs": save_every_n_epochs,
            "save_every_n_eval_steps": save_every_n_eval_steps,
            "save_every_n_eval_epochs": save_every_n_eval_epochs,
            "save_every_n_predict_steps": save_every_n_predict_steps,
            "keep_last_n_checkpoints": keep_last_n_checkpoints,
        }
        for name, count in counts.items():
            if count is not None and (isinstance(count, bool) or not count > 0):
                raise UsageError(
                    f"Invalid value passed for {name}. Expected to receive either None or positive number, but received {count}"
                )
            setattr(self, f"_{name}", count)
        if best_checkpoint_config is not None and best_checkpoint_config.mode not in ("min", "max"):
            raise UsageError(
                "Invalid value passed for best_checkpoint_config.mode. Expected to receive 'min' or 'max', but received "
                f"{best_checkpoint_config.mode}"
            )
        self._best_checkpoint_config = best_checkpoint_config
        self._process_group = _group_of(process_group)
        self.meets_in_steps = save_every_n_eval_steps is not None or save_every_n_predict_steps is not None
        self._waiting: str | None = None  # the hook of a save that waits for the end of a window, or for an evaluation
        self._last: CheckpointPath | None = None
        self._checkpoint_manager = self._manager(
            dirpath, best_checkpoint_config, keep_last_n_checkpoints, self._metadata(), self._process_group
        )

    @classmethod
    def _metadata(cls) -> list[str]:
        older = getattr(cls, "metadata_fname", None)  # its name in release 0.2.4
        return [older] if older is not None and not cls.metadata_fnames else list(cls.metadata_fnames)

    def _manager(self, *args: Any) -> CheckpointManager:
        return CheckpointManager(*args)

    @property
    def dirpath(self) -> str:
        return self._checkpoint_manager.dirpath

    # --- when

    def on_train_start(self, state: State, unit: Any) -> None:
        self._checkpoint_manager.prune_surplus_checkpoints()

    def on_train_step_end(self, state: State, unit: Any) -> None:
        if self._waiting is not None or self._is_due("train_steps", unit.train_progress.num_steps_completed):
            self._generate_checkpoint_and_upkeep(state, unit, hook="on_train_step_end")

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        if self._waiting is not None or self._is_due("epochs", unit.train_progress.num_epochs_completed):
            self._generate_checkpoint_and_upkeep(state, unit, hook="on_train_epoch_end")

    def on_train_end(self, state: State, unit: Any) -> None:
        self._generate_checkpoint_and_upkeep(state, unit, hook="on_train_end")

    def on_eval_start(self, state: State, unit: Any) -> None:
        if state.entry_point == EntryPoint.EVALUATE:
            self._disable_ckpt_optimality_tracking()

    def on_eval_step_end(self, state: State, unit: Any) -> None:
        if self._is_due("eval_steps", unit.eval_progress.num_steps_completed):
            self._generate_checkpoint_and_upkeep(state, unit, hook="on_eval_step_end")

    def on_eval_epoch_end(self, state: State, unit: Any) -> None:
        if self._is_due("eval_epochs", unit.eval_progress.num_epochs_completed):
            self._generate_checkpoint_and_upkeep(state, unit, hook="on_eval_epoch_end")

    def on_eval_end(self, state: State, unit: Any) -> None:
        if self._waiting is not None and state.entry_point == EntryPoint.FIT:
            self._generate_checkpoint_and_upkeep(state, unit, hook="on_eval_end")

    def on_predict_start(self, state: State, unit: Any) -> None:
        self._disable_ckpt_optimality_tracking()

    def on_predict_step_end(self, state: State, unit: Any) -> None:
        if self._is_due("predict_steps", unit.predict_progress.num_steps_completed):
            self._generate_checkpoint_and_upkeep(state, unit, hook="on_predict_step_end")

    def on_predict_end(self, state: State, unit: Any) -> None:
        self._generate_checkpoint_and_upkeep(state, unit, hook="on_predict_end")

    def _is_due(self, what: str, completed: int) -> bool:
        every = getattr(self, f"_save_every_n_{what}")
        return bool(every) and completed % every == 0

    def _disable_ckpt_optimality_tracking(self) -> None:
        """Checkpoints of these entry points hold no weights, so none is better than another."""
        verbs = {"best_checkpoint_config": "it is", "keep_last_n_checkpoints": "is"}
        for name, verb in verbs.items():
            if getattr(self, f"_{name}") is not None:
                logger.warning("Disabling %s, since %s not supported for eval or predict entrypoints.", name, verb)
                setattr(self, f"_{name}", None)
                setattr(self._checkpoint_manager, f"_{name}", None)

    # --- saving

    def _generate_checkpoint_and_upkeep(self, state: State, unit: Any, hook: str) -> bool:
        """Save, if the checkpoint would stay; True if it was saved. Collective."""
        best, ends = self._best_checkpoint_config is not None, hook == "on_train_end"
        self._waiting = hook if not ends and self._must_wait(state, unit, hook) else None
        if self._waiting is not None:
            return False
        metric = self._metric(state, unit) if best else None
        phases = _PHASES.get(state.entry_point, _PHASES[EntryPoint.TRAIN])
        progress = {name: getattr(unit, f"{name}_progress") for name in phases}
        steps = {phase: progress[name].num_steps_completed for name, phase in phases.items()}
        epoch = next(iter(progress.values())).num_epochs_completed
        path = self._checkpoint_manager.generate_checkpoint_path(epoch, steps, metric, process_group=self._process_group)
        # A run that a signal stopped saves its last state whatever the metric is, so that it can continue.
        leaves = ends and best and agree.any_rank(stop.asked() is not None)
        if not (leaves or self._checkpoint_manager.should_save_checkpoint(path)):
            return False
        if ends and self._is_there(state, unit, path):
            return False
        at = "checkpoint_path" if "checkpoint_path" in inspect.signature(self._checkpoint_impl).parameters else "checkpoint_id"
        if not self._checkpoint_impl(state, unit, hook=hook, **{at: path.path}):
            return False
        self._last = path
        if not leaves:
            self._checkpoint_manager.append_checkpoint(path)
        self._tell_unit(state, unit, path)
        return True

    def _must_wait(self, state: State, unit: Any, hook: str) -> bool:
        """Whether the save must wait, because the state is not yet what the name says."""
        if state.entry_point not in (EntryPoint.TRAIN, EntryPoint.FIT):
            return False
        if not getattr(unit, "at_boundary", True):  # gradients are not saved
            return True
        if "_eval_" in hook and hook != "on_eval_end":  # averaged weights may be in the module's place
            averages = getattr(getattr(unit, "swa_model", None), "params", None)
            return bool(getattr(averages, "use_in_evaluation", False))
        evaluated = self._best_checkpoint_config is None or state.should_stop or not is_unevaluated(state, unit)
        return not evaluated

    def _tell_unit(self, state: State, unit: Any, path: CheckpointPath) -> None:
        """Tell the unit of a save."""
        if callable(tell := getattr(unit, "on_checkpoint_save", None)):
            tell(state, checkpoint_id=path.path)

    def _is_there(self, state: State, unit: Any, path: CheckpointPath) -> bool:
        """Whether the end of training is saved already."""
        if self._checkpoint_manager.does_checkpoint_exist(path, self._process_group):
            if agree.is_rank0():
                logger.warning("Final checkpoint already exists, skipping.")
            return True
        latest = self._last or self._checkpoint_manager.get_last_checkpoint()
        step = latest.step.get(Phase.TRAIN) if latest is not None else None
        same = step == unit.train_progress.num_steps_completed
        if state.entry_point == EntryPoint.FIT and getattr(self, "_save_every_n_eval_epochs", None) is None and same:
            if agree.is_rank0():
                logger.info(
                    "Omitting final checkpoint since train progress is unchanged, and eval checkpointing is not configured."
                )
            return True
        return False

    def _metric(self, state: State, unit: Any) -> MetricData | None:
        assert self._best_checkpoint_config is not None
        found = monitored(self._best_checkpoint_config.monitored_metric, state, unit)
        return next((MetricData(*each) for each in found.items()), None)

    @abstractmethod
    def _checkpoint_impl(self, state: State, unit: Any, *, checkpoint_id: str, hook: str) -> bool:
        """Write a checkpoint; True if it was written. `checkpoint_path` may be its parameter instead, as in release 0.2.4.

        Args:
            checkpoint_id: the folder.
            hook: the hook in which it is written.
        """

    # --- restoring

    @staticmethod
    @abstractmethod
    def restore(
        path: str,
        unit: Any,
        *,
        train_dataloader: Iterable[Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore_options: RestoreOptions | None = None,
        **kwargs: Any,
    ) -> Any:
        """Restore a unit from a checkpoint."""

    @classmethod
    def restore_with_id(cls, checkpoint_id: int | str, unit: Any, **options: Any) -> Any:
        """As `restore`; the id is the path."""
        return cls.restore(str(checkpoint_id), unit, **options)

    @classmethod
    def restore_from_latest(cls, dirpath: str, unit: Any, **kwargs: Any) -> bool:
        """Restore the newest checkpoint in a folder; False if there is none.

        Args:
            kwargs: arguments of `restore`, and `file_system`, fsspec's.
        """
        paths = cls._saved(dirpath, None, kwargs)
        return cls._restore_first(str(dirpath), paths[::-1], unit, **kwargs)

    @classmethod
    def restore_from_best(
        cls, dirpath: str, unit: Any, metric_name: str, mode: Literal["min", "max"] = "min", **kwargs: Any
    ) -> bool:
        """As `restore_from_latest`, for the checkpoint with the best metric; False if none has the metric."""
        paths = cls._saved(dirpath, metric_name, kwargs)
        if not paths and agree.is_rank0():
            logger.warning(
                "No checkpoints with metric name %s were found in %s. Not loading any checkpoint.", metric_name, dirpath
            )
        return bool(paths) and cls._restore_first(str(dirpath), best_first(paths, mode), unit, **kwargs)

    @classmethod
    def _saved(cls, dirpath: str, metric: str | None, options: dict[str, Any]) -> list[CheckpointPath]:
        place = options.get("file_system"), options.get("process_group")
        return get_checkpoint_dirpaths(str(dirpath), cls._metadata(), metric, *place)

    @classmethod
    def _restore_first(
        cls, dirpath: str, paths: list[CheckpointPath], unit: Any, *, file_system: Any = None, **kwargs: Any
    ) -> bool:
        if paths:
            logger.info("Restoring from path: %s", paths[0])
            cls.restore(paths[0].path, unit, **kwargs)
        return bool(paths)


def _group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group for host memory, over which ranks agree on a name."""
    if not dist.is_initialized():
        return None
    default = group is None or group is dist.group.WORLD
    if not default and "gloo" in str(dist.get_backend_config(group)):
        return group
    return agree.control_group()
