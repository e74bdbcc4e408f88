"""How a Trainer runs a LightningModule: in this process, in ranks that were launched, or in ranks that it starts."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch import saving
from echelon.compat.lightning.pytorch.automatic import AutomaticUnit
from echelon.compat.lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from echelon.compat.lightning.pytorch.data import batches_of
from echelon.compat.lightning.pytorch.datamodule import LightningDataModule
from echelon.compat.lightning.pytorch.loggers import InFolders, Online, default_logger
from echelon.compat.lightning.pytorch.module import LightningModule
from echelon.compat.lightning.pytorch.returning import bring_back, keeps
from echelon.compat.lightning.pytorch.running import Running
from echelon.compat.lightning.pytorch.session import PHASES, Session, Work
from echelon.compat.trainer.rank import Done, in_order
from echelon.compat.trainer.rebuild import recall, remembered
from echelon.compat.trainer.trainer import is_launched, visible
from echelon.contracts.overrides import overrides
from echelon.launcher.calls import end_bootstrap
from echelon.launcher.functions.launch import launch
from echelon.loop.state import EntryPoint, State
from echelon.parallel.ddp.ddp import DDPStrategy
from echelon.parallel.names import without_compile
from echelon.parallel.shards import whole
from echelon.world import agree, rng
from echelon.world.init import World, init_from_env

__all__ = ["ModuleRuns"]

# What a rank's Trainer knows after a run, and the caller's is to know.
_KNOWN = (
    "callback_metrics",
    "logged_metrics",
    "progress_bar_metrics",
    "current_epoch",
    "log_step",
    "should_stop",
    "_steps_before",
    "_progress_before",
    "num_training_batches",
    "num_val_batches",
    "num_test_batches",
    "num_predict_batches",
    "ckpt_path",
)
# What another process does not get.
_OF_A_CALL = (
    "handles",
    "unit",
    "loop_state",
    "lightning_module",
    "datamodule",
    "results",
    "train_dataloader",
    "val_dataloaders",
    "test_dataloaders",
    "predict_dataloaders",
)
# What torch keeps in a module, and what is only of a run.
_OF_TORCH = frozenset(vars(torch.nn.Module())) | {"_trainer", "_hook", "_within_step", "_toggled", "_wanted"}


@dataclass(frozen=True)
class ModuleDone(Done):
    """What a rank gives back of a LightningModule. Only rank 0's has the rest.

    Args:
        numbers: what `validate` or `test` returns.
        trainer, loggers: their attributes, pickled one by one.
        kinds: the types of those in `callbacks`.
    """

    numbers: Any = None
    trainer: dict[str, bytes] | None = None
    loggers: tuple[dict[str, bytes], ...] = ()
    kinds: tuple[str, ...] = ()


class ModuleRuns(Running):
    """Of a Trainer, whose constructor sets the attributes."""

    accelerator: str
    layout: Any
    of_modules: dict[str, Any]
    given_limits: dict[str, Any]
    given_callbacks: list[Any]
    loop_callbacks: list[Any]
    unit_options: dict[str, Any]
    fast_dev_run: bool | int
    enable_checkpointing: bool | None
    val_check_interval: float | int
    check_val_every_n_epoch: int | None
    max_epochs: Any
    max_steps: Any
    run_dir: Path | None
    added_to_module: set[str]
    find_train_loader: Callable[[], tuple[Any, int | None]]
    validates = False
    keeps_predictions = True
    num_training_batches = math.inf

    def _begin_running(self) -> None:
        super()._begin_running()
        for name, value in self.of_modules.items():
            if name not in ("logger", "detect_anomaly", "sync_batchnorm"):
                setattr(self, name, value)
        self.batches: dict[str, int | None] = {}
        self.num_loaders: dict[str, list[int | None]] = {}
        self.lightning_callbacks = list(self.given_callbacks)
        if self.enable_checkpointing is False and any(isinstance(each, ModelCheckpoint) for each in self.given_callbacks):
            raise UsageError("enable_checkpointing=False, and a ModelCheckpoint among the callbacks. Leave one of them out.")
        if self.enable_checkpointing is not False and not self.checkpoint_callbacks:
            self.lightning_callbacks.append(ModelCheckpoint())
        self.loggers = self._chosen_loggers()
        if self.of_modules["sync_batchnorm"] and self.layout in ("auto", None):
            self.layout = DDPStrategy(sync_batchnorm=True)
        elif self.of_modules["sync_batchnorm"] and isinstance(self.layout, DDPStrategy):
            self.layout = replace(self.layout, sync_batchnorm=True)
        elif self.of_modules["sync_batchnorm"]:
            raise UsageError("sync_batchnorm=True is of strategy 'ddp'. Give DDPStrategy(sync_batchnorm=True), or no strategy.")

    def _chosen_loggers(self) -> list[Any]:
        given = self.of_modules["logger"]
        if given is False or self.fast_dev_run:
            return []
        if given is None or given is True:
            return [default_logger(self.default_root_dir)]
        found = list(given) if isinstance(given, (list, tuple)) else [given]
        for each in found:
            if not callable(getattr(each, "log_metrics", None)):
                raise UsageError(f"logger must be True, False or have log_metrics(metrics, step), got {type(each).__name__}.")
        return found

    # --- options, as a module's code asks for them

    @property
    def default_root_dir(self) -> str:
        return str(self.run_dir) if self.run_dir is not None else os.getcwd()

    @property
    def log_folder(self) -> str:
        """Of the first logger, or the root. Rank 0's counts."""
        first = self.loggers[0] if self.loggers else None
        if isinstance(first, Online):
            return os.path.join(first.save_dir, str(first.name), str(first.version))
        return getattr(first, "log_dir", None) or self.default_root_dir

    @property
    def log_dir(self) -> str:
        return agree.from_rank0(lambda: self.log_folder)

    @property
    def accumulate_grad_batches(self) -> int:
        return overrides().accumulation or self.unit_options.get("accumulate") or 1

    @property
    def gradient_clip_val(self) -> float | None:
        return self.unit_options.get("clip_grad_norm") or self.unit_options.get("clip_grad_value")

    @property
    def options_of_unit(self) -> dict[str, Any]:
        anomaly = {"detect_anomaly": True} if self.of_modules["detect_anomaly"] else {}
        return {**self.unit_options, **anomaly}

    @property
    def epochs_at_most(self) -> float | None:
        return math.inf if self.max_epochs is None and self.max_steps is None else self.max_epochs

    @property
    def updates_at_most(self) -> int | None:
        return None if self.max_steps in (None, -1) else int(self.max_steps)

    @property
    def estimated_stepping_batches(self) -> float:
        """Updates of the whole run, for schedules."""
        most = self.updates_at_most
        if self.max_epochs is None or self.max_epochs == math.inf:
            return math.inf if most is None else most
        loader, limit = self.find_train_loader()
        batches = batches_of(loader, limit)
        updates = (
            math.ceil(batches / self.accumulate_grad_batches) * max(self.max_epochs, 1) if math.isfinite(batches) else math.inf
        )
        return updates if most is None else min(updates, most)

    def limit(self, phase: str) -> Any:
        """Batches of an epoch, or a part of them."""
        overfit = self.of_modules["overfit_batches"]
        return overfit if overfit and phase in ("train", "val") else self.given_limits.get(phase)

    # --- a call

    def run_module(self, call: str, given: Any, loaders: tuple[Any, Any], datamodule: Any, ckpt_path: Any) -> Any:
        end_bootstrap(f"trainer.{call}")
        module = self._module(call, given)
        if isinstance(loaders[0], LightningDataModule):
            loaders, datamodule = (None, None), loaders[0]
        if datamodule is not None and any(each is not None for each in loaders):
            raise UsageError(f"trainer.{call}: give dataloaders or a datamodule, not both.")
        if given is None and ckpt_path is None and self.checkpoint_callback is not None and self._steps_before:
            ckpt_path = "best"
        work = Work(call, module, loaders, datamodule, self._path_of(ckpt_path))
        if is_launched():
            self._check_launched()
        elif self.num_nodes > 1:
            raise UsageError(
                "num_nodes > 1: start the script on each node: with `echelon submit`, `srun python ...`, or torchrun."
            )
        elif (ranks := self._local_ranks()) > 1 or self.device_numbers:
            return self._launch_module(ranks, work)
        return Session(self, work).run()

    def _module(self, call: str, given: Any) -> LightningModule:
        found = given if given is not None else self.lightning_module
        if found is None:
            raise UsageError(f"trainer.{call}() without a module: there was no fit before. Give one.")
        plain = without_compile(found)
        theirs = next((c for c in type(plain).__mro__ if c.__module__.startswith(("lightning.", "pytorch_lightning."))), None)
        if not isinstance(plain, LightningModule) and theirs is not None:
            raise UsageError(
                f"trainer.{call}: {type(plain).__name__} of {type(plain).__module__} is a {theirs.__name__} of Lightning's own, "
                f"{theirs.__module__}, and this Trainer is echelon's. Import both from echelon.compat.lightning: "
                "change the import lines of all files of the program."
            )
        if not isinstance(plain, LightningModule):
            raise UsageError(f"trainer.{call}: the model must be a LightningModule or an AutoUnit, got {type(found).__name__}.")
        if plain is not found:
            raise UsageError("torch.compile(module): compile its parts instead, in configure_model: `self.net.compile()`.")
        found_module: LightningModule = plain
        return found_module

    def _path_of(self, ckpt_path: Any) -> str | None:
        """Where a checkpoint is that is called "best" or "last"."""
        if ckpt_path is None or ckpt_path not in ("best", "last"):
            return str(ckpt_path) if ckpt_path is not None else None
        callback = self.checkpoint_callback
        if callback is None:
            raise UsageError(f"ckpt_path={ckpt_path!r} needs a ModelCheckpoint among the callbacks.")
        if ckpt_path == "best":
            found = callback.best_model_path
        else:
            found = callback.newest_last()
            if not found:
                return None if callback.save_last else callback.best_model_path or None
        if not found:
            raise UsageError(f"ckpt_path={ckpt_path!r}: the ModelCheckpoint has saved none.")
        return str(found)

    def begin_call(self, work: Work, device: torch.device) -> None:
        module, datamodule, call = work.module, work.datamodule, work.call
        while self.handles:
            self.handles.pop().remove()
        self.lightning_module, self.datamodule, self.root_device = module, datamodule, device
        module.trainer = self
        if datamodule is not None:
            datamodule.trainer = self
        self.state.fn, self.state.status, self.state.stage, self.unit = call, "running", PHASES[call], None
        self.ckpt_path = work.ckpt_path
        self._evaluated_batches = dict.fromkeys(self._evaluated_batches, 0)
        self.callback_metrics, self.logged_metrics, self.progress_bar_metrics = {}, {}, {}
        self.should_stop = False
        for results in self.results.values():
            results.reset()
        own = module.configure_callbacks()
        own = list(own) if isinstance(own, (list, tuple)) else [own]
        kinds = tuple(type(each) for each in own)
        kept = [each for each in self.lightning_callbacks if type(each) not in kinds]
        savers = [each for each in (*kept, *own) if isinstance(each, ModelCheckpoint)]
        others = [each for each in (*kept, *own) if not isinstance(each, ModelCheckpoint)]
        self.lightning_callbacks = [*others, *savers]  # what saves comes last, and sees what the others have changed
        self.callbacks = [*self.lightning_callbacks, *self.loop_callbacks]
        for each in self.lightning_callbacks:
            each.log, each.log_dict = module.log, module.log_dict
        for logger in self.loggers:
            if isinstance(logger, InFolders):
                logger.choose_version()

    def set_up_hooks(self, call: str) -> None:
        if self.datamodule is not None:
            self.datamodule.setup(call)
        with self.hook("setup"):
            self._call_callbacks("setup", self.lightning_callbacks, (call,))
            self.lightning_module.setup(call)

    def call_at_end(self, call: str) -> None:
        if call == "fit":
            self.call("on_fit_end")
        if self.datamodule is not None:
            self.datamodule.teardown(call)
        with self.hook("teardown"):
            self._call_callbacks("teardown", self.lightning_callbacks, (call,))
            self.lightning_module.teardown(call)
        if call == "fit":
            self.keep_progress()
        for logger in self.loggers if agree.is_rank0() and call == "fit" else ():
            logger.finalize("success")

    def tell_of(self, error: BaseException) -> None:
        """No collective here: other ranks may not have it."""
        self._call_callbacks("on_exception", self.lightning_callbacks, (error,))
        if self.datamodule is not None:
            self.datamodule.on_exception(error)

    def log_hyperparams(self) -> None:
        module = self.lightning_module
        if module.hparams and vars(module).get("_hparams_logged", True):
            for logger in self.loggers if agree.is_rank0() else ():
                logger.log_hyperparams(module.hparams_initial)
                logger.save()

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Save now, as a folder of that name; nothing where `echelon prove` or `plan` looks on. Collective."""
        if overrides().observes:
            return
        if self.lightning_module is None:
            raise UsageError("trainer.save_checkpoint: there is no module yet. Call fit first.")
        unit = self.unit
        if unit is None:  # after a run in other processes
            unit = AutomaticUnit(self, self.lightning_module, training=False)
        state = self.loop_state if self.unit is not None else None
        saving.write(Path(filepath), state or State(entry_point=EntryPoint.TRAIN), unit)

    # --- ranks of its own

    def _launch_module(self, ranks: int, work: Work) -> Any:
        module, folder = work.module, Path(tempfile.mkdtemp(prefix="echelon-fit-"))
        try:
            numbers = self.device_numbers
            env = {"CUDA_VISIBLE_DEVICES": visible(numbers)} if numbers else {}
            env |= {"CUDA_VISIBLE_DEVICES": ""} if self.accelerator == "cpu" else {}
            work, device = replace(work, seeds=rng.draw()), module.device
            module.cpu()
            self.lightning_module = self.datamodule = self.unit = None
            self.state.status = "interrupted"  # unless it comes to its end
            self.close_trackers()  # rank 0 goes on in their runs
            try:
                done = launch(trainer_run, ranks=ranks, args=(self, work, str(folder)), env=env, run_dir=self.run_dir)
            finally:
                module.to(device)
            if work.call == "fit":
                bring_back(self, module, work.datamodule, folder / "after.pt")
            self.lightning_module, self.datamodule, self.state.fn = module, work.datamodule, work.call
            self.state.status = "finished"
            module.trainer = self
            recall(module, done[0].unit)
            recall(self, done[0].trainer or {})
            left = list(zip(done[0].kinds, done[0].callbacks, strict=True))  # in another order, and with the module's own
            for mine in self.lightning_callbacks:
                if (same := next((i for i, (kind, _) in enumerate(left) if kind == _kind(mine)), None)) is not None:
                    recall(mine, left.pop(same)[1])
            for mine, theirs in zip(self.loggers, done[0].loggers, strict=False):
                recall(mine, theirs)
            return in_order(done) if work.call == "predict" else done[0].numbers
        finally:
            if not keeps(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def close_trackers(self) -> None:
        for each in self.loggers:
            if isinstance(each, Online):
                each.close()

    def __getstate__(self) -> dict[str, Any]:
        left = ("find_train_loader", *_OF_A_CALL)
        kept = {name: value for name, value in vars(self).items() if name not in left}
        return {**kept, "lightning_optimizers": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        fresh = Running()
        fresh._begin_running()
        for name in _OF_A_CALL:
            setattr(self, name, getattr(fresh, name))


def trainer_run(trainer: ModuleRuns, work: Work, folder: str) -> ModuleDone:
    """In a rank that the Trainer started."""
    rng.start(work.seeds)
    init_from_env("cpu" if trainer.accelerator == "cpu" else None)
    made = Session(trainer, work).run()
    trainer.close_trackers()
    unit = trainer.unit
    world = World.current(torch.device("cpu"))
    if work.call == "fit":
        (prepared,) = unit.prepared_modules().values()
        state = {name: whole(t).detach().cpu() for name, t in prepared.state().state_dict().items()}
        if world.rank == 0:
            torch.save(state, Path(folder) / "after.pt")
    data_rank, _ = unit.data_rank_and_size or (world.rank, world.size)
    outputs = made if work.call == "predict" else []
    if world.rank:
        return ModuleDone({}, data_rank, outputs)
    own = {name: value for name, value in vars(work.module).items() if name not in _OF_TORCH | trainer.added_to_module}
    known = {name: getattr(trainer, name) for name in _KNOWN}
    return ModuleDone(
        {},
        data_rank,
        outputs,
        remembered(work.module, own),
        [remembered(each, _state_of(each)) for each in trainer.lightning_callbacks],
        numbers=made if work.call != "predict" else None,
        kinds=tuple(_kind(each) for each in trainer.lightning_callbacks),
        trainer=remembered(trainer, known),
        loggers=tuple(remembered(each, _state_of(each)) for each in trainer.loggers),
    )


def _kind(callback: Any) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _state_of(thing: Any) -> dict[str, Any]:
    found = thing.__getstate__()
    return found if isinstance(found, dict) else {}
