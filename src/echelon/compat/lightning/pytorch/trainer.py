"""`echelon.compat.trainer.trainer.Trainer` with Lightning's options, also those of older releases.

It trains an AutoUnit, as its base class does, or a LightningModule: each call is then a Session in each rank.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch import options, saving
from echelon.compat.lightning.pytorch.absent import ARGPARSE, TRAINER, Accepted
from echelon.compat.lightning.pytorch.automatic import AutomaticUnit
from echelon.compat.lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ModelCheckpoint
from echelon.compat.lightning.pytorch.data import batches_of
from echelon.compat.lightning.pytorch.datamodule import LightningDataModule
from echelon.compat.lightning.pytorch.loggers import InFolders, chosen_loggers
from echelon.compat.lightning.pytorch.module import LightningModule
from echelon.compat.lightning.pytorch.session import Session
from echelon.compat.lightning.pytorch.states import TrainerState
from echelon.compat.lightning.pytorch.strategies import among_plugins
from echelon.compat.trainer import trainer
from echelon.compat.trainer.trainer import is_launched, without_layout
from echelon.contracts.overrides import overrides
from echelon.contracts.rank import RankInfo
from echelon.launcher.calls import end_bootstrap
from echelon.loop.state import EntryPoint, State, step_under_way
from echelon.loop.unit import TrainUnit
from echelon.parallel.ddp.ddp import DDPStrategy
from echelon.parallel.names import without_compile
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.strategy import Strategy
from echelon.world import agree

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

_DEFAULT_EPOCHS = 1000
_PRECISIONS = {None: "32-true", torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}
# Attributes that are not sent to another process.
_OF_A_PROCESS = (
    *("session", "lightning_module", "datamodule"),
    *("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders"),
)


# Methods and properties that differ in a name only.


def _evaluation(call: str) -> Any:
    def run(
        self: Any,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """As in the base class; for a LightningModule the numbers that it logs, a dict for each loader."""
        metrics: list[dict[str, float]] = self._run(call, model, (dataloaders, None), datamodule, ckpt_path)
        return metrics

    run.__name__ = call
    return run


def _of_rank(name: str) -> Any:
    return property(lambda self: getattr(RankInfo.from_env(), name))


def _in_stage(stage: str) -> Any:
    return property(lambda self: self.state.stage == stage)


def _callbacks(kind: type) -> Any:
    return property(lambda self: [each for each in self.lightning_callbacks if isinstance(each, kind)])


def _first(name: str) -> Any:
    return property(lambda self: next(iter(getattr(self, name)), None))


class Trainer(trainer.Trainer):
    """Starts ranks and trains in them, an AutoUnit or a LightningModule.

    Args:
        devices: how many ranks on this machine, or which GPUs, as a list; "auto" is one rank per GPU, else one.
        strategy: for units that were built without one; also Lightning's names. "auto" is "ddp" for several ranks.
        num_nodes: on how many nodes a launcher started this script; this class starts ranks on its own machine only.
        accelerator: "cpu" leaves GPUs alone; "gpu" insists on them.
        max_epochs, max_steps: when to stop; steps are updates. Without both, 1000 epochs; -1 is no limit.
        precision: as AutoUnit's, or Lightning's names for these, such as "bf16-mixed".
        accumulate_grad_batches, gradient_clip_val: AutoUnit's `accumulate` and `clip_grad_norm`; with
            gradient_clip_algorithm="value", `clip_grad_value`. None leaves the unit's own.
        callbacks: run in every rank; attributes of rank 0's callbacks come back if they can be pickled.
        default_root_dir: the run folder of each `fit`; its folder `checkpoints` has the unit's state after every epoch. For a
            LightningModule, where its logger's folder is; by default the working directory.
        enable_checkpointing: False saves no checkpoints. By default, an AutoUnit's are saved if there is a folder and no saver
            among the callbacks; a LightningModule's always.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: batches of an epoch, per rank; for a
            LightningModule also a part of them, such as 0.1.
        detect_anomaly: as AutoUnit's.
        fast_dev_run: train only so many batches (True is one) of one epoch, without checkpoints, to see whether it runs.
        check_val_every_n_epoch: how often to evaluate; `val_check_interval` counts batches instead, or is a part of an epoch.
        gpus: Lightning's older name of `devices`. `Trainer(gpus=2, accelerator="ddp")` works, with a hint.
        plugins: environments, which have no effect, and Lightning 1's DDPPlugin, which is the strategy.
        others: more of Lightning's options for a LightningModule, listed in `options`. Options of display are accepted without
            effect and logged; any other is refused.
    Attributes:
        session: the current call in this process, or the latest.
        callback_metrics, logged_metrics, progress_bar_metrics: the latest numbers by name, as 0-dim tensors.
        should_stop: set it to True to end `fit` after the current step.
        progress_before: counts of this object's earlier fits, from which the next one continues.
        train_dataloader, val_dataloaders, test_dataloaders, predict_dataloaders: loaders of the current or latest call; those
            for evaluation and prediction are one loader or a list, as they were given. None before.
        ckpt_path: the checkpoint that the latest call began from.
        num_val_batches, num_test_batches, num_predict_batches: batches of each loader, per rank; infinite without a length.
    Raises:
        UsageError: a value is invalid; the message names it.
    """

    log_every_n_steps: int
    num_sanity_val_steps: int
    callback_metrics: dict[str, Any]
    reload_dataloaders_every_n_epochs = 0
    keeps_predictions, resumes = True, False

    add_argparse_args = from_argparse_args = parse_argparser = ARGPARSE

    def __init__(
        self,
        devices: int | str | Sequence[int] = "auto",
        strategy: Strategy | str | None = "auto",
        num_nodes: int = 1,
        *,
        accelerator: str = "auto",
        max_epochs: int | None = None,
        max_steps: int | None = None,
        precision: str | int | torch.dtype | Precision | None = None,
        accumulate_grad_batches: int | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = "norm",
        callbacks: Any = None,
        default_root_dir: str | Path | None = None,
        enable_checkpointing: bool | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        check_val_every_n_epoch: int | None = 1,
        val_check_interval: int | float | None = None,
        fast_dev_run: bool | int = False,
        detect_anomaly: bool | None = None,
        gpus: int | str | Sequence[int] | None = None,
        plugins: Any = None,
        **others: Any,
    ) -> None:
        self.of_modules, self._asked = options.sorted_out(others)
        given = {
            "train": limit_train_batches,
            "val": limit_val_batches,
            "test": limit_test_batches,
            "predict": limit_predict_batches,
        }
        self.given_limits, self.fast_dev_run = options.checked_limits(fast_dev_run, given), fast_dev_run
        if fast_dev_run:
            max_epochs, max_steps, enable_checkpointing = 1, None, False
            val_check_interval, check_val_every_n_epoch = None, 1
        if gradient_clip_algorithm not in ("norm", "value", None):
            raise UsageError(f"gradient_clip_algorithm {gradient_clip_algorithm!r}: 'norm' or 'value'.")
        accelerator, strategy = without_layout(accelerator, strategy, "strategy")
        strategy, environments = among_plugins(plugins, strategy)
        self.val_check_interval = options.interval(val_check_interval)
        self.check_val_every_n_epoch = check_val_every_n_epoch
        changes: dict[str, Any] = {
            "detect_anomaly": detect_anomaly or None,
            "precision": options.precision_of(precision),
            "accumulate": accumulate_grad_batches,
            "clip_grad_value" if gradient_clip_algorithm == "value" else "clip_grad_norm": gradient_clip_val or None,
        }
        every = [] if callbacks is None else [callbacks] if not isinstance(callbacks, Iterable) else list(callbacks)
        self.given_callbacks = [each for each in every if isinstance(each, Callback)]
        without_effect = [each for each in [*every, *environments] if isinstance(each, Accepted)]
        self._in_place = self._asked | {type(each).__name__: each.in_place for each in without_effect}
        super().__init__(
            options.devices_of(devices),
            strategy,
            num_nodes,
            accelerator=accelerator,
            max_epochs=math.inf if max_epochs == -1 else max_epochs,
            max_updates=None if max_steps == -1 else max_steps,
            max_steps_per_epoch={phase: None if isinstance(n, float) else n for phase, n in self.given_limits.items()},
            evaluate_every_n_epochs=None if isinstance(self.val_check_interval, int) else check_val_every_n_epoch,
            unit_options={name: value for name, value in changes.items() if value is not None},
            callbacks=[each for each in every if not isinstance(each, Callback)],
            run_dir=default_root_dir,
            gpus=options.devices_of(gpus),
        )
        self.enable_checkpointing = enable_checkpointing
        self.saves = self.saves and enable_checkpointing is not False
        if self.checkpoints is not None:
            self.checkpoints = replace(self.checkpoints, every="epoch", keep=1)
        self.callbacks = [*self.given_callbacks, *self.loop_callbacks]
        for name, value in self.of_modules.items():
            if name != "logger":
                setattr(self, name, value)
        self._begin()

    def _begin(self) -> None:
        """Set what a LightningModule needs before the first call."""
        self.state = TrainerState()
        self.session: Session | None = None
        self.lightning_module: Any = None
        self.datamodule: Any = None
        self.root_device: torch.device | None = None
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.should_stop = self.sanity_checking = False
        self.current_epoch = 0
        self.progress_before: dict[str, Any] | None = None
        self.ckpt_path: str | None = None
        self.num_training_batches = math.inf
        for phase, limit in self.given_limits.items():
            setattr(self, f"limit_{phase}_batches", limit)
        self.train_dataloader: Any = None
        for phase in ("val", "test", "predict"):
            setattr(self, f"{phase}_dataloaders", None)
            setattr(self, f"num_{phase}_batches", [])
        self.lightning_callbacks = list(self.given_callbacks)
        has_saver = any(isinstance(each, ModelCheckpoint) for each in self.given_callbacks)
        if has_saver and self.enable_checkpointing is False and not self.fast_dev_run:  # which saves nothing
            raise UsageError("enable_checkpointing=False, and a ModelCheckpoint among the callbacks. Leave one of them out.")
        if self.enable_checkpointing is not False and not self.checkpoint_callbacks:
            self.lightning_callbacks.append(ModelCheckpoint())
        silent = bool(self.fast_dev_run)
        self.loggers = chosen_loggers(self.of_modules["logger"], self.default_root_dir, silent=silent)
        if self.of_modules["sync_batchnorm"]:
            ours = DDPStrategy() if self.layout in ("auto", None) else self.layout
            if not isinstance(ours, DDPStrategy):
                raise UsageError(
                    "sync_batchnorm=True is of strategy 'ddp'. Give DDPStrategy(sync_batchnorm=True), or no strategy."
                )
            self.layout = replace(ours, sync_batchnorm=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **dict.fromkeys(_OF_A_PROCESS)}

    def __getattr__(self, name: str) -> Any:
        said = f"Trainer.{name} is not part of echelon.compat. Instead: {TRAINER[name]}." if name in TRAINER else ""
        raise AttributeError(said or f"'Trainer' object has no attribute {name!r}")

    # --- for an AutoUnit

    @property
    def max_steps(self) -> Any:
        return self.max_updates

    def training_limits(self) -> dict[str, Any]:
        """As in the base class, with evaluations within an epoch counted in batches."""
        interval = self.val_check_interval
        return {**super().training_limits(), "evaluate_every_n_steps": interval if isinstance(interval, int) else None}

    def _check_for_units(self) -> None:
        """
        Raises:
            UsageError: an option applies to a LightningModule only.
        """
        limits = {f"limit_{phase}_batches": limit for phase, limit in self.given_limits.items()}
        options.check_for_units(self.of_modules, {**limits, "val_check_interval": self.val_check_interval})
        for name in [type(each).__name__ for each in self.given_callbacks if not isinstance(each, Accepted)]:
            raise UsageError(f"callbacks: {name} acts on a LightningModule. For an AutoUnit write an echelon.Callback.")
        if self.enable_checkpointing and self.run_dir is None and not self.has_saver:
            raise UsageError("enable_checkpointing=True: where to? Give default_root_dir, or a DistributedCheckpointSaver.")

    # --- for both

    def fit(
        self,
        model: LightningModule | TrainUnit[Any] | Callable[[], TrainUnit[Any]],
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """As `echelon.compat.trainer.trainer.Trainer.fit`; or train a LightningModule.

        Args:
            datamodule: used instead of loaders; it may also be the second argument.
            ckpt_path: a checkpoint to continue from; "last" is the newest, "best" the best that a ModelCheckpoint has.
        """
        if self.max_epochs is None and self.max_steps is None:
            self.max_epochs = _DEFAULT_EPOCHS
            logger.warning("Trainer without max_epochs and max_steps: %s epochs, as Lightning does", _DEFAULT_EPOCHS)
        self._run("fit", model, (train_dataloaders, val_dataloaders), datamodule, ckpt_path)

    validate, test = map(_evaluation, ("validate", "test"))

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """As in the base class: batch by batch, in the order of the loader's samples on any number of ranks that it starts.

        Args:
            return_predictions: False keeps no predictions and returns None; a callback's on_predict_batch_end gets each.
        """
        self.keeps_predictions = return_predictions is not False
        predictions: list[Any] = self._run("predict", model, (dataloaders, None), datamodule, ckpt_path)
        return predictions if self.keeps_predictions else None

    def _tell_of_options(self) -> None:
        """Log, once, what has no effect, and what there is instead."""
        if self._in_place and agree.is_rank0():
            said = "; ".join(f"{name}: {what}" for name, what in self._in_place.items())
            logger.log(logging.WARNING if self._asked else logging.INFO, "taken without effect: %s", said)
        self._asked, self._in_place = {}, {}

    def _run(self, call: str, model: Any, loaders: tuple[Any, Any], datamodule: Any, ckpt_path: Any) -> Any:
        if model is not None and not isinstance(model, torch.nn.Module):
            self._check_for_units()
            return self._go(call, model, loaders, ckpt_path)
        self._tell_of_options()
        end_bootstrap(f"trainer.{call}")
        module = self._module(call, model)
        if isinstance(loaders[0], LightningDataModule):
            loaders, datamodule = (None, None), loaders[0]
        if datamodule is not None and any(each is not None for each in loaders):
            raise UsageError(f"trainer.{call}: give dataloaders or a datamodule, not both.")
        if model is None and ckpt_path is None and self.checkpoint_callback is not None and self.progress_before:
            ckpt_path = "best"
        return self.run(Session(self, call, loaders, self._path_of(ckpt_path), module, datamodule))

    # --- for a LightningModule

    def _module(self, call: str, given: Any) -> LightningModule:
        module = given if given is not None else self.lightning_module
        if module is None:
            raise UsageError(f"trainer.{call}() without a module: there was no fit before. Give one.")
        plain = without_compile(module)
        theirs = next((c for c in type(plain).__mro__ if c.__module__.startswith(("lightning.", "pytorch_lightning."))), None)
        if not isinstance(plain, LightningModule) and theirs is not None:
            raise UsageError(
                f"trainer.{call}: {type(plain).__name__} of {type(plain).__module__} is a {theirs.__name__} of Lightning's own, "
                f"{theirs.__module__}, and this Trainer is echelon's. Import both from echelon.compat.lightning: "
                "change the import lines of all files of the program."
            )
        if not isinstance(plain, LightningModule):
            raise UsageError(f"trainer.{call}: the model must be a LightningModule or an AutoUnit, got {type(module).__name__}.")
        if plain is not module:
            raise UsageError("torch.compile(module): compile its parts instead, in configure_model: `self.net.compile()`.")
        return plain  # type: ignore[no-any-return]

    def _path_of(self, ckpt_path: Any) -> str | None:
        """The path of a checkpoint, also of "best" and "last"."""
        if ckpt_path is None or ckpt_path not in ("best", "last"):
            return str(ckpt_path) if ckpt_path is not None else None
        callback = self.checkpoint_callback
        if callback is None:
            raise UsageError(f"ckpt_path={ckpt_path!r} needs a ModelCheckpoint among the callbacks.")
        if ckpt_path == "best":
            path = callback.best_model_path
        else:
            path = callback.newest_last()
            if not path:
                return None if callback.save_last else callback.best_model_path or None
        if not path:
            raise UsageError(f"ckpt_path={ckpt_path!r}: the ModelCheckpoint has saved none.")
        return str(path)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Save now, as a folder of that name. Does nothing under `echelon prove` and `plan`. Collective."""
        if overrides().observes:
            return
        if self.lightning_module is None:
            raise UsageError("trainer.save_checkpoint: there is no module yet. Call fit first.")
        if weights_only:
            logger.warning("trainer.save_checkpoint(weights_only=True) has no effect: the optimizer's state is saved, too")
        unit, state = self.unit, self._loop_state
        if unit is None:  # after a run in other processes
            if self.state.fn == "fit" and self.progress_before:
                logger.warning(
                    "trainer.save_checkpoint: the ranks that trained have ended with their optimizers, so %s has the weights and "
                    "what callbacks keep. To go on from a checkpoint, save within fit, as ModelCheckpoint(save_last=True) does, "
                    "or start the script by `echelon run`",
                    filepath,
                )
            session = Session(self, "fit", (None, None), None, self.lightning_module, None)
            unit = AutomaticUnit(session, self.lightning_module, training=False)
        saving.write(Path(filepath), state or State(entry_point=EntryPoint.TRAIN), unit)

    # --- progress and ranks, for code of modules and callbacks

    @property
    def unit(self) -> Any:
        """The unit of the current or latest call in this process; None if there is none."""
        return self.session.unit if self.session is not None else None

    @property
    def model(self) -> Any:
        return self.unit.module if self.unit is not None else self.lightning_module

    @property
    def global_step(self) -> int:
        return self.unit.updates if self._trains else self._updates_before("optimizer_steps", "train_progress")

    @property
    def log_step(self) -> int:
        """The step under which numbers are written: updates, counted when the next batch begins."""
        if not self._trains:
            return self._updates_before("train_progress")
        return int(self.unit.train_progress.num_updates_completed) - self.session.has_stepped  # type: ignore[union-attr]

    @property
    def _trains(self) -> bool:
        return self.unit is not None and self.state.fn == "fit"

    def _updates_before(self, *names: str) -> int:
        before = self.progress_before or {}
        return next((before[name]["num_updates_completed"] for name in names if name in before), 0)

    @property
    def trained(self) -> tuple[int, int]:
        """(updates, batches) so far. Batches are 0 unless no update was counted, as when optimizers are stepped directly."""
        batches = self.unit.train_progress.num_steps_completed if self.unit is not None and not self.global_step else 0
        return self.global_step, batches

    @property
    def at_boundary(self) -> bool:
        return self.unit is None or bool(self.unit.at_boundary)

    global_rank, local_rank, node_rank = map(_of_rank, ("rank", "local_rank", "node_rank"))

    @property
    def is_global_zero(self) -> bool:
        return bool(self.global_rank == 0)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [each.optimizer for each in self.session.optimizers] if self.session is not None else []

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        return list(self.unit.schedules.all) if self.unit is not None else []

    checkpoint_callbacks, early_stopping_callbacks = map(_callbacks, (Checkpoint, EarlyStopping))
    checkpoint_callback, early_stopping_callback = map(_first, ("checkpoint_callbacks", "early_stopping_callbacks"))
    logger = _first("loggers")

    def print(self, *args: Any, **kwargs: Any) -> None:
        if agree.is_rank0():
            print(*args, **kwargs)

    @property
    def interrupted(self) -> bool:
        return self.state.status == "interrupted"

    @property
    def received_sigterm(self) -> bool:
        """Whether the launcher has asked for a stop."""
        state = self._loop_state
        return state is not None and bool(state.should_stop and not state.stopped_by_script)

    training, validating, testing, predicting = map(_in_stage, ("train", "validate", "test", "predict"))

    @property
    def evaluating(self) -> bool:
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is its epoch's last, or the last that a limit allows."""
        state = self._loop_state
        return state is not None and step_under_way(state.train_state).is_last

    @property
    def _loop_state(self) -> Any:
        return self.session.loop_state if self.session is not None else None

    @property
    def val_check_batch(self) -> float:
        """After how many batches `fit` evaluates; infinite at the end of a loader without a length."""
        if isinstance(every := self.val_check_interval, int):
            return every
        batches = self.num_training_batches * every
        return max(int(batches), 1) if math.isfinite(batches) else batches

    # --- options, for code of modules

    @property
    def default_root_dir(self) -> str:
        return str(self.run_dir) if self.run_dir is not None else os.getcwd()

    @property
    def log_dir(self) -> str:
        first: Any = self.logger
        folder = "log_dir" if isinstance(first, InFolders) else "save_dir"
        return agree.from_rank0(lambda: getattr(first, folder, None) or self.default_root_dir)

    @property
    def accumulate_grad_batches(self) -> int:
        return overrides().accumulation or self.unit_options.get("accumulate") or 1

    @property
    def gradient_clip_val(self) -> float | None:
        return self.unit_options.get("clip_grad_norm") or self.unit_options.get("clip_grad_value")

    @property
    def estimated_stepping_batches(self) -> float:
        """Updates of the whole run, for schedules."""
        most = self.max_updates
        if self.max_epochs is None or self.max_epochs == math.inf:
            return math.inf if most is None else most
        if self.session is None:
            raise UsageError("trainer.estimated_stepping_batches: how many batches there are is known in fit.")
        loader, limit = self.session.train_loader()
        batches = batches_of(loader, limit)
        per_epoch = math.ceil(batches / self.accumulate_grad_batches) if math.isfinite(batches) else math.inf
        updates = per_epoch * max(self.max_epochs, 1)
        return updates if most is None else min(updates, most)

    def limit(self, phase: str) -> Any:
        """The limit of a phase's batches in an epoch, or the part of them."""
        overfit = self.of_modules["overfit_batches"] if not self.fast_dev_run else 0
        return overfit if overfit and phase in ("train", "val") else getattr(self, f"limit_{phase}_batches")

    @property
    def precision(self) -> str:
        """The precision under Lightning's name."""
        return _PRECISIONS[Precision.of(self.unit_options.get("precision")).dtype]

    @property
    def gradient_clip_algorithm(self) -> str | None:
        return "value" if "clip_grad_value" in self.unit_options else "norm" if "clip_grad_norm" in self.unit_options else None

    @property
    def num_devices(self) -> int:
        """Ranks of this node: those that run, or that a call will start."""
        return RankInfo.from_env().local_world_size if is_launched() else self._local_ranks()

    @property
    def world_size(self) -> int:
        """As `num_devices`, for all nodes."""
        return RankInfo.from_env().world_size if is_launched() else self._local_ranks() * self.num_nodes

    @property
    def device_ids(self) -> list[int]:
        """The number of this rank's device, in a list."""
        return [(self.root_device.index if self.root_device is not None else None) or 0]
