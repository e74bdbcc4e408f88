"""What the name of a checkpoint says: epoch, steps, and the metric."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch.distributed as dist

from echelon.compat.torchtnt.utils.checkpoint_path import Phase
from echelon.loop.state import EntryPoint, State
from echelon.world import agree

__all__ = ["epoch_of", "group_of", "metric_of", "steps_of"]

logger = logging.getLogger(__name__)

_PHASES = {"train": Phase.TRAIN, "eval": Phase.EVALUATE, "predict": Phase.PREDICT}
_OF_ENTRY = {
    EntryPoint.TRAIN: ["train"],
    EntryPoint.FIT: ["train", "eval"],
    EntryPoint.EVALUATE: ["eval"],
    EntryPoint.PREDICT: ["predict"],
}


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group for host memory, over which ranks agree on a name."""
    if not dist.is_initialized():
        return None
    default = group is None or group is dist.group.WORLD
    if not default and "gloo" in str(dist.get_backend_config(group)):
        return group
    return agree.control_group()


def epoch_of(state: State, unit: Any) -> int:
    phase = _OF_ENTRY.get(state.entry_point, ["train"])[0]
    epochs: int = getattr(unit, f"{phase}_progress").num_epochs_completed
    return epochs


def steps_of(state: State, unit: Any) -> dict[Phase, int]:
    phases = _OF_ENTRY.get(state.entry_point, ["train"])
    return {_PHASES[phase]: getattr(unit, f"{phase}_progress").num_steps_completed for phase in phases}


def metric_of(unit: Any, name: str) -> float | None:
    """The unit's metric as a number; None, and a line in the log, if it has none. 0.0 is a number."""
    without = "Will not be included in checkpoint path, nor tracked for optimality."
    if not hasattr(unit, name):
        logger.error("Unit does not have attribute %s, unable to retrieve metric to checkpoint. %s", name, without)
        return None
    value = getattr(unit, name)
    if value is None:
        return None
    try:
        number = float(value.compute() if hasattr(value, "compute") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        logger.error(
            "Unable to convert monitored metric %s to a float: %s. Please ensure the value can be converted to float and is not "
            "a multi-element tensor value. %s",
            name,
            error,
            without,
        )
        return None
    if not math.isfinite(number):
        logger.error("Monitored metric '%s' is %s. %s", name, "NaN" if math.isnan(number) else "inf", without)
        return None
    return number
