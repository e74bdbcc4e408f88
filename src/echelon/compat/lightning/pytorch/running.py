"""What a Trainer is while it runs a LightningModule: where it is, whose hook is under way, and what was logged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from echelon.checkpoint import plain
from echelon.common.errors import CheckpointError, UsageError
from echelon.compat.lightning.pytorch.asked import Asked, TrainerState
from echelon.compat.lightning.pytorch.callbacks.base import Callback
from echelon.compat.lightning.pytorch.callbacks.early_stopping import EarlyStopping
from echelon.compat.lightning.pytorch.callbacks.model_checkpoint import Checkpoint
from echelon.compat.lightning.pytorch.hooks import log_defaults
from echelon.compat.lightning.pytorch.logged import How, Numbers, Results
from echelon.contracts.rank import RankInfo
from echelon.parallel.names import class_name
from echelon.world import agree

__all__ = ["Running"]


# Of a unit, what says how far it is: an AutoUnit's window counts its updates.
_COUNTS = {"train_progress", "window"}


class _NotSaved(dict[str, Any]):
    """The dict of `on_save_checkpoint`: tensors are saved by name, and are not in it."""

    def __missing__(self, name: str) -> Any:
        self._check(name)
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: str) -> None:
        if name in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
            raise UsageError(
                f"checkpoint[{name!r}] is not there in on_save_checkpoint: the module's and the optimizers' tensors are saved by "
                "name, not in this dict. Save other tensors under a key of your own, such as checkpoint['ema'], and take them in "
                "on_load_checkpoint."
            )


class Running(Asked):
    """Of a Trainer.

    Attributes:
        callback_metrics, logged_metrics, progress_bar_metrics: the latest numbers by name, as 0-dim tensors.
        should_stop: set it to True to end `fit` after the present step.
        log_step: the step under which numbers are written: updates, counted when the next batch begins.
        unit: what is trained; None outside of a run.
    """

    callback_metrics: dict[str, Any]
    limits: Any
    log_every_n_steps: int
    num_loaders: Mapping[str, list[int | None]]

    def _begin_running(self) -> None:
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.should_stop = self.sanity_checking = self.was_evaluated = False
        self.state = TrainerState()
        self._begin_asked()
        self.lightning_module: Any = None
        self.datamodule: Any = None
        self.unit: Any = None
        self.handles: list[Any] = []  # of hooks that the next call takes away
        self.loop_state: Any = None  # echelon's State
        self.current_epoch = self.batch_idx = self.log_step = 0
        self.lightning_optimizers: list[Any] = []
        self.lightning_callbacks: list[Any] = []
        self.loggers: list[Any] = []
        self.root_device: torch.device | None = None
        self.results = {name: Results(training=name == "train") for name in ("train", "validation", "test")}
        self._evaluated_batches = {"validation": 0, "test": 0}  # of this run: where the numbers of their steps are written
        self._silent = False
        self.has_stepped = False  # with the latest batch
        self._steps_before = 0  # updates of fits that ended in this object
        self._progress_before: dict[str, Any] | None = None  # of the latest, from which the next one goes on

    # --- where it is

    @property
    def model(self) -> Any:
        return self.unit.module if self.unit is not None else self.lightning_module

    @property
    def global_step(self) -> int:
        return self.unit.updates if self.unit is not None and self.state.fn == "fit" else self._steps_before

    @property
    def trained(self) -> tuple[int, int]:
        """How far the module is: updates, and where none was counted, since optimizers are stepped directly, batches."""
        batches = self.unit.train_progress.num_steps_completed if self.unit is not None and not self.global_step else 0
        return self.global_step, batches

    @property
    def at_boundary(self) -> bool:
        return self.unit is None or bool(self.unit.at_boundary)

    @property
    def global_rank(self) -> int:
        return RankInfo.from_env().rank

    @property
    def local_rank(self) -> int:
        return RankInfo.from_env().local_rank

    @property
    def node_rank(self) -> int:
        return RankInfo.from_env().node_rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def logger(self) -> Any:
        return self.loggers[0] if self.loggers else None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [each.optimizer for each in self.lightning_optimizers]

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        return list(self.unit.schedules.all) if self.unit is not None else []

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        return [each for each in self.lightning_callbacks if isinstance(each, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Any:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        return [each for each in self.lightning_callbacks if isinstance(each, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    def print(self, *args: Any, **kwargs: Any) -> None:
        if agree.is_rank0():
            print(*args, **kwargs)

    # --- hooks

    @contextmanager
    def hook(self, name: str) -> Iterator[None]:
        """Context of a call of the module's code, for what it logs."""
        module = self.lightning_module
        before, module._hook = module._hook, name
        try:
            yield
        finally:
            module._hook = before

    def call(self, name: str, *args: Any) -> None:
        """A hook: callbacks first, then the module."""
        with self.hook(name):
            self._call_callbacks(name, self.lightning_callbacks, args)
            answer = getattr(self.lightning_module, name)(*args) if hasattr(self.lightning_module, name) else None
        if name == "on_train_batch_start" and answer == -1:
            raise UsageError("on_train_batch_start returned -1, to leave out the rest of the epoch. Use limit_train_batches.")

    def call_callbacks(self, name: str) -> None:
        """A hook that modules have not."""
        with self.hook(name):
            self._call_callbacks(name, self.lightning_callbacks, ())

    def call_at_epoch_end(self, meanwhile: Callable[[], None]) -> None:
        """`on_train_epoch_end`: callbacks that monitor what the module logs in it come last."""
        name = "on_train_epoch_end"
        last = [each for each in self.lightning_callbacks if isinstance(each, (Checkpoint, EarlyStopping))]
        with self.hook(name):
            self._call_callbacks(name, [each for each in self.lightning_callbacks if each not in last], ())
            self.lightning_module.on_train_epoch_end()
            self.publish(self.results["train"].of_epoch(), write=False)
            meanwhile()
            self._call_callbacks(name, last, ())

    def _call_callbacks(self, name: str, callbacks: list[Any], args: tuple[Any, ...]) -> None:
        for callback in callbacks:
            own = getattr(callback, name, None)
            if own is not None and getattr(own, "__func__", own) is not getattr(Callback, name, None):
                own(self, self.lightning_module, *args)

    # --- what is logged

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Context in which nothing is logged."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def log_when(self, hook: str | None, name: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
        """(on_step, on_epoch) for what is logged in a hook.

        Raises:
            UsageError: nothing can be logged there, or not so.
        """
        defaults = log_defaults(hook)
        if defaults is None:
            raise UsageError(f"self.log({name!r}, ...) cannot be called in {hook or 'this place'}.")
        step = defaults[0] if on_step is None else on_step
        epoch = defaults[1] if on_epoch is None else on_epoch
        steps_here = hook is not None and ("batch" in hook or hook.endswith("_step") or log_defaults(hook) == (True, False))
        if step and not steps_here:
            raise UsageError(f"self.log({name!r}, on_step=True) in {hook}: there is no step.")
        if not step and not epoch:
            raise UsageError(f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing.")
        return step, epoch

    def take(self, hook: str, name: str, value: Any, how: How, batch_size: float | None, *, add_idx: bool) -> None:
        if not self._silent and self.state.stage in self.results:
            self.results[self.state.stage].log(hook, name, value, how, batch_size, add_idx=add_idx)

    def begin_batch(
        self, phase: str, batch_size: Callable[[], float], dataloader_idx: int | None, *, in_pieces: bool = False
    ) -> None:
        if phase in self.results:
            self.results[phase].begin_batch(batch_size, dataloader_idx, in_pieces=in_pieces)

    def publish(self, numbers: Numbers, *, write: bool, step: int | None = None) -> None:
        """Let callbacks, loggers and users see numbers.

        Args:
            step: under which loggers have them, by default `log_step`.
        """
        self.callback_metrics.update(numbers.callback)
        self.progress_bar_metrics.update(numbers.bar)
        self.logged_metrics.update(numbers.logged)
        if write and numbers.logged:
            values = {name: float(value) for name, value in numbers.logged.items()} if self.loggers else {}
            given = values.pop("step", None)
            if given is not None:
                step = int(given)
            if values and step is not None:
                self.write_metrics(values, step)
            elif values:
                self.write_metrics({"epoch": self.current_epoch, **values}, self.log_step)

    def write_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for logger in self.loggers if agree.is_rank0() else ():
            logger.log_metrics(dict(metrics), step=step)
            logger.save()

    @property
    def logs_now(self) -> bool:
        """Whether this step's numbers are written."""
        every = self.log_every_n_steps
        return self.should_stop or (every > 0 and (self.log_step + 1) % every == 0)

    def end_evaluation_batch(self, phase: str) -> None:
        if phase in self.results and not self.sanity_checking:
            self.publish(self.results[phase].of_step(), write=True, step=self._evaluated_batches[phase])
            self._evaluated_batches[phase] += 1

    def place_of(self, phase: str, step: int) -> tuple[int, int | None]:
        """(batch_idx, dataloader_idx) of an evaluation's step; the second is None for a single loader."""
        lengths = self.num_loaders.get(phase, [None])
        if len(lengths) == 1:
            return step, None
        for i, length in enumerate(lengths):
            if length is None or step < length:
                return step, i
            step -= length
        return step, len(lengths) - 1

    def loader_idx_of(self, phase: str) -> int:
        progress = getattr(self.unit, f"{'eval' if phase == 'validation' else phase}_progress", None)
        found = self.place_of(phase, progress.num_steps_completed_in_epoch)[1] if progress is not None else None
        return found or 0

    # --- manual optimization

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.unit.backward_by_hand(loss, *args, **kwargs)

    def backward_averages(self, flag: bool) -> AbstractContextManager[None]:
        made: AbstractContextManager[None] = self.unit.averages(flag)
        return made

    # --- checkpoints

    def dump_checkpoint(self) -> dict[str, Any]:
        """What is saved beside tensors by name."""
        module = self.lightning_module
        dump = _NotSaved(epoch=self.current_epoch, global_step=self.global_step, class_name=class_name(module))
        dump["log_step"] = self.log_step + self.has_stepped
        dump["hyper_parameters"] = {name: value for name, value in module.hparams.items() if _is_plain(value)}
        progress = self.unit.train_progress if self.unit is not None else None
        if progress is not None and (progress.num_steps_completed_in_epoch or progress.evaluation_due):
            dump["logged"] = self.results["train"].state()
        if (generator := getattr(self.train_dataloader, "generator", None)) is not None:
            dump["generator"] = generator.get_state()
        if self.datamodule is not None:
            dump["datamodule"] = self.datamodule.state_dict()
        for callback in self.lightning_callbacks:
            if hasattr(callback, "on_save_checkpoint"):
                callback.on_save_checkpoint(self, module, dump)
        module.on_save_checkpoint(dump)
        keys = {each.state_key: each.state_dict() for each in self.lightning_callbacks if hasattr(each, "state_key")}
        dump["callbacks"] = {name: state for name, state in keys.items() if state}
        return dict(dump)

    def go_on(self, unit: Any) -> None:
        """Count from where the latest `fit` of this object ended, as Lightning does: with the same limits nothing is left."""
        if self._progress_before is not None:
            for name in _COUNTS & self._progress_before.keys() & vars(unit).keys():
                getattr(unit, name).load_state_dict(self._progress_before[name])
            unit.restored()
            unit.counted(self._steps_before)
            self.current_epoch = unit.train_progress.num_epochs_completed

    def keep_progress(self) -> None:
        counts = _COUNTS & vars(self.unit).keys()
        self._steps_before = self.global_step
        self._progress_before = {name: getattr(self.unit, name).state_dict() for name in counts}
        self.log_step += self.has_stepped
        self.has_stepped = False

    def count_from(self, saved: dict[str, Any]) -> None:
        """What optimizers and loggers have counted, of a checkpoint from which `fit` goes on."""
        self.unit.counted(saved["global_step"])
        self.log_step, self.has_stepped = saved.get("log_step", saved["global_step"]), False
        self.results["train"].load_state(saved.get("logged", []))
        if (generator := getattr(self.train_dataloader, "generator", None)) is not None and "generator" in saved:
            generator.set_state(saved["generator"])

    def load_module_hook(self, saved: dict[str, Any]) -> None:
        """The module's `on_load_checkpoint`, before its weights come."""
        self.lightning_module.on_load_checkpoint(saved)

    def load_states(self, saved: dict[str, Any]) -> None:
        """What data module and callbacks saved, after the module's weights came."""
        if self.datamodule is not None and saved.get("datamodule"):
            self.datamodule.load_state_dict(saved["datamodule"])
        for callback in self.lightning_callbacks:
            if hasattr(callback, "on_load_checkpoint"):
                callback.on_load_checkpoint(self, self.lightning_module, saved)
        states = saved.get("callbacks") or {}
        for callback in self.lightning_callbacks:
            if state := states.get(getattr(callback, "state_key", "")):
                try:
                    callback.load_state_dict(copy.deepcopy(state))
                except Exception as error:
                    error.add_note(f"{type(callback).__name__}.load_state_dict got its state of the checkpoint: {list(state)}.")
                    raise

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Save now, as a folder of that name. Collective."""
        raise NotImplementedError


def _is_plain(value: Any) -> bool:
    try:
        plain.encode(value, {})
    except CheckpointError:
        return False
    return True
