"""`lightning.pytorch.utilities.types`: names for annotations."""

from collections.abc import Mapping
from typing import Any

import torch

__all__ = [
    "EPOCH_OUTPUT",
    "EVAL_DATALOADERS",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "LRSchedulerConfigType",
    "LRSchedulerTypeUnion",
    "OptimizerLRScheduler",
]

STEP_OUTPUT = torch.Tensor | Mapping[str, Any] | None
EPOCH_OUTPUT = list[STEP_OUTPUT]
EVAL_DATALOADERS = TRAIN_DATALOADERS = Any
LRSchedulerTypeUnion = torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau
LRSchedulerConfigType = dict[str, Any]
OptimizerLRScheduler = Any
