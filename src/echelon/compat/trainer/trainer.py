"""Trainer: starts the ranks, then `fit`, `evaluate`, `test` or `predict` in each.

in a plain process    the unit is sent to ranks of this machine; the trained unit comes back
in a launched rank    (torchrun, srun, echelon run) these ranks are used
one rank              trains in this process, so that a debugger works
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from echelon.checkpoint.location import absolute, location
from echelon.common.arguments import Given, is_path
from echelon.common.errors import TrainerError
from echelon.common.machine import visible_devices
from echelon.common.older_words import renames, translated, unknown
from echelon.compat.trainer.launched import Work, start
from echelon.compat.trainer.rank import OLDER, UnitWork
from echelon.launcher.calls import end_bootstrap
from echelon.launcher.job import auto_ranks
from echelon.loop.auto.unit_options import OLDER_WORDS, AutoOptions, changes_of
from echelon.loop.callback import Callback
from echelon.loop.checkpointing.checkpoints import Checkpoints
from echelon.loop.state import PhaseState
from echelon.loop.unit import TrainUnit, Unit
from echelon.loop.validate import callbacks_of, check_loader, no_end
from echelon.parallel.layouts import is_word, resolve
from echelon.parallel.strategy import Strategy
from echelon.world.init import rank_info

__all__ = ["Trainer", "is_launched", "without_layout"]

logger = logging.getLogger(__name__)

_given = Given(TrainerError)
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
PHASES = {"train", "val", "test", "predict"}


class _Older(TypedDict, total=False):
    gpus: int | Sequence[int] | None
    max_steps: float | None
    evaluate_every_n_steps: float | None


class Trainer:
    """Starts ranks and trains in them.

    Args:
        devices: how many ranks on this machine, or which GPUs, as a list; "auto" is one rank per GPU, else one.
        layout: for units that were built without one. "auto" is "ddp" for several ranks.
        num_nodes: on how many nodes a launcher started this script; this class starts ranks on its own machine only.
        accelerator: "cpu" leaves GPUs alone; "gpu" insists on them.
        max_epochs, max_updates: when to stop.
        max_steps_per_epoch: batches of an epoch on each rank, by "train", "val", "test" or "predict".
        evaluate_every_n_epochs, evaluate_every_n_updates: as `fit`'s.
        unit_options: arguments of AutoUnit and of UnitOptions that the unit gets instead, such as {"precision": "bf16"}.
        callbacks: run in every rank; attributes of rank 0's callbacks come back if they can be pickled.
        run_dir: the run folder of each `fit`; checkpoints go into its folder `checkpoints`, unless a callback saves.
        checkpoints: another folder for them, or a Checkpoints, which says when to save there and what stays. `fit` continues from
            the newest there, if the unit has not trained yet and no `ckpt_path` is given.
        older: older arguments: `gpus` for `devices`, `max_steps` in updates, `evaluate_every_n_steps` in micro-batches. A layout
            as `accelerator` is older, too: `Trainer(gpus=2, accelerator="ddp")` works, with a hint.
    Attributes:
        callback_metrics: "eval_loss" and "test_loss" of the latest calls, over all ranks, if the unit computes them.
    Raises:
        UsageError: a value is invalid; the message names it.
    """

    resumes = True  # `fit` continues from the newest checkpoint without a `ckpt_path`

    @renames(strategy="layout")
    def __init__(
        self,
        devices: int | str | Sequence[int] = "auto",
        layout: Strategy | str | None = "auto",
        num_nodes: int = 1,
        *,
        accelerator: str = "auto",
        max_epochs: float | None = None,
        max_updates: float | None = None,
        max_steps_per_epoch: Mapping[str, int | None] | None = None,
        evaluate_every_n_epochs: int | None = 1,
        evaluate_every_n_updates: int | None = None,
        unit_options: Mapping[str, Any] | None = None,
        callbacks: Callback | list[Callback] | None = None,
        run_dir: str | Path | None = None,
        checkpoints: str | Path | Checkpoints | None = None,
        **older: Unpack[_Older],
    ) -> None:
        _check_names(older)
        accelerator, layout, devices = _without_old_words(accelerator, layout, devices, older.get("gpus"))
        _given.require(accelerator in ACCELERATORS, "accelerator", "'auto', 'cpu' or 'gpu'", accelerator)
        self.accelerator = accelerator
        self.layout = layout if layout == "auto" else resolve(layout)
        self.ranks, self.device_numbers = _devices_of(devices, accelerator)
        self.num_nodes = _given.whole("num_nodes", num_nodes, at_least=1)
        named = max_steps_per_epoch is None or (isinstance(max_steps_per_epoch, Mapping) and set(max_steps_per_epoch) <= PHASES)
        _given.require(named, "max_steps_per_epoch", "a dict by 'train', 'val', 'test', 'predict'", max_steps_per_epoch)
        self.limits = dict(max_steps_per_epoch or {})
        limits = {"max_updates": max_updates, "evaluate_every_n_updates": evaluate_every_n_updates}
        now = translated("Trainer", {name: value for name, value in older.items() if name != "gpus"}, OLDER, limits)
        self.in_steps = older.get("evaluate_every_n_steps")  # refused if an update has several steps, once the unit is known
        self.max_epochs, self.max_updates = max_epochs, now["max_updates"]
        self.evaluate_every_n_epochs = evaluate_every_n_epochs
        self.evaluate_every_n_updates = now["evaluate_every_n_updates"]
        is_dict = isinstance(unit_options, Mapping | None)
        _given.require(is_dict, "unit_options", "a dict of AutoUnit's arguments", unit_options)
        self.unit_options = changes_of(unit_options or {})
        self._check_limits()
        AutoOptions(**self.unit_options)
        self.loop_callbacks = [callbacks] if isinstance(callbacks, Callback) else callbacks_of(callbacks)
        self.callbacks: list[Any] = self.loop_callbacks
        _given.require(run_dir is None or is_path(run_dir), "run_dir", "a folder or None", run_dir)
        self.run_dir = Path(run_dir).absolute() if run_dir is not None else None
        self.has_saver = any(getattr(c, "saves", False) is True for c in self.callbacks)
        self.checkpoints = self._checkpoints(checkpoints)
        self.saves = self.checkpoints is not None and (checkpoints is not None or not self.has_saver)
        self.callback_metrics: dict[str, float] = {}

    def _checkpoints(self, given: Any) -> Checkpoints | None:
        """The checkpoints, with an absolute path: ranks may be started in another folder."""
        if given is None:
            return Checkpoints(self.run_dir / "checkpoints") if self.run_dir is not None else None
        is_place = isinstance(given, Checkpoints) or is_path(given)
        _given.require(is_place, "checkpoints", "a folder or a Checkpoints(folder, ...)", given)
        made = given if isinstance(given, Checkpoints) else Checkpoints(given)
        return replace(made, folder=str(absolute(location(made.folder))))

    def _check_limits(self) -> None:
        """Raise the loop's own errors here: the loop itself gets the limits in other processes."""
        PhaseState(dataloader=(), **self.training_limits())
        for limit in self.limits.values():
            PhaseState(dataloader=(), max_steps_per_epoch=limit)

    def training_limits(self) -> dict[str, Any]:
        """The limits of training, as a PhaseState has them."""
        return {
            "max_epochs": self.max_epochs,
            "max_updates": self.max_updates,
            "max_steps_per_epoch": self.limits.get("train"),
            "evaluate_every_n_updates": self.evaluate_every_n_updates,
            "evaluate_every_n_epochs": self.evaluate_every_n_epochs,
        }

    def fit(
        self,
        unit: TrainUnit[Any] | Callable[[], TrainUnit[Any]],
        train_dataloaders: Iterable[Any],
        val_dataloaders: Iterable[Any] | None = None,
        *,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train, and evaluate if `val_dataloaders` is given.

        What a checkpoint holds (modules, optimizer, schedule, progress, metrics) comes back into `unit`, so that a second call
        continues. Rank 0's other attributes come back too, if they can be pickled.

        Args:
            unit: an AutoUnit; or a function that every rank calls to build a unit, for one that wraps its module itself.
            train_dataloaders, val_dataloaders: an `echelon.Loader`, whose global batch is the same on any number of ranks.
                A torch DataLoader has its batch size on each rank, as in Lightning. Other iterables give every rank the same.
            ckpt_path: a checkpoint to continue from; "last" is the newest below `run_dir`, if there is one.
        Raises:
            RankFailedError: with the first failing rank's own traceback.
            UsageError: the unit cannot be sent to other processes.
        """
        self._go("fit", unit, (train_dataloaders, val_dataloaders), ckpt_path)

    def validate(
        self, unit: Any | Callable[[], Any], dataloaders: Iterable[Any], *, ckpt_path: str | Path | None = None
    ) -> list[dict[str, float]]:
        """Evaluate. The arguments are `fit`'s.

        Returns:
            one dict: "eval_loss", the mean over all samples of all ranks, for an AutoUnit; empty for other units.
        """
        metrics: list[dict[str, float]] = self._go("validate", unit, (dataloaders, None), ckpt_path)
        return metrics

    def test(
        self, unit: Any | Callable[[], Any], dataloaders: Iterable[Any], *, ckpt_path: str | Path | None = None
    ) -> list[dict[str, float]]:
        """As `validate`, with the unit's `test_step`: "test_loss"."""
        metrics: list[dict[str, float]] = self._go("test", unit, (dataloaders, None), ckpt_path)
        return metrics

    def predict(
        self, unit: Any | Callable[[], Any], dataloaders: Iterable[Any], *, ckpt_path: str | Path | None = None
    ) -> list[Any]:
        """What `predict_step` returns, on the CPU: the first batch's parts in the order of ranks, then the second batch's, ...

        So `torch.cat(trainer.predict(unit, loader))` is in the order of the loader's samples on any number of ranks. In ranks
        that a launcher started, each returns only its own part.
        """
        done: list[Any] = self._go("predict", unit, (dataloaders, None), ckpt_path)
        return done

    # --- where

    def _go(self, phase: str, unit: Any, loaders: tuple[Any, Any], ckpt_path: str | Path | None) -> Any:
        end_bootstrap(f"trainer.{phase}")
        # A module is callable, too; it must not be taken for a function that builds a unit.
        if not isinstance(unit, Unit) and (not callable(unit) or isinstance(unit, torch.nn.Module)):
            first = " The unit comes first, then the loader." if any(isinstance(each, Unit) for each in loaders) else ""
            raise TrainerError(f"unit must be an AutoUnit, or a function that builds a unit, got {type(unit).__name__}.{first}")
        for loader in loaders if loaders[1] is not None else loaders[:1]:
            check_loader(loader, phase)
        if phase == "fit" and self.max_epochs is None and self.max_updates is None:
            raise no_end("fit")
        _given.require(ckpt_path is None or is_path(ckpt_path), "ckpt_path", "a checkpoint, 'last' or None", ckpt_path)
        if ckpt_path == "last" and self.checkpoints is None:
            raise TrainerError('ckpt_path="last" means the newest below run_dir or in checkpoints, which are not given.')
        return self.run(UnitWork(phase, loaders, str(ckpt_path) if ckpt_path is not None else None, unit))

    def run(self, work: Work) -> Any:
        """Run a call, here or in ranks that are started for it; return what it returns."""
        ranks = self._ranks_to_start()
        return start(self, ranks, work) if ranks else work.here(self)

    def _ranks_to_start(self) -> int:
        """How many ranks a call starts; 0 if it runs in this process."""
        if is_launched():
            self._check_launched()
            return 0
        if self.num_nodes > 1:
            raise TrainerError(
                f"num_nodes={self.num_nodes}, but this process was not launched on several nodes, and starts ranks on its own "
                "only. Start the script on each: with `echelon submit`, `srun python ...`, or `torchrun --nnodes ...`."
            )
        ranks = self._local_ranks()
        return ranks if ranks > 1 or self.device_numbers else 0

    def _local_ranks(self) -> int:
        gpus = len(visible_devices()) if self.accelerator != "cpu" else 0
        if self.accelerator in ("gpu", "cuda") and not gpus:
            raise TrainerError(f"accelerator is {self.accelerator!r}, but this machine has no GPU. Leave it out, or give 'cpu'.")
        if isinstance(self.layout, Strategy) and self.layout.name == "dp":
            return 1  # one process drives all devices
        return self.ranks or (auto_ranks() if gpus else 1)

    def _check_launched(self) -> None:
        info = rank_info()
        if self.ranks and self.ranks != info.local_world_size:
            logger.warning("devices=%s has no effect: %s ranks were launched on this node", self.ranks, info.local_world_size)
        nodes = -(-info.world_size // info.local_world_size)
        if self.num_nodes not in (1, nodes):
            logger.warning("num_nodes=%s has no effect: ranks were launched on %s", self.num_nodes, nodes)

    def environment_of_ranks(self) -> dict[str, str]:
        """Additional environment variables for ranks that this Trainer starts."""
        if self.accelerator == "cpu":
            return {"CUDA_VISIBLE_DEVICES": ""}
        return {"CUDA_VISIBLE_DEVICES": _visible(self.device_numbers)} if self.device_numbers else {}


def _check_names(others: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: an argument is unknown, or belongs to the unit.
    """
    for name in others:
        if name in _Older.__annotations__:
            continue
        of_unit = name in ("ema", *OLDER_WORDS, *(field.name for field in fields(AutoOptions)))
        known = [*inspect.signature(Trainer).parameters, *_Older.__annotations__]
        raise unknown("Trainer", name, known, f"Give it to the unit, or as unit_options={{{name!r}: ...}}." if of_unit else "")


def _without_old_words(accelerator: str, layout: Any, devices: Any, gpus: Any) -> tuple[str, Any, Any]:
    """(accelerator, layout, devices) of `Trainer(gpus=2, accelerator="ddp")`, which many scripts have."""
    accelerator, layout = without_layout(accelerator, layout, "layout")
    if gpus is not None:
        if devices != "auto":
            raise TrainerError(f"gpus={gpus!r} and devices={devices!r} are both given. Give devices alone.")
        logger.warning("Trainer(gpus=%r) is an old spelling: write devices=%r", gpus, gpus)
        accelerator, devices = ("cpu", 1) if gpus in (0, "0", []) else (accelerator, gpus)
    return accelerator, layout, devices


def without_layout(accelerator: str, layout: Any, word: str) -> tuple[str, Any]:
    """(accelerator, layout), if the given accelerator is a layout, as in `Trainer(accelerator="ddp")`.

    Args:
        word: the Trainer's argument for a layout.
    """
    if accelerator in ACCELERATORS or not is_word(accelerator):
        return accelerator, layout
    if layout != "auto":
        raise TrainerError(f"accelerator {accelerator!r} is a {word}, and {word} {layout!r} is given too. Give one.")
    logger.warning("Trainer(accelerator=%r) is an old spelling: write %s=%r", accelerator, word, accelerator)
    return "auto", accelerator


def _devices_of(devices: Any, accelerator: str) -> tuple[int, list[int] | None]:
    """(how many ranks, or 0 for one per GPU or else one; which devices)."""
    if devices == "auto":
        return 0, None
    if isinstance(devices, Sequence) and not isinstance(devices, str) and devices:
        _given.require(accelerator != "cpu", "devices", "a number of ranks on the CPU", devices, f"Give {len(devices)}.")
        if len(set(devices)) < len(devices) or not all(isinstance(d, int) and d >= 0 for d in devices):
            raise TrainerError(f"devices must be different device numbers, such as [0, 2], got {devices!r}.")
        return len(devices), list(devices)
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise TrainerError(f"devices must be a number of ranks, a list of GPUs such as [0, 2], or 'auto', got {devices!r}.")
    return devices, None


def is_launched() -> bool:
    """Whether ranks run already, and this process is one of them."""
    return "RANK" in os.environ or rank_info().world_size > 1


def _visible(numbers: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for these of the devices that are visible now."""
    now = visible_devices()
    if max(numbers) >= len(now):
        raise TrainerError(
            f"devices must be among the {len(now)} GPUs that are visible here, got {list(numbers)}. Give a number of ranks."
        )
    return ",".join(now[n] for n in numbers)
