"""torchtnt.framework.callbacks.tensorboard_parameter_monitor: the parameters' values along training, in TensorBoard."""

from __future__ import annotations

import logging
from typing import Any

from echelon.common.errors import UsageError
from echelon.loop.callback import Callback
from echelon.loop.state import State
from echelon.loop.validate import inner_of
from echelon.parallel.shards import whole
from echelon.world import agree

__all__ = ["TensorBoardParameterMonitor"]

logger = logging.getLogger(__name__)


class TensorBoardParameterMonitor(Callback):
    """Draws a histogram of every parameter after each epoch, as "Parameters/<module's attribute>/<parameter's name>".

    Parameters that are split over ranks are gathered, one after the other; all ranks take part.

    Args:
        logger: a TensorBoardLogger, or a SummaryWriter; other ranks than 0 need none.
    """

    may_stop = False

    def __init__(self, logger: Any) -> None:
        self._writer = logger if hasattr(logger, "add_histogram") else getattr(logger, "writer", None)
        if agree.is_rank0() and self._writer is None:
            raise UsageError(
                f"TensorBoardParameterMonitor needs a TensorBoardLogger or a SummaryWriter, not {type(logger).__name__}."
            )

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        step, writes = unit.train_progress.num_steps_completed, agree.is_rank0()
        for attribute, prepared in inner_of(unit).prepared_modules().items():
            for name, parameter in prepared.named_parameters():
                value = whole(parameter.detach())
                if not writes or self._writer is None or not value.numel():
                    continue
                finite = value.isfinite()
                if not finite.all():
                    logger.warning("%s.%s has %s values that are not finite", attribute, name, int((~finite).sum()))
                    value = value[finite]
                if value.numel():
                    self._writer.add_histogram(f"Parameters/{attribute}/{name}", value, global_step=step)
