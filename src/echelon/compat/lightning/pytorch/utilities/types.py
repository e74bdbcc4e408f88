"""`lightning.pytorch.utilities.types`: names for annotations."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import torch

from echelon.compat.lightning.pytorch.optimizers import Schedule

__all__ = [
    "EPOCH_OUTPUT",
    "EVAL_DATALOADERS",
    "MODULE_OPTIMIZERS",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "LRSchedulerConfig",
    "LRSchedulerConfigType",
    "LRSchedulerPLType",
    "LRSchedulerType",
    "LRSchedulerTypeUnion",
    "OptimizerConfig",
    "OptimizerLRScheduler",
    "OptimizerLRSchedulerConfig",
]

STEP_OUTPUT = torch.Tensor | Mapping[str, Any] | None
EPOCH_OUTPUT = list[STEP_OUTPUT]
EVAL_DATALOADERS = TRAIN_DATALOADERS = Any
LRSchedulerTypeUnion = torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau
LRSchedulerConfigType = dict[str, Any]
LRSchedulerPLType = LRSchedulerTypeUnion
LRSchedulerType = type[torch.optim.lr_scheduler.LRScheduler] | type[torch.optim.lr_scheduler.ReduceLROnPlateau]
LRSchedulerConfig = Schedule
OptimizerLRScheduler = MODULE_OPTIMIZERS = Any


class OptimizerConfig(TypedDict):
    optimizer: torch.optim.Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    monitor: NotRequired[str]
