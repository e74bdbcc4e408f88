"""torchtnt.framework.callbacks.periodic_distributed_sync: keep ranks together that have no other reason to meet."""

from __future__ import annotations

import logging
from typing import Any

from echelon.compat.torchtnt.framework.callbacks.by_phase import progress_of
from echelon.compat.torchtnt.utils.distributed import barrier
from echelon.loop.callback import Callback
from echelon.loop.callbacks.intervals import at_least
from echelon.loop.state import State
from echelon.observe.loggers.logger import rank

__all__ = ["PeriodicDistributedSync"]

logger = logging.getLogger(__name__)


class PeriodicDistributedSync(Callback):
    """Every n-th step of an evaluation or a prediction, ranks wait for one another, so that the slowest does not make the others
    run into a timeout at the end. All need equally many batches; `echelon.Loader` gives them.

    Args:
        sync_every_n_steps: n.
    """

    may_stop, meets_in_steps = False, True

    def __init__(self, sync_every_n_steps: int = 1000) -> None:
        at_least(1, sync_every_n_steps=sync_every_n_steps)
        self.sync_every_n_steps = sync_every_n_steps

    def on_eval_step_end(self, state: State, unit: Any) -> None:
        self._meet(unit, "eval")

    def on_predict_step_end(self, state: State, unit: Any) -> None:
        self._meet(unit, "predict")

    def on_test_step_end(self, state: State, unit: Any) -> None:
        self._meet(unit, "test")

    def _meet(self, unit: Any, phase: str) -> None:
        progress = progress_of(unit, phase)
        if progress.num_steps_completed_in_epoch % self.sync_every_n_steps == 0:  # an earlier epoch's may differ between ranks
            logger.info("Barrier at step %s on rank %s", progress.num_steps_completed, rank())
            barrier()
