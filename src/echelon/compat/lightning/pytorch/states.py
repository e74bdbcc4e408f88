"""What a Trainer is doing: `trainer.state`, and Lightning's words for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"]


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


class RunningStage(StrEnum):
    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


_WORDS = {"fn": TrainerFn, "status": TrainerStatus, "stage": RunningStage}


@dataclass
class TrainerState:
    """What the Trainer is doing. Each attribute is an enum member, and may also be set as a string.

    Attributes:
        fn: None before a call.
        stage: None outside of a call.
    """

    fn: TrainerFn | None = None
    status: TrainerStatus = TrainerStatus.INITIALIZING
    stage: RunningStage | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _WORDS[name](value) if value is not None else None)

    @property
    def finished(self) -> bool:
        return self.status is TrainerStatus.FINISHED
