"""Trainer: starts the ranks, then `fit` in each. Lightning's spelling of what `launch` and `fit` do.

in a plain process    the unit is sent to ranks of this machine; the state that they trained comes back into it
in a launched rank    (torchrun, srun, echelon run) these ranks are used
one rank              trains in this process, so that a debugger works
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from echelon.contracts.errors import UsageError
from echelon.contracts.rank import RankInfo
from echelon.data.loader import Loader
from echelon.launcher.function import launch
from echelon.launcher.job import auto_ranks
from echelon.loop import trainer_options as options
from echelon.loop.auto import AutoUnit
from echelon.loop.callback import Callback
from echelon.loop.callbacks.saver import DistributedCheckpointSaver
from echelon.loop.rebuild import Parcel, pack, rebuild, unpack
from echelon.loop.run import fit, train
from echelon.loop.state import EntryPoint, State
from echelon.loop.unit import TrainUnit
from echelon.parallel.precision import Precision
from echelon.parallel.strategy import Strategy, resolve
from echelon.world.init import World, init_from_env

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

_LIGHTNINGS_EPOCHS = 1000


@dataclass(frozen=True)
class _Work:
    """What a rank is to do."""

    unit: Parcel | Callable[[], Any]
    train: Any
    evaluation: Any
    before: str | None  # a checkpoint of the unit as the caller has it, if it has been trained
    after: str  # folder for the checkpoint that the caller takes back


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
        callbacks: run in every rank; what they remember stays there.
        default_root_dir: a run folder of each `fit`, and below `checkpoints` the unit's state after every epoch.
        enable_checkpointing: False saves none; by default they are saved if there is a folder, and no saver among the callbacks.
        limit_train_batches, limit_val_batches: batches of an epoch, per rank.
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
        limit_train_batches: int | None = None,
        limit_val_batches: int | None = None,
        check_val_every_n_epoch: int | None = 1,
        val_check_interval: int | None = None,
        gpus: int | str | Sequence[int] | None = None,
        **others: Any,
    ) -> None:
        options.check_others(others)
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
        self.limit_train_batches, self.limit_val_batches = limit_train_batches, limit_val_batches
        self.check_val_every_n_epoch, self.val_check_interval = check_val_every_n_epoch, val_check_interval
        if self.max_epochs is None and self.max_steps is None and max_epochs != -1:
            self.max_epochs = _LIGHTNINGS_EPOCHS
            logger.warning("Trainer without max_epochs and max_steps: %s epochs, as Lightning does", _LIGHTNINGS_EPOCHS)

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
        goes on. Other attributes that ranks set stay in the ranks.

        Args:
            unit: an AutoUnit; or a function that every rank calls to build a unit, for one that wraps its module itself.
            train_dataloaders, val_dataloaders: an `echelon.Loader`, whose global batch is what it says on any number of ranks.
                A torch DataLoader has its batch size on each rank, as in Lightning. Other iterables give every rank the same.
            ckpt_path: a checkpoint to go on from; "last" is the newest below `default_root_dir`, if there is one.
        Raises:
            RankFailedError: with the first failing rank's own traceback.
            UsageError: the unit cannot be sent to other processes.
        """
        if not isinstance(unit, TrainUnit) and not callable(unit):
            raise UsageError(f"fit({type(unit).__name__}): a TrainUnit or AutoUnit, or a function that builds one.")
        self._ckpt_path = self._checkpoint(ckpt_path)
        if options.is_launched():
            self._check_launched()
            self._fit_here(unit, train_dataloaders, val_dataloaders)
            return
        if self.num_nodes > 1:
            raise UsageError(
                f"num_nodes={self.num_nodes}, but this process was not launched on several nodes, and starts ranks on its own "
                "only. Start the script on each: with `echelon submit`, `srun python ...`, or `torchrun --nnodes ...`."
            )
        ranks = self._local_ranks()
        if ranks == 1:
            self._fit_here(unit, train_dataloaders, val_dataloaders)
        else:
            self._launch(ranks, unit, train_dataloaders, val_dataloaders)

    # --- where

    def _checkpoint(self, path: str | Path | None) -> str | None:
        if path == "last" and self.default_root_dir is None:
            raise UsageError('ckpt_path="last" means the newest below default_root_dir, which is not given.')
        return str(path) if path is not None else None

    def _local_ranks(self) -> int:
        gpus = options.has_gpus() if self.accelerator != "cpu" else 0
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

    def _launch(self, ranks: int, unit: Any, train_loader: Any, eval_loader: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="echelon-fit-"))
        try:
            before = None
            sent: Any = unit
            if isinstance(unit, TrainUnit):
                if not isinstance(unit, AutoUnit):
                    raise UsageError(
                        f"{type(unit).__name__} is no AutoUnit: only its own code knows how to build it in a rank. "
                        f"Give fit() a function that does: `trainer.fit({type(unit).__name__}, ...)` if it needs no arguments."
                    )
                if vars(unit).get("optimizer") is not None:
                    before = str(_save(unit, folder / "before"))
                sent = pack(unit)
            env = {"CUDA_VISIBLE_DEVICES": options.visible(self.device_numbers)} if self.device_numbers else {}
            env |= {"CUDA_VISIBLE_DEVICES": ""} if self.accelerator == "cpu" else {}
            work = _Work(sent, train_loader, eval_loader, before, str(folder / "after"))
            try:
                launch(fit_in_rank, ranks=ranks, args=(self, work), env=env, run_dir=self.default_root_dir)
            finally:
                if isinstance(unit, AutoUnit):
                    unit.prepared.plain.to(unit.device)
            if isinstance(unit, AutoUnit):
                DistributedCheckpointSaver.restore_from_latest(folder / "after", unit)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # --- in a rank

    def _fit_here(self, given: Any, train_loader: Any, eval_loader: Any) -> None:
        init_from_env("cpu" if self.accelerator == "cpu" else None)
        unit = given if isinstance(given, TrainUnit) else given()
        if isinstance(unit, AutoUnit):
            changes = self._changes_for(unit.constructed.arguments)
            now = vars(unit)
            if any(now.get(k, unit.constructed.arguments[k]) != v for k, v in changes.items()):
                rebuild(unit, **changes)
        elif self._changes:
            raise UsageError(f"{type(unit).__name__} is no AutoUnit, so {', '.join(sorted(self._changes))} cannot reach it.")
        self._run(unit, train_loader, eval_loader)

    def _changes_for(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """What this Trainer says about a unit that was built with `arguments`."""
        changes, own = dict(self._changes), arguments["strategy"]
        if "precision" in changes:
            changes["precision"] = Precision.of(changes["precision"])
        if own is None:
            chosen = self.strategy
            if chosen == "auto":
                chosen = "ddp" if World.current().size > 1 else None
            changes |= {"strategy": chosen} if chosen is not None else {}
        elif self.strategy not in ("auto", None) and resolve(own) != resolve(self.strategy):
            logger.warning("strategy %r of the Trainer has no effect: the unit was built with %r", self.strategy, own)
        return changes

    def _run(self, unit: Any, train_loader: Any, eval_loader: Any) -> None:
        accumulation = getattr(unit, "gradient_accumulation_steps", 1)
        place = unit.data_place or (World.current().rank, World.current().size)
        train_loader = _shared(train_loader, place[1], accumulation)
        eval_loader = _shared(eval_loader, place[1], 1) if eval_loader is not None else None
        callbacks = list(self.callbacks)
        if self.default_root_dir is not None:
            checkpoints = self.default_root_dir / "checkpoints"
            if self._ckpt_path == "last":
                DistributedCheckpointSaver.restore_from_latest(checkpoints, unit, train_dataloader=train_loader)
            if self._saves:
                callbacks.append(DistributedCheckpointSaver(checkpoints, save_every_n_epochs=1, keep_last_n_checkpoints=1))
        if self._ckpt_path not in (None, "last"):
            DistributedCheckpointSaver.restore(self._ckpt_path, unit, train_dataloader=train_loader)
        steps = self.max_steps
        if steps is not None:
            per_epoch = range(self.limit_train_batches) if self.limit_train_batches else train_loader
            steps = options.updates_to_steps(steps, accumulation, per_epoch)
        if eval_loader is None:
            train(
                unit,
                train_loader,
                max_epochs=self.max_epochs,
                max_steps=steps,
                max_steps_per_epoch=self.limit_train_batches,
                callbacks=callbacks,
            )
            return
        fit(
            unit,
            train_loader,
            eval_loader,
            max_epochs=self.max_epochs,
            max_steps=steps,
            max_train_steps_per_epoch=self.limit_train_batches,
            max_eval_steps_per_epoch=self.limit_val_batches,
            evaluate_every_n_steps=self.val_check_interval,
            evaluate_every_n_epochs=self.check_val_every_n_epoch if self.val_check_interval is None else None,
            callbacks=callbacks,
        )


def fit_in_rank(trainer: Trainer, work: _Work) -> None:
    """What a rank that the Trainer started does."""
    init_from_env("cpu" if trainer.accelerator == "cpu" else None)
    if not isinstance(work.unit, Parcel):
        trainer._fit_here(work.unit, work.train, work.evaluation)
        return
    unit = unpack(work.unit, **trainer._changes_for(work.unit.arguments))
    if work.before is not None:
        DistributedCheckpointSaver.restore(work.before, unit)
    trainer._run(unit, work.train, work.evaluation)
    _save(unit, Path(work.after))


def _save(unit: Any, folder: Path) -> Any:
    return DistributedCheckpointSaver(folder).save(State(entry_point=EntryPoint.TRAIN), unit)


def _shared(loader: Any, places: int, accumulation: int) -> Any:
    """A torch DataLoader's batches, for several ranks: each has its batch size, as in Lightning, and no sample twice.

    Raises:
        UsageError: its samples cannot be divided.
    """
    if places == 1 or not isinstance(loader, DataLoader) or isinstance(getattr(loader, "sampler", None), DistributedSampler):
        return loader
    sampler: Any = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if loader.batch_size is None or not plain or type(loader.batch_sampler) is not torch.utils.data.BatchSampler:
        what = type(sampler if sampler is not None else loader.dataset).__name__
        raise UsageError(
            f"a DataLoader with {what} cannot be divided between {places} ranks: every one would see the same samples. "
            "Use echelon.Loader, for iterable datasets echelon.StreamLoader, or a DistributedSampler of your own."
        )
    return Loader(
        loader.dataset,
        loader.batch_size * places * accumulation,
        shuffle=isinstance(sampler, RandomSampler),
        accumulation=accumulation,
        tail="drop" if loader.drop_last else "keep",
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
    )


def _checked_accelerator(name: str) -> str:
    if name not in ("auto", "cpu", "gpu", "cuda"):
        raise UsageError(f"accelerator {name!r}: 'auto', 'cpu' or 'gpu'.")
    return name
