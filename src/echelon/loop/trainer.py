"""Trainer: starts the ranks, then `fit`, `evaluate`, `test` or `predict` in each. Lightning's spelling of these and `launch`.

in a plain process    the unit is sent to ranks of this machine; what they made of it comes back
in a launched rank    (torchrun, srun, echelon run) these ranks are used
one rank              trains in this process, so that a debugger works
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from echelon.contracts.errors import UsageError
from echelon.contracts.machine import visible_devices
from echelon.contracts.rank import RankInfo
from echelon.launcher.functions.run import launch
from echelon.launcher.job import auto_ranks
from echelon.loop import trainer_options as options
from echelon.loop.auto import AutoUnit
from echelon.loop.callback import Callback
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
from echelon.loop.rebuild import pack, recall
from echelon.loop.trainer_rank import BETWEEN_PROCESSES, Work, in_order, save, work_here, work_in_rank
from echelon.loop.unit import TrainUnit, Unit
from echelon.parallel.precision import Precision
from echelon.parallel.strategy import Strategy, resolve
from echelon.world import streams

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

_LIGHTNINGS_EPOCHS = 1000


class Trainer:
    """Starts ranks and trains in them.

    Args:
        devices: how many ranks on this machine, or which GPUs, as a list; "auto" is one rank per GPU, else one.
        strategy: for units that were built without one. "auto" is "ddp" for several ranks.
        num_nodes: of the launcher that started this script; this class starts ranks on its own machine only.
        accelerator: "cpu" leaves GPUs alone; "gpu" insists on them.
        max_epochs, max_steps: when to stop; steps are updates, as Lightning counts them. Without both, 1000 epochs.
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
    Attributes:
        callback_metrics: "eval_loss" and "test_loss" of the latest calls, over all ranks, where the unit computes them.
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
        self.limits = options.limits(
            fast_dev_run, train=limit_train_batches, val=limit_val_batches, test=limit_test_batches, predict=limit_predict_batches
        )
        if fast_dev_run:
            max_epochs, max_steps, enable_checkpointing, val_check_interval = 1, None, False, None
        accelerator, strategy, devices = options.without_gpus_alias(accelerator, strategy, devices, gpus)
        self.accelerator = _checked_accelerator(accelerator)
        self.strategy = options.strategy_of(strategy)
        self.ranks, self.device_numbers = options.devices_of(devices, accelerator)
        if num_nodes < 1:
            raise UsageError(f"num_nodes {num_nodes}: at least 1.")
        self.num_nodes = num_nodes
        self.max_epochs = None if max_epochs == -1 else max_epochs
        self.max_steps = None if max_steps == -1 else max_steps
        if gradient_clip_algorithm not in ("norm", "value"):
            raise UsageError(f"gradient_clip_algorithm {gradient_clip_algorithm!r}: 'norm' or 'value'.")
        changes: dict[str, Any] = {
            "precision": options.precision_of(precision),
            "gradient_accumulation_steps": accumulate_grad_batches,
            "clip_grad_norm" if gradient_clip_algorithm == "norm" else "clip_grad_value": gradient_clip_val or None,
        }
        self._changes = {name: value for name, value in changes.items() if value is not None}
        self.callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
        self.default_root_dir = Path(default_root_dir).absolute() if default_root_dir is not None else None
        has_saver = any(isinstance(c, DistributedCheckpointSaver) for c in self.callbacks)
        if enable_checkpointing and self.default_root_dir is None and not has_saver:
            raise UsageError("enable_checkpointing=True: where to? Give default_root_dir, or a DistributedCheckpointSaver.")
        self._saves = self.default_root_dir is not None and not has_saver and enable_checkpointing is not False
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.val_check_interval = options.batches("val_check_interval", val_check_interval)
        self._endless = max_epochs == -1
        self.callback_metrics: dict[str, float] = {}

    def fit(
        self,
        unit: TrainUnit[Any] | Callable[[], TrainUnit[Any]],
        train_dataloaders: Iterable[Any],
        val_dataloaders: Iterable[Any] | None = None,
        *,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train, and evaluate if there is something to evaluate on.

        What a checkpoint holds (modules, optimizer, schedule, progress, metrics) comes back into `unit`, so that a second call
        continues; and so do other attributes as rank 0 has them, where they can be pickled.

        Args:
            unit: an AutoUnit; or a function that every rank calls to build a unit, for one that wraps its module itself.
            train_dataloaders, val_dataloaders: an `echelon.Loader`, whose global batch is what it says on any number of ranks.
                A torch DataLoader has its batch size on each rank, as in Lightning. Other iterables give every rank the same.
            ckpt_path: a checkpoint to resume from; "last" is the newest below `default_root_dir`, if there is one.
        Raises:
            RankFailedError: with the first failing rank's own traceback.
            UsageError: the unit cannot be sent to other processes.
        """
        if self.max_epochs is None and self.max_steps is None and not self._endless:
            self.max_epochs = _LIGHTNINGS_EPOCHS
            logger.warning("Trainer without max_epochs and max_steps: %s epochs, as Lightning does", _LIGHTNINGS_EPOCHS)
        self._go("fit", unit, (train_dataloaders, val_dataloaders), ckpt_path)

    def validate(
        self, unit: Any | Callable[[], Any], dataloaders: Iterable[Any], *, ckpt_path: str | Path | None = None
    ) -> list[dict[str, float]]:
        """Evaluate. The arguments are `fit`'s.

        Returns:
            one dict: "eval_loss", the mean over all samples of all ranks, for an AutoUnit; empty for other units.
        """
        self._go("validate", unit, (dataloaders, None), ckpt_path)
        return [{k: v for k, v in self.callback_metrics.items() if k == "eval_loss"}]

    def test(
        self, unit: Any | Callable[[], Any], dataloaders: Iterable[Any], *, ckpt_path: str | Path | None = None
    ) -> list[dict[str, float]]:
        """As `validate`, with the unit's `test_step`: "test_loss"."""
        self._go("test", unit, (dataloaders, None), ckpt_path)
        return [{k: v for k, v in self.callback_metrics.items() if k == "test_loss"}]

    def predict(
        self, unit: Any | Callable[[], Any], dataloaders: Iterable[Any], *, ckpt_path: str | Path | None = None
    ) -> list[Any]:
        """What `predict_step` returns, on the CPU: of the first batch each rank's part by rank, then of the second, ...

        So `torch.cat(trainer.predict(unit, loader))` is in the order of the loader's samples on any number of ranks. In ranks
        that were launched before, each has its own part alone.
        """
        done: list[Any] = self._go("predict", unit, (dataloaders, None), ckpt_path)
        return done

    # --- where

    def _go(self, phase: str, unit: Any, loaders: tuple[Any, Any], ckpt_path: str | Path | None) -> Any:
        # A module can be called, too; it would be taken for a function that builds a unit.
        if not isinstance(unit, Unit) and (not callable(unit) or isinstance(unit, torch.nn.Module)):
            raise UsageError(f"{phase}({type(unit).__name__}): a unit such as an AutoUnit, or a function that builds one.")
        if ckpt_path == "last" and self.default_root_dir is None:
            raise UsageError('ckpt_path="last" means the newest below default_root_dir, which is not given.')
        work = Work(phase, unit, loaders, str(ckpt_path) if ckpt_path is not None else None)
        if options.is_launched():
            self._check_launched()
        elif self.num_nodes > 1:
            raise UsageError(
                f"num_nodes={self.num_nodes}, but this process was not launched on several nodes, and starts ranks on its own "
                "only. Start the script on each: with `echelon submit`, `srun python ...`, or `torchrun --nnodes ...`."
            )
        elif (ranks := self._local_ranks()) > 1:
            return self._launch(ranks, work)
        metrics, outputs = work_here(self, work)
        self.callback_metrics |= metrics
        return outputs

    def _local_ranks(self) -> int:
        gpus = len(visible_devices()) if self.accelerator != "cpu" else 0
        if self.accelerator in ("gpu", "cuda") and not gpus:
            raise UsageError(f"accelerator {self.accelerator!r}: there is no GPU here. Leave it out, or take 'cpu'.")
        if resolve(None if self.strategy == "auto" else self.strategy) is not None and self._name == "dp":
            return 1  # one process drives all devices
        return self.ranks or (auto_ranks() if gpus else 1)

    @property
    def _name(self) -> str:
        strategy = resolve(None if self.strategy == "auto" else self.strategy)
        return strategy.name if strategy is not None else str(self.strategy)

    def _check_launched(self) -> None:
        info = RankInfo.from_env()
        if self.ranks and self.ranks != info.local_world_size:
            logger.warning("devices=%s has no effect: %s ranks were launched on this node", self.ranks, info.local_world_size)
        nodes = -(-info.world_size // info.local_world_size)
        if self.num_nodes not in (1, nodes):
            logger.warning("num_nodes=%s has no effect: ranks were launched on %s", self.num_nodes, nodes)

    def _launch(self, ranks: int, work: Work) -> Any:
        unit, folder = work.unit, Path(tempfile.mkdtemp(prefix="echelon-fit-"))
        try:
            before, sent = None, unit
            if isinstance(unit, Unit):
                if not isinstance(unit, AutoUnit):
                    raise UsageError(
                        f"{type(unit).__name__} is no AutoUnit: only its own code knows how to build it in a rank. Give "
                        f"{work.phase}() a function that does: `trainer.{work.phase}({type(unit).__name__}, ...)` if it needs "
                        "no arguments."
                    )
                if vars(unit).get("optimizer") is not None:
                    before = str(save(unit, folder / "before"))
                sent = pack(unit)
            env = {"CUDA_VISIBLE_DEVICES": options.visible(self.device_numbers)} if self.device_numbers else {}
            env |= {"CUDA_VISIBLE_DEVICES": ""} if self.accelerator == "cpu" else {}
            seeds = streams.draw()  # of the caller's streams: a seed of the caller's decides what ranks draw
            work = replace(work, unit=sent, before=before, after=str(folder / "after"), seeds=seeds)
            try:
                done = launch(work_in_rank, ranks=ranks, args=(self, work), env=env, run_dir=self.default_root_dir)
            finally:
                if isinstance(unit, AutoUnit):
                    unit.prepared.unwrapped.to(unit.device)
            if isinstance(unit, AutoUnit):
                if work.phase == "fit":
                    DistributedCheckpointSaver.restore_from_latest(folder / "after", unit, restore_options=BETWEEN_PROCESSES)
                recall(unit, done[0].unit)
            for mine, theirs in zip(self.callbacks, done[0].callbacks, strict=True):
                recall(mine, theirs)
            self.callback_metrics |= done[0].metrics
            return in_order(done)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _checked_accelerator(name: str) -> str:
    if name not in ("auto", "cpu", "gpu", "cuda"):
        raise UsageError(f"accelerator {name!r}: 'auto', 'cpu' or 'gpu'.")
    return name
