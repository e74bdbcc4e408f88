"""`echelon.loop.trainer.Trainer` with Lightning's options, also those of older releases."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from echelon.compat.lightning.pytorch import options
from echelon.contracts.errors import UsageError
from echelon.loop import trainer
from echelon.loop.callback import Callback
from echelon.loop.unit import TrainUnit
from echelon.parallel.precision import Precision
from echelon.parallel.strategy import Strategy

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

_DEFAULT_EPOCHS = 1000


class Trainer(trainer.Trainer):
    """Starts ranks and trains in them.

    Args:
        devices: how many ranks on this machine, or which GPUs, as a list; "auto" is one rank per GPU, else one.
        strategy: for units that were built without one; also Lightning's names. "auto" is "ddp" for several ranks.
        num_nodes: of the launcher that started this script; this class starts ranks on its own machine only.
        accelerator: "cpu" leaves GPUs alone; "gpu" insists on them.
        max_epochs, max_steps: when to stop; steps are updates. Without both 1000 epochs; -1 is without an end.
        precision: as AutoUnit's, or Lightning's names for these, such as "bf16-mixed".
        accumulate_grad_batches, gradient_clip_val: as AutoUnit's `gradient_accumulation_steps` and `clip_grad_norm`, or with
            gradient_clip_algorithm="value" `clip_grad_value`. None leaves the unit's own.
        callbacks: run in every rank; what rank 0's remember comes back, where it can be pickled.
        default_root_dir: a run folder of each `fit`, and below `checkpoints` the unit's state after every epoch.
        enable_checkpointing: False saves none; by default they are saved if there is a folder, and no saver among the callbacks.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: batches of an epoch, per rank.
        fast_dev_run: so many batches (True is one) of one epoch, and no checkpoints: to see whether it runs.
        check_val_every_n_epoch: how often to evaluate; `val_check_interval` counts batches instead.
        gpus: Lightning's older word for `devices`; with `accelerator="ddp"` understood, with a hint.
        others: Lightning's options of display are accepted and named; any other is refused.
    Raises:
        UsageError: a value that makes no sense; the text names it.
    """

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
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        callbacks: Callback | list[Callback] | None = None,
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
        **others: Any,
    ) -> None:
        options.check_others(others)
        limits = options.limits(
            fast_dev_run, train=limit_train_batches, val=limit_val_batches, test=limit_test_batches, predict=limit_predict_batches
        )
        if fast_dev_run:
            max_epochs, max_steps, enable_checkpointing, val_check_interval = 1, None, False, None
        if gradient_clip_algorithm not in ("norm", "value"):
            raise UsageError(f"gradient_clip_algorithm {gradient_clip_algorithm!r}: 'norm' or 'value'.")
        accelerator, strategy = options.without_strategy(accelerator, strategy)
        every = options.batches("val_check_interval", val_check_interval)
        changes: dict[str, Any] = {
            "precision": options.precision_of(precision),
            "gradient_accumulation_steps": accumulate_grad_batches,
            "clip_grad_norm" if gradient_clip_algorithm == "norm" else "clip_grad_value": gradient_clip_val or None,
        }
        super().__init__(
            options.devices_of(devices),
            options.strategy_of(strategy),
            num_nodes,
            accelerator=accelerator,
            max_epochs=math.inf if max_epochs == -1 else max_epochs,
            max_steps=None if max_steps == -1 else max_steps,
            max_steps_per_epoch=limits,
            evaluate_every_n_epochs=check_val_every_n_epoch if every is None else None,
            evaluate_every_n_steps=every,
            unit_options={name: value for name, value in changes.items() if value is not None},
            callbacks=callbacks,
            run_dir=default_root_dir,
            gpus=options.devices_of(gpus),
        )
        if enable_checkpointing and self.run_dir is None and not self.has_saver:
            raise UsageError("enable_checkpointing=True: where to? Give default_root_dir, or a DistributedCheckpointSaver.")
        self.saves = self.saves and enable_checkpointing is not False

    def fit(
        self,
        unit: TrainUnit[Any] | Callable[[], TrainUnit[Any]],
        train_dataloaders: Iterable[Any],
        val_dataloaders: Iterable[Any] | None = None,
        *,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """As `echelon.loop.trainer.Trainer.fit`."""
        if self.max_epochs is None and self.max_steps is None:
            self.max_epochs = _DEFAULT_EPOCHS
            logger.warning("Trainer without max_epochs and max_steps: %s epochs, as Lightning does", _DEFAULT_EPOCHS)
        super().fit(unit, train_dataloaders, val_dataloaders, ckpt_path=ckpt_path)
