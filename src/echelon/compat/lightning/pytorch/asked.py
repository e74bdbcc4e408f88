"""What a module's and a callback's code asks a Trainer for, beside what it trains: its options, its loaders, where it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from echelon.compat.lightning.pytorch.absent import missing_of_trainer
from echelon.compat.lightning.pytorch.data import batches_of
from echelon.compat.trainer.trainer import is_launched
from echelon.contracts.rank import RankInfo
from echelon.loop.state import step_under_way
from echelon.parallel.recipe.precision import Precision

__all__ = ["Asked", "RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"]

_PRECISIONS = {None: "32-true", torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}


class TrainerFn(StrEnum):
    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class TrainerStatus(StrEnum):
    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class RunningStage(StrEnum):
    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validation"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


@dataclass
class TrainerState:
    """
    Attributes:
        fn: "fit", "validate", "test" or "predict"; None before a call.
        status: "initializing", "running", "finished" or "interrupted".
        stage: "train", "validation", "test" or "predict"; None outside of a call.
    """

    fn: str | None = None
    status: str = "initializing"
    stage: str | None = None

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        return self.status in ("finished", "interrupted")


class Asked:
    """Of a Trainer, whose constructor sets the attributes.

    Attributes:
        train_dataloader, val_dataloaders, test_dataloaders, predict_dataloaders: what the call under way, or the latest, uses;
            the three that evaluate are a loader or a list of loaders, as they were given. None before.
        ckpt_path: the checkpoint that the latest call began from.
        num_val_batches, num_test_batches, num_predict_batches: of each loader, per rank; infinite where it has no length.
    """

    state: TrainerState
    loop_state: Any
    given_limits: dict[str, Any]
    unit_options: dict[str, Any]
    root_device: torch.device | None
    sanity_checking: bool
    num_sanity_val_steps: int
    num_training_batches: float
    val_check_interval: float | int
    num_nodes: int
    _local_ranks: Callable[[], int]
    reload_dataloaders_every_n_epochs = 0

    def _begin_asked(self) -> None:
        self.train_dataloader: Any = None
        self.val_dataloaders: Any = None
        self.test_dataloaders: Any = None
        self.predict_dataloaders: Any = None
        self.ckpt_path: str | None = None
        self.num_val_batches: list[float] = []
        self.num_test_batches: list[float] = []
        self.num_predict_batches: list[float] = []

    def note_loaders(self, phase: str, loaders: list[Any], limits: list[int | None]) -> None:
        setattr(self, f"{phase}_dataloaders", loaders[0] if len(loaders) == 1 else loaders)
        setattr(self, f"num_{phase}_batches", [batches_of(*each) for each in zip(loaders, limits, strict=True)])

    def __getattr__(self, name: str) -> Any:
        raise missing_of_trainer(name)

    # --- where it is

    @property
    def interrupted(self) -> bool:
        return self.state.status == "interrupted"

    @property
    def received_sigterm(self) -> bool:
        """Whether the launcher has asked for a stop."""
        found = self.loop_state
        return found is not None and bool(found.should_stop and not found.stopped_by_script)

    @property
    def training(self) -> bool:
        return self.state.stage == "train"

    @property
    def validating(self) -> bool:
        return self.state.stage == "validation" and not self.sanity_checking

    @property
    def testing(self) -> bool:
        return self.state.stage == "test"

    @property
    def predicting(self) -> bool:
        return self.state.stage == "predict"

    @property
    def evaluating(self) -> bool:
        return self.state.stage in ("validation", "test")

    @property
    def is_last_batch(self) -> bool:
        """Whether the training batch under way is its epoch's last, or the last that a limit allows."""
        found = self.loop_state
        return found is not None and step_under_way(found.train_state).is_last

    @property
    def num_sanity_val_batches(self) -> list[float]:
        most = float("inf") if self.num_sanity_val_steps == -1 else self.num_sanity_val_steps
        return [min(most, count) for count in self.num_val_batches]

    @property
    def val_check_batch(self) -> float:
        """After how many batches it evaluates; infinite if that is at the end of a loader without a length."""
        every = self.val_check_interval
        if isinstance(every, int):
            return every
        batches = self.num_training_batches * every
        return max(int(batches), 1) if math.isfinite(batches) else batches

    # --- options

    @property
    def limit_train_batches(self) -> float:
        return self._limit("train")

    @property
    def limit_val_batches(self) -> float:
        return self._limit("val")

    @property
    def limit_test_batches(self) -> float:
        return self._limit("test")

    @property
    def limit_predict_batches(self) -> float:
        return self._limit("predict")

    def _limit(self, phase: str) -> float:
        found: float | None = self.given_limits.get(phase)
        return 1.0 if found is None else found

    @property
    def precision(self) -> str:
        """In Lightning's words."""
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
        """As `num_devices`, of all nodes."""
        return RankInfo.from_env().world_size if is_launched() else self._local_ranks() * self.num_nodes

    @property
    def device_ids(self) -> list[int]:
        """Of this rank's device."""
        return [(self.root_device.index if self.root_device is not None else None) or 0]
