"""`echelon.compat.trainer.trainer.Trainer` with Lightning's options, also those of older releases.

It trains an AutoUnit, as the core's does, or a LightningModule: `session` says how.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch import options
from echelon.compat.lightning.pytorch.absent import ARGPARSE
from echelon.compat.lightning.pytorch.callbacks import Callback, Display
from echelon.compat.lightning.pytorch.module import LightningModule
from echelon.compat.lightning.pytorch.module_runs import ModuleRuns
from echelon.compat.lightning.pytorch.strategies import among_plugins
from echelon.compat.trainer import trainer
from echelon.compat.trainer.rank import Plan
from echelon.loop.callback import Callback as LoopCallback
from echelon.loop.unit import TrainUnit
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.strategy import Strategy
from echelon.world import agree

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

_DEFAULT_EPOCHS = 1000


class Trainer(ModuleRuns, trainer.Trainer):
    """Starts ranks and trains in them, an AutoUnit or a LightningModule.

    Args:
        devices: how many ranks on this machine, or which GPUs, as a list; "auto" is one rank per GPU, else one.
        strategy: for units that were built without one; also Lightning's names. "auto" is "ddp" for several ranks.
        num_nodes: of the launcher that started this script; this class starts ranks on its own machine only.
        accelerator: "cpu" leaves GPUs alone; "gpu" insists on them.
        max_epochs, max_steps: when to stop; steps are updates. Without both 1000 epochs; -1 is without an end.
        precision: as AutoUnit's, or Lightning's names for these, such as "bf16-mixed".
        accumulate_grad_batches, gradient_clip_val: as AutoUnit's `accumulate` and `clip_grad_norm`, or with
            gradient_clip_algorithm="value" `clip_grad_value`. None leaves the unit's own.
        callbacks: run in every rank; what rank 0's remember comes back, where it can be pickled.
        default_root_dir: a run folder of each `fit`, and below `checkpoints` the unit's state after every epoch. Of a
            LightningModule, where its logger's folder is; by default the working directory.
        enable_checkpointing: False saves none; by default they are saved if there is a folder, and no saver among the callbacks;
            of a LightningModule always.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: batches of an epoch, per rank; of a
            LightningModule also a part of them, as 0.1.
        fast_dev_run: so many batches (True is one) of one epoch, and no checkpoints: to see whether it runs.
        check_val_every_n_epoch: how often to evaluate; `val_check_interval` counts batches instead, or is a part of an epoch.
        gpus: Lightning's older word for `devices`; with `accelerator="ddp"` understood, with a hint.
        plugins: environments, which have no effect, and Lightning 1's DDPPlugin, which is the strategy.
        others: Lightning's further options for a LightningModule, which `options.OF_MODULES` has, and those of display, which are
            accepted and named; any other is refused.
    Raises:
        UsageError: a value that makes no sense; the text names it.
    """

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
        gpus: int | str | Sequence[int] | None = None,
        plugins: Any = None,
        **others: Any,
    ) -> None:
        self.of_modules, self._shown = options.sorted_out(others)
        self._in_vain = options.without_effect(others)
        given = {
            "train": limit_train_batches,
            "val": limit_val_batches,
            "test": limit_test_batches,
            "predict": limit_predict_batches,
        }
        self.given_limits, self.fast_dev_run = options.checked_limits(fast_dev_run, given), fast_dev_run
        if fast_dev_run:
            max_epochs, max_steps, enable_checkpointing, val_check_interval = 1, None, False, None
        if gradient_clip_algorithm not in ("norm", "value", None):
            raise UsageError(f"gradient_clip_algorithm {gradient_clip_algorithm!r}: 'norm' or 'value'.")
        accelerator, strategy = options.without_strategy(accelerator, strategy)
        strategy, environments = among_plugins(plugins, strategy)
        self.val_check_interval = options.interval(val_check_interval)
        self.check_val_every_n_epoch = check_val_every_n_epoch
        whole = isinstance(self.val_check_interval, int)
        changes: dict[str, Any] = {
            "precision": options.precision_of(precision),
            "accumulate": accumulate_grad_batches,
            "clip_grad_value" if gradient_clip_algorithm == "value" else "clip_grad_norm": gradient_clip_val or None,
        }
        every = [] if callbacks is None else [callbacks] if not isinstance(callbacks, Iterable) else list(callbacks)
        self.given_callbacks = [each for each in every if isinstance(each, Callback)]
        displays: list[Any] = [each for each in self.given_callbacks if isinstance(each, Display)]
        self._in_place = {type(each).__name__: each.in_place for each in [*displays, *environments]}
        super().__init__(
            options.devices_of(devices),
            strategy,
            num_nodes,
            accelerator=accelerator,
            max_epochs=math.inf if max_epochs == -1 else max_epochs,
            max_updates=None if max_steps == -1 else max_steps,
            max_steps_per_epoch={name: limit for name, limit in self.given_limits.items() if not isinstance(limit, float)},
            evaluate_every_n_epochs=None if whole else check_val_every_n_epoch,
            unit_options={name: value for name, value in changes.items() if value is not None},
            callbacks=[each for each in every if not isinstance(each, Callback)],
            run_dir=default_root_dir,
            gpus=options.devices_of(gpus),
        )
        self.enable_checkpointing = enable_checkpointing
        self.saves = self.saves and enable_checkpointing is not False
        self.loop_callbacks: list[LoopCallback] = self.callbacks
        self.callbacks = [*self.given_callbacks, *self.loop_callbacks]
        self._begin_running()

    # --- of an AutoUnit

    @property
    def max_steps(self) -> Any:
        return self.max_updates

    def _training(self) -> dict[str, Any]:
        """Evaluations within an epoch are after batches there."""
        interval = self.val_check_interval
        return {**super()._training(), "evaluate_every_n_steps": interval if isinstance(interval, int) else None}

    def _plan(self) -> Plan:
        where = self.checkpoints
        kept = None if where is None else replace(where, every="epoch", keep=1)
        return replace(super()._plan(), callbacks=self.loop_callbacks, checkpoints=kept, resumes=False)

    def _check_for_units(self) -> None:
        """
        Raises:
            UsageError: an option that only a LightningModule has a meaning for.
        """
        options.check_for_units(self.of_modules, self.given_limits, self.val_check_interval)
        for name in [type(each).__name__ for each in self.given_callbacks if not isinstance(each, Display)]:
            raise UsageError(f"callbacks: {name} acts on a LightningModule. For an AutoUnit write an echelon.Callback.")
        if self.enable_checkpointing and self.run_dir is None and not self.has_saver:
            raise UsageError("enable_checkpointing=True: where to? Give default_root_dir, or a DistributedCheckpointSaver.")
        if self._shown:
            logger.warning("Trainer(%s=...): has no effect here", "=..., ".join(sorted(self._shown)))

    # --- of either

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
            datamodule: in place of loaders; it may also be the second argument.
            ckpt_path: a checkpoint to go on from; "last" is the newest, "best" the best that a ModelCheckpoint has.
        """
        if self.max_epochs is None and self.max_steps is None:
            self.max_epochs = _DEFAULT_EPOCHS
            logger.warning("Trainer without max_epochs and max_steps: %s epochs, as Lightning does", _DEFAULT_EPOCHS)
        if isinstance(model, torch.nn.Module):
            self._tell_of_options()
            self.run_module("fit", model, (train_dataloaders, val_dataloaders), datamodule, ckpt_path)
            return
        self._check_for_units()
        super().fit(model, train_dataloaders, val_dataloaders, ckpt_path=ckpt_path)

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """As the core's; of a LightningModule what it logs, a dict for each loader."""
        found: list[dict[str, float]] = self._run("validate", model, dataloaders, datamodule, ckpt_path)
        return found

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """As `validate`, with `test_step`."""
        found: list[dict[str, float]] = self._run("test", model, dataloaders, datamodule, ckpt_path)
        return found

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """As the core's: batch by batch, in the order of the loader's samples on any number of ranks that it starts.

        Args:
            return_predictions: False keeps none of them, and gives None: a callback's on_predict_batch_end has each.
        """
        self.keeps_predictions = return_predictions is not False
        found: list[Any] = self._run("predict", model, dataloaders, datamodule, ckpt_path)
        return found if self.keeps_predictions else None

    def _tell_of_options(self) -> None:
        """Once, of what a LightningModule's Trainer leaves out."""
        if self._in_place and agree.is_rank0():
            logger.info("taken without effect: %s", "; ".join(f"{name}: {what}" for name, what in self._in_place.items()))
        if self._in_vain and agree.is_rank0():
            logger.warning(
                "Trainer(%s): has no effect here. Where time goes is in metrics.jsonl and `echelon report`; to train without "
                "logs and checkpoints: logger=False, enable_checkpointing=False",
                ", ".join(self._in_vain),
            )
        self._in_vain, self._in_place = [], {}

    def _run(self, call: str, model: Any, dataloaders: Any, datamodule: Any, ckpt_path: Any) -> Any:
        if model is None or isinstance(model, torch.nn.Module):
            self._tell_of_options()
            return self.run_module(call, model, (dataloaders, None), datamodule, ckpt_path)
        self._check_for_units()
        return getattr(super(), call)(model, dataloaders, ckpt_path=ckpt_path)
