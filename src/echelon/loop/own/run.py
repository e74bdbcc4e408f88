"""One training run of a loop of one's own: what `train` does around its steps, while somebody else's `for` asks for batches."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from echelon.contracts.stopping import REQUEUE
from echelon.loop.accept import has_hook
from echelon.loop.callback import Callback
from echelon.loop.engine import Run
from echelon.loop.own.unit import LoopUnit
from echelon.loop.state import EntryPoint, PhaseState, State
from echelon.loop.steps import Steps

__all__ = ["OwnRun"]

logger = logging.getLogger(__name__)


class OwnRun(Run):
    """From the first batch to `finish`. Collective, but for `batches` between two steps.

    Attributes:
        took_step: the loop has trained on the batch that it has; the run's owner sets it.
        is_left: the loop has left it in the middle, for now or for good.
        is_finished, has_failed: `finish` or `failed` was called.
    """

    def __init__(self, unit: LoopUnit, loader: Any, callbacks: Sequence[Callback], epochs: int | None) -> None:
        state = State(entry_point=EntryPoint.TRAIN, train_state=PhaseState(dataloader=loader, max_epochs=epochs))
        super().__init__(state, unit, list(callbacks), ["train"])
        self.stage = self._stages["train"]
        self.took_step = self.is_left = self.is_finished = self.has_failed = False
        self._steps: Steps | None = None  # of an epoch under way, or left by a `break`
        self._context = contextlib.ExitStack()
        self._context.enter_context(self._training())
        atexit.register(self._context.close)  # sinks write what they have; nothing collective
        try:
            self._begin_training(self.stage)
        except BaseException as error:
            self.failed(error)
            raise

    def batches(self) -> Iterator[Any]:
        """Of one epoch, or of what is left of it. May be closed in the middle; `settle` sees to that later, on all ranks."""
        state, rolled_back = self.state, True
        while rolled_back and not state.should_stop:
            self._steps = self._open_epoch(self.stage)
            yield from self._steps.each()
            steps, self._steps, rolled_back = self._steps, None, state.rolled_back
            self._epoch_ended(self.stage, whole=steps.close())
        if state.recorder is not None:
            state.recorder.flush()
        if state.should_stop:
            self.finish()

    def settle(self) -> None:
        """End an epoch that the loop left before its last batch."""
        steps, self._steps = self._steps, None
        if steps is None:
            return
        progress = self.stage.progress
        if self.took_step:
            progress.num_steps_completed += 1
            progress.num_steps_completed_in_epoch += 1
            self.stage.call(self.stage.hooks.step_end)
        steps.close()
        self._let_go()
        self._close_epoch(self.stage)
        self._agree_to_stop()

    def skip_epoch(self) -> None:
        """An epoch without a batch."""
        self._close_epoch(self.stage)

    def finish(self) -> None:
        """The end of training: the last save.

        Raises:
            SystemExit: 75, if a signal ended it before its time.
        """
        self.is_finished = True
        leaves = self._end_training(self.stage)
        self._let_go()
        self._close()
        if leaves:
            raise SystemExit(REQUEUE)

    def leave(self) -> None:
        """The loop left it, perhaps on this rank alone: nothing collective. Signals and files are let go of."""
        if self.is_left or self.is_finished or self.has_failed:
            return
        self.is_left = True
        self._let_go()
        for callback in self.callbacks:
            if has_hook(callback, "on_exception"):
                callback.on_exception(self.state, self.unit, GeneratorExit())
        self._close()

    def _close(self) -> None:
        atexit.unregister(self._context.close)
        self._context.close()

    def failed(self, error: BaseException) -> None:
        """Tell sinks and callbacks of an error in the loop. Per rank."""
        self.has_failed = True
        context, self._context = self._context, contextlib.ExitStack()
        atexit.unregister(context.close)
        with contextlib.suppress(BaseException):  # it is on its way already
            context.__exit__(type(error), error, error.__traceback__)
