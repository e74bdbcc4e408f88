"""torchtnt.framework.callbacks.periodic_distributed_sync: keep ranks together that have no other reason to meet."""

from __future__ import annotations

from typing import Any

from echelon.loop.callback import Callback
from echelon.loop.callbacks.steps import at_least, progress_of
from echelon.loop.state import State
from echelon.world import agree

__all__ = ["PeriodicDistributedSync"]


class PeriodicDistributedSync(Callback):
    """Every n-th step of an evaluation or a prediction, ranks wait for one another, so that the slowest does not make the others
    run into a timeout at the end. All need equally many batches; `echelon.Loader` gives them.

    Args:
        sync_every_n_steps: n.
    """

    may_stop, meets_in_steps = False, True

    def __init__(self, sync_every_n_steps: int = 1000) -> None:
        at_least(1, sync_every_n_steps=sync_every_n_steps)
        self._every = sync_every_n_steps

    def on_eval_step_end(self, state: State, unit: Any) -> None:
        if progress_of(state, unit).num_steps_completed_in_epoch % self._every == 0:
            agree.any_rank(False)

    on_predict_step_end = on_test_step_end = on_eval_step_end
