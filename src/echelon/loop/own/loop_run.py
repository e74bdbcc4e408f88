"""One training run of a user's own loop: does what `train` does around its steps, while the user's `for` asks for batches."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

from echelon.contracts.rank import RankInfo
from echelon.contracts.stopping import REQUEUE
from echelon.loop.callback import Callback
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
from echelon.loop.engine import Run
from echelon.loop.own.loop_unit import LoopUnit
from echelon.loop.records.logged import Logged
from echelon.loop.state import EntryPoint, PhaseState, State
from echelon.loop.steps import Steps
from echelon.loop.validate import check_loader, has_hook

__all__ = ["LoopRun"]

logger = logging.getLogger(__name__)


class LoopRun(Run):
    """A run from the first batch to `finish`. Collective, except for `batches` between two steps.

    Attributes:
        took_step: the loop has trained on its current batch.
        only_looks: the loop has trained on no batch of this iteration over the loader.
        ended: how the run ended: the loop has "left" it in the middle, for now or for good; or it is "finished", or has "failed".
    """

    def __init__(self, unit: LoopUnit, phase_state: PhaseState, callbacks: Sequence[Callback], logged: Logged) -> None:
        state = State(entry_point=EntryPoint.TRAIN, train_state=phase_state)
        state.logged = logged
        super().__init__(state, unit, list(callbacks), ["train"])
        self.stage, self._window = self._stages["train"], unit.window
        self.took_step = self.only_looks = False
        self.ended: Literal["left", "finished", "failed"] | None = None
        self._steps: Steps | None = None  # of the current epoch, or of one left by a `break`
        self._is_whole = False  # the loop has had all batches of an epoch that is not closed yet
        self._before: dict[str, Any] = {}  # progress at the beginning of this iteration
        self._step_end = self.stage.hooks.step_end
        self._context = contextlib.ExitStack()
        self._context.enter_context(self._training())
        # For a loop that keeps a reference to its iterator, which then never ends.
        self._exits = atexit.register(partial(_process_exits, weakref.ref(self)))
        try:
            self._begin_training(self.stage)
        except BaseException as error:
            self.failed(error)
            raise

    def _check(self, state: State, unit: Any, phases: list[str]) -> None:
        assert state.train_state is not None
        check_loader(state.train_state.dataloader, "prepare")  # the unit needs no step: the loop takes the steps

    def batches(self, *, closes: bool) -> Iterator[Any]:
        """The batches of one epoch, or of the rest of it. If closed in the middle, `settle` ends the epoch later, on all ranks.

        Args:
            closes: end the epoch with its last batch. Otherwise `settle` ends it, so that a save includes what the loop does
                after its batches.
        """
        state, rolled_back = self.state, True
        while rolled_back and not state.should_stop:
            # The restored state is from after the loop's code that draws before the batches.
            if self.stage.progress.num_steps_completed_in_epoch:
                self._take_up_streams()
            self._steps = self._open_epoch(self.stage)
            self._look()
            yield from self._steps.each()
            steps, self._steps, rolled_back = self._steps, None, state.rolled_back
            whole = steps.close()
            if whole and not rolled_back and (not closes or self.has_only_looked):
                self._is_whole = True
            else:
                self._window.settle_batches(left=False)
                self._epoch_ended(self.stage, whole=whole)
        if state.recorder is not None:
            state.recorder.flush()
        if state.should_stop and not self._is_whole:
            self.finish()

    def _look(self) -> None:
        """Until the loop trains, it may only be looking at its data: callbacks do not count these steps, and nothing is saved."""
        self.only_looks, self._before, self.stage.hooks.step_end = True, self.stage.progress.state_dict(), ()

    def trains(self) -> None:
        """The loop trains on its current batch."""
        self.took_step, self.only_looks, self.stage.hooks.step_end = True, False, self._step_end
        self._inner.resumes_with = None

    @property
    def done(self) -> tuple[int, int]:
        """Steps and updates completed, including those on the current batch."""
        progress, pending = self.stage.progress, self._steps is not None and self.took_step
        updated = pending and self._inner.has_updated
        return progress.num_steps_completed + pending, progress.num_updates_completed + updated

    @property
    def has_only_looked(self) -> bool:
        """Whether the loop has had batches in this iteration, and trained on none."""
        done = self.stage.progress.num_steps_completed != self._before.get("num_steps_completed")
        return self.only_looks and (done or self._steps is not None)

    def forget(self) -> None:
        """Undo an iteration in which the loop only looked at its data."""
        steps, self._steps, self._is_whole, self.only_looks = self._steps, None, False, False
        if steps is not None:
            steps.close()
        self._let_go()
        self._window.passed_over = 0
        self.stage.progress.load_state_dict(self._before)
        self.stage.hooks.step_end = self._step_end

    def settle(self) -> None:
        """End an epoch that the loop left, before or after its last batch."""
        steps, self._steps = self._steps, None
        self.stage.hooks.step_end = self._step_end
        if self._is_whole:
            self._is_whole = False
            self._window.settle_batches(left=False)
            self._epoch_ended(self.stage, whole=True)
            return
        if steps is None:
            return
        self._window.settle_batches(left=not self.took_step or steps.feed.used != steps.feed.total)
        progress = self.stage.progress
        if self.took_step:
            progress.increment_step(updated=self._inner.has_updated)
            self.stage.call(self.stage.hooks.step_end)
        steps.close()
        self._let_go()
        self._close_epoch(self.stage)
        self._agree_to_stop()

    def skip_epoch(self) -> None:
        """Close an epoch in which the loop took no batch."""
        self._close_epoch(self.stage)

    def finish(self) -> None:
        """End training, with the last save. Does nothing if it has ended already.

        Raises:
            SystemExit: 75, if a signal stopped training before it was complete.
        """
        if self.ended == "finished":
            return
        self.ended = "finished"
        leaves = self._end_training(self.stage)
        self._let_go()
        self._close()
        if leaves:
            raise SystemExit(REQUEUE)

    def leave(self) -> None:
        """The loop left the run, perhaps on this rank alone: release signal handlers and files. Not collective."""
        if self.ended is not None:
            return
        self.ended = "left"
        self._let_go()
        for callback in self.callbacks:
            if has_hook(callback, "on_exception"):
                callback.on_exception(self.state, self.unit, GeneratorExit())
        self._close()

    def process_exits(self) -> None:
        """The process exits from an unfinished run: warn if its last update is in no checkpoint."""
        _, updates = self.done
        saver = next((each for each in self.callbacks if isinstance(each, DistributedCheckpointSaver)), None)
        self.leave()
        raised = getattr(sys, "last_type", None) is not None
        if saver is not None and not raised and RankInfo().rank == 0 and updates and not saver.has_saved(updates):
            logger.warning(
                "the process ends at update %s, which is in no checkpoint, because the loop was left before its end. "
                "`for epoch in echelon.epochs(loader, max_updates=...)` around it ends after this many updates, and saves them.",
                updates,
            )

    def _close(self) -> None:
        if self.ended != "left":
            atexit.unregister(self._exits)
        self._context.close()

    def failed(self, error: BaseException) -> None:
        """Tell sinks and callbacks of an error in the loop. Per rank."""
        self.ended = "failed"
        context, self._context = self._context, contextlib.ExitStack()
        atexit.unregister(self._exits)
        with contextlib.suppress(BaseException):  # the error is being raised already
            context.__exit__(type(error), error, error.__traceback__)


def _process_exits(run: weakref.ref[LoopRun]) -> None:
    if (there := run()) is not None:
        there.process_exits()
