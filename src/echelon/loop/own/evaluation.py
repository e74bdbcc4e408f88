"""An evaluation in a loop of one's own: what is logged in it, over all ranks, and what follows from its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echelon.loop.records.record import Recorder
from echelon.observe.sinks.folder import default_sinks
from echelon.world import agree

if TYPE_CHECKING:
    from echelon.loop.own.session import Session

__all__ = ["LoopEvaluation"]


class LoopEvaluation:
    """What `evaluating` gives.

    Attributes:
        numbers: behind the block, what was logged in it by name, over all ranks and the same on each.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._logs, session.unit.has_evaluated = session, False, False
        self.numbers: dict[str, float] = {}

    def log(self, name: str, value: Any, weight: Any = None, *, reduce: str = "mean") -> None:
        """As `State.log`: a number of this evaluation, over all its batches and ranks; in metrics.jsonl with `eval_` before its
        name. Every rank logs the same names.

        Args:
            value: a number, a tensor with one, or a metric such as those of torchmetrics.
            weight: what it counts in the mean: by default the samples of the batch of an evaluation loader, and behind the loop
                over its batches 1.
        """
        session, unit = self._session, self._session.unit
        counts = 1 if unit.evaluated is None else unit.samples_evaluated()
        logged, before = session.logged, session.logged.weight
        logged.weight, self._logs = 0 if unit.prepared.is_replica else counts, True
        try:
            logged.add("eval", name, value, weight, reduce, may_be="loss")  # which nobody else computes here
        finally:
            logged.weight = before

    def end(self) -> None:
        """Take the numbers of all ranks together. Collective, where a number decides what is kept, and where one was logged.

        Raises:
            RanksDisagreeError, UsageError: on all ranks: they logged other names; the number that is wanted is not among them.
        """
        session, unit = self._session, self._session.unit
        best = session.best
        logs = agree.any_rank(self._logs) if unit.leaves_out_ranks else self._logs
        if not (logs or best is not None):
            return
        if unit.has_evaluated:
            session.logged.takes_part("eval")
        self.numbers = session.logged.end_phase("eval", together=True)
        if not self.numbers or unit.reference is not None:
            return
        progress = unit.train_progress
        steps, updates = progress.num_steps_completed, progress.num_updates_completed
        if session.run is not None:
            steps, updates = session.run.done
        session.logged.evaluated_at = steps
        self._record(updates, {f"eval_{name}": value for name, value in self.numbers.items()})
        if best is not None:
            session.evaluated(updates)

    def _record(self, update: int, numbers: dict[str, float]) -> None:
        session = self._session
        if session.run is not None and session.state.recorder is not None:
            session.state.recorder.numbers(update, numbers)
        elif agree.is_rank0() and (sinks := default_sinks()):  # between two runs, of a loop that counts its epochs itself
            recorder = Recorder(sinks, session.unit.weight_unit)
            recorder.numbers(update, numbers)
            recorder.close()
