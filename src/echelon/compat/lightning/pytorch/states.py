"""What a Trainer is doing: `trainer.state`, and Lightning's words for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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
