"""Reports of a run: to sinks on rank 0, of errors to callbacks and unit, and to an observer of this process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist

from echelon.checkpoint import manifest
from echelon.common.redact import redacted
from echelon.contracts import pulse
from echelon.contracts.stopping import REQUEUE
from echelon.data.workers import explain
from echelon.loop.callback import Callback
from echelon.loop.records.record import Recorder
from echelon.loop.reporting import times
from echelon.loop.state import State
from echelon.loop.validate import has_hook, inner_of
from echelon.observe.sinks.folder import default_sinks
from echelon.observe.sinks.progress import Notes
from echelon.world import agree, stop

__all__ = ["Observer", "Reporting", "observed", "observing"]

logger = logging.getLogger(__name__)


class Reporting:
    """Opens and closes a run's sinks, and calls `on_exception` for an error that ends it, a Ctrl-C included.

    Args:
        weight_unit: unit of the throughput in records.
    """

    def __init__(self, state: State, unit: Any, callbacks: Sequence[Callback], weight_unit: str) -> None:
        self.state, self.unit, self.callbacks, self.weight_unit = state, unit, callbacks, weight_unit

    def training_begins(self, total: int | None, update: int, *, reached: str) -> None:
        """Report the start of training. A restored checkpoint is named only if it is of this update: the unit may have trained
        since it was restored.

        Args:
            reached: the limit that leaves nothing to train, or "".
        """
        source = getattr(self.unit, "restored_from", None)  # a duck-typed unit has none
        why = {"restored_from": source} if source is not None and source.endswith(manifest.named(update)) else {}
        done = {"reached": reached} if reached else {}
        self.state.event("train_start", total_steps=total, step=update, complete=bool(reached), **why, **done)

    def begin(self) -> None:
        """Open the sinks on rank 0; without sinks, keep only notes for the progress line."""
        if not agree.is_rank0():
            return
        if sinks := default_sinks():
            self.state.recorder = Recorder(sinks, self.weight_unit)
        else:
            self.state.notes = Notes()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the run happens."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if agree.is_joined() else (0, 1)
        self.begin()
        try:
            with self._timed(rank, ranks):
                yield
        except BaseException as error:
            # A loader's worker may die at any moment of a step.
            named = explain(error)
            self._tell(named or error)
            if named is not None:
                raise named from error
            raise
        self.close()
        pulse.leave()

    def _timed(self, rank: int, ranks: int) -> AbstractContextManager[None]:
        if self.state.train_state is None:
            return contextlib.nullcontext()
        prepared = getattr(inner_of(self.unit), "prepared", None)
        stage, stages = (0, 1) if prepared is None else prepared.place.stage
        role = f"stage {stage}" if stages > 1 else ""
        return times.noted(rank, ranks, self.unit.train_progress.num_updates_completed, role)

    def _tell(self, error: BaseException) -> None:
        """Report the error to all sinks, callbacks and the unit. If one of them fails, log that and go on with the others."""
        leaves = isinstance(error, SystemExit) and error.code == REQUEUE and stop.asked() is not None
        reports: list[Callable[[], None]] = [
            lambda: (
                self.state.event("stopped", signal=stop.asked(), saved=False)
                if leaves
                else self.state.event("exception", kind=type(error).__name__, message=redacted(str(error)))
            ),
            lambda: self.unit.on_exception(self.state, error),
            *(partial(c.on_exception, self.state, self.unit, error) for c in self.callbacks if has_hook(c, "on_exception")),
            self.close,
        ]
        for tell in reports:
            try:
                tell()
            except Exception:
                logger.exception("while %s was being reported", type(error).__name__)

    def close(self) -> None:
        recorder, self.state.recorder = self.state.recorder, None
        if recorder is not None:
            recorder.close()


# --- an observer of the trainings in this process. `train` and `fit` call it once, before they begin. So `echelon prove` sees
# what a script trains, however the script imported `train`, without patching a module.


# Gets the unit, the training loader and the callbacks of a call; returns the callbacks to use. An error that it raises ends the
# call.
Observer = Callable[[Any, Iterable[Any], list[Callback]], list[Callback]]

_observer: Observer | None = None


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Context in which every call of `train` and `fit` in this process asks `observer`, in place of an earlier observer."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def observed(unit: Any, dataloader: Iterable[Any], callbacks: list[Callback] | None) -> list[Callback] | None:
    """The callbacks of a beginning call, as the observer wants them."""
    return callbacks if _observer is None else _observer(unit, dataloader, list(callbacks or []))
