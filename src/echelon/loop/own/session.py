"""The session of a user's own loop: its unit, its loader and the current run."""

from __future__ import annotations

import functools
import logging
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.checkpoint.policy import BestCheckpointConfig
from echelon.common.errors import OwnLoopError
from echelon.common.numbers import whole
from echelon.data.prefetch import known_length
from echelon.loop.auto.several import Turn
from echelon.loop.callback import Callback
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
from echelon.loop.modes import LoopModes
from echelon.loop.own.batch_window import OwnWindow
from echelon.loop.own.cleared import Cleared
from echelon.loop.own.loop_run import LoopRun
from echelon.loop.own.loop_unit import LoopUnit
from echelon.loop.records.logged import Logged
from echelon.loop.reporting.reporting import Reporting, observed
from echelon.loop.state import EntryPoint, PhaseState, State
from echelon.parallel import patching
from echelon.parallel.names import without_compile
from echelon.parallel.networks import Networks
from echelon.parallel.patching import replace_class
from echelon.parallel.shards import is_split
from echelon.parallel.state.inner import hooked
from echelon.world import agree
from echelon.world.clock import Part, enter

__all__ = ["Session", "kept_for"]

logger = logging.getLogger(__name__)


class Session:
    """All that `prepare` made of its arguments.

    Attributes:
        batch: the loop's current batch; None outside the loop over the loader.
        window: the window of this batch, once the loop has opened one.
        accumulates: an update is accumulating gradients, which `zero_grad` must leave alone.
        saver: saves the runs.
        logged: the numbers logged in runs and evaluations.
    """

    def __init__(
        self, unit: LoopUnit, loader: Any, callbacks: Sequence[Callback], saver: DistributedCheckpointSaver | None = None
    ) -> None:
        self.unit, self.loader, self.callbacks = unit, loader, list(callbacks)
        self.saver, self.logged = saver, Logged()
        self.run: LoopRun | None = None
        self.batch: Any = None
        self.window: OwnWindow | None = None
        self._in_batch = self._stopped = self._is_observed = False
        # In an epoch trained before a restart, which gives no batch: the scheduler's steps are skipped, or replayed.
        self._skipped = self._replays = False
        self._limited: PhaseState | None = None  # limits of the current call of `epochs`; None outside one
        self._counts_updates = False  # a call of `epochs` was given max_updates
        self._begun = 0  # number of epochs before those of the current or the next call of `epochs`
        self._left = False  # the loop left a call of `epochs` before its end
        self._iterations = 0  # iterations over the loader by this process
        self._iteration: object = None  # identity of the latest iteration
        self._applying = self.accumulates = self._told_of_copy = False
        self._modes = LoopModes(unit.module, unit.prepared.unwrapped)
        self._cleared = self._of_optimizers()

    # --- the session of an object

    def adopt(self, modules: Sequence[torch.nn.Module], copies: Sequence[torch.nn.Module], *objects: Any) -> None:
        for each in (*modules, *objects):
            vars(each)[_OF] = _Kept(self)
        for copy in copies:  # a copy may belong to two sessions, such as a teacher that an earlier one has trained
            vars(copy)[_OF_COPY] = _Kept(self)

    def copied(self) -> None:
        """An object of this session is copied: if that is before the first batch, perhaps to be averaged or trained."""
        if self.saver is None or self._iterations or self._told_of_copy:
            return
        self._told_of_copy = True
        if agree.is_rank0():
            logger.warning(
                "a copy of what prepare() returned is in no checkpoint. If it changes in training, as an average of the weights "
                "does, a restart loses it: make it before prepare(), and give it to prepare(), too"
            )

    @staticmethod
    def of(thing: Any, asked_by: str) -> Session:
        """
        Raises:
            UsageError: `prepare` has not returned this object.
        """
        session: Session | None = kept_for(thing) or kept_for(thing, _OF_COPY)
        if session is None:
            compiled = isinstance(thing, nn.Module) and kept_for(without_compile(thing)) is not None
            remedy = " Compile by prepare(compile=True), or compile the model before prepare()." if compiled else ""
            raise OwnLoopError(
                f"{asked_by} must be given the model, optimizer or training loader that echelon.prepare(...) returned, got "
                f"another {type(thing).__name__}.{remedy}"
            )
        return session

    # --- the run

    @property
    def state(self) -> State:
        assert self.run is not None
        return self.run.state

    @property
    def best(self) -> BestCheckpointConfig | None:
        """The number that decides which checkpoint is best; the same on all ranks."""
        return None if self.saver is None else self.saver.best

    def evaluated(self, updates: int) -> None:
        """After an evaluation with logged numbers: save the evaluated weights with the deciding number. Collective."""
        assert self.saver is not None
        run = self.run
        state = State(entry_point=EntryPoint.TRAIN) if run is None else run.state
        state.logged = self.logged
        self.saver.check_best(state, self.unit)
        if run is None:  # between runs of a loop that counts its epochs itself: the weights are saved already
            self.saver.note_evaluated(state, self.unit, updates)
            return
        if not self.unit.at_boundary or (self._in_batch and not run.took_step):
            raise OwnLoopError(
                "an evaluation that decides which checkpoint is the best must come after the loop over the batches, or in it "
                "after optimizer.step() of an update's last batch (`if window.is_last`), got one "
                + ("before its batch was trained on." if self.unit.at_boundary else "between the batches of an update.")
            )
        self.saver.ask()

    def ready(self) -> LoopRun:
        """The current run; begins one if there is none. Collective."""
        if self.run is None:
            if not self._is_observed:  # only once: a loop that counts its epochs itself has a run for each epoch
                self._is_observed, self.callbacks = True, observed(self.unit, self.loader, self.callbacks) or []
            phase_state = self._limited or PhaseState(dataloader=self.loader)
            self.run = LoopRun(self.unit, phase_state, self.callbacks, self.logged)
            self.take_over()  # again: a layout that divides the optimizer has replaced its `zero_grad`
        return self.run

    def epochs(self, number: int | None, max_updates: int | None) -> Iterator[int]:
        """See `prepare.epochs`."""
        progress, self._stopped = self.unit.train_progress, False
        number, max_updates = self._limits(number, max_updates)
        self._settle()
        if self._left:
            self._begun, self._left = progress.num_epochs_completed, False
        begun, self._begun = self._begun, self._begun + (number or 0)
        max_epochs = None if number is None else self._begun
        limits = self._limited = PhaseState(dataloader=self.loader, max_epochs=max_epochs, max_updates=max_updates)
        try:
            if limits.is_complete(progress):
                if self.run is None and not begun:
                    epochs = f"{number} {'epoch' if number == 1 else 'epochs'}"
                    self._tell_complete(f"max_updates={max_updates}" if limits.has_all(progress) else epochs)
                return
            run = self.ready()
            while run.ended != "finished" and not limits.is_complete(progress):
                self._iterations = epoch = progress.num_epochs_completed
                if not progress.num_steps_completed_in_epoch:
                    for beside in self.unit.beside:
                        beside.epoch_begins()
                yield epoch - begun
                self._settle()
                if self._iterations == epoch:
                    run.skip_epoch()
                if run.state.should_stop:
                    run.finish()
            run.finish()
            self.run = None
        except GeneratorExit:
            self._left = True
            run.leave()
            raise
        finally:
            self._limited = None

    def _limits(self, number: int | None, max_updates: int | None) -> tuple[int | None, int | None]:
        """
        Raises:
            UsageError: neither is given, or they are not numbers; or a number of epochs after a call that max_updates may have
                ended: a restarted process cannot know in which epoch that call ended.
        """
        if number is None and max_updates is None:
            raise OwnLoopError("echelon.epochs(...) must be given a number of epochs, or max_updates, got neither.")
        if number is not None:
            number = whole("the number of epochs", number, at_least=0, kind=OwnLoopError)
            if self._counts_updates:
                raise OwnLoopError(
                    "echelon.epochs(...) must be given max_updates only, after an earlier call with max_updates, got a number of "
                    "epochs. Give the updates of all earlier calls plus those of this one."
                )
        if max_updates is not None:
            max_updates = whole("max_updates", max_updates, at_least=0, kind=OwnLoopError)
            self._counts_updates = True
        return number, max_updates

    def _tell_complete(self, reached: str) -> None:
        """Report that a restored run has nothing left to train."""
        reporting = Reporting(State(entry_point=EntryPoint.TRAIN), self.unit, (), self.unit.weight_unit)
        reporting.begin()
        reporting.training_begins(None, self.unit.train_progress.num_updates_completed, reached=reached)
        reporting.close()

    @property
    def _in_epochs(self) -> bool:
        return self._limited is not None

    def batches(self) -> Iterator[Any]:
        """One iteration over the training loader: an epoch."""
        self._settle(again=True)
        self._iterations += 1
        if self._is_done():
            return
        run, unit = self.ready(), self.unit
        if done := unit.train_progress.num_steps_completed_in_epoch:
            logger.warning(
                "an epoch resumes after its first %s batches: a count of the script's own, as of enumerate(loader), begins at 0 "
                "there, and so does a learning rate that follows it. `window.update` counts the updates of the whole run",
                done,
            )
        self._iteration = this = object()
        try:
            for batch in run.batches(closes=not self._in_epochs) if unit.reference is None else unit.reference.batches():
                yield self._begin_batch(batch if unit.given is None else unit.given(batch))
                if self._iteration is not this:
                    raise OwnLoopError(
                        "the training loader must be iterated over by one loop at a time, got a second loop before the first "
                        "ended. Make a second loader for pairs of batches."
                    )
                self._end_batch()
            self._trained(run)
            self._stopped = run.state.should_stop
            if not self._in_epochs and unit.reference is None and not self._forgets(run):
                self.run = None
                run.finish()
        except GeneratorExit:  # a `break`, perhaps on one rank alone: collective work is left to `_settle`
            if self._iteration is not this or run.ended is not None:  # another loop has begun, or the process ends
                raise
            self._in_batch = False
            self._trained(run)
            if not self._in_epochs and not self._forgets(run):
                run.leave()
            raise
        except BaseException as error:
            run.failed(error)
            raise

    def _trained(self, run: LoopRun) -> None:
        if not run.only_looks:
            self._modes.trained()

    def _settle(self, *, again: bool = False) -> None:
        """End an epoch that the loop left by a `break` or whose last batch it has had. Collective if there is one.

        Args:
            again: the loop is about to iterate over the loader.
        Raises:
            UsageError: the loop has already iterated over the loader in this epoch.
        """
        run = self.run
        if run is None:
            return
        if run.ended == "failed":  # the user has caught the error and goes on
            self.run = self.window = None
            self.unit.update.discard(self.unit, run.state)
            return
        if self.window is not None:
            self._end_batch()
        if again and self._forgets(run):
            return
        iterated = self._in_epochs and self._iterations > self.unit.train_progress.num_epochs_completed
        if again and iterated and self.unit.reference is None:
            raise OwnLoopError(
                "the training loader must be iterated over once in each epoch of echelon.epochs(...), got a second time. Count "
                "each iteration as an epoch; for other passes over the data give prepare() a second loader."
            )
        run.settle()
        if run.ended == "left":
            self.run = None
            run.finish()

    def _forgets(self, run: LoopRun) -> bool:
        """Undo an iteration in which the loop only looked at batches; True if it was one. Not collective."""
        if not run.has_only_looked:
            return False
        run.forget()
        self._iterations -= 1
        if not self._in_epochs:
            run.leave()
            self.run = None
        return True

    def _is_done(self) -> bool:
        """Whether a loop that counts its epochs itself is at an epoch that was trained before a restart."""
        progress, self._skipped, self._replays = self.unit.train_progress, self._stopped, False
        if self._stopped:
            return True
        if self.unit.reference is not None or self._in_epochs or self._iterations > progress.num_epochs_completed:
            return False
        # The latest epoch was saved before the loop's code after it ran, unless a `break` ended that epoch.
        is_latest = self._iterations == progress.num_epochs_completed and progress.num_steps_completed_in_epoch == 0
        self._skipped = not is_latest or progress.num_steps_completed_in_prev_epoch < (known_length(self.loader) or 0)
        self._replays = not self._skipped
        logger.info("epoch %s was trained before this run was restored: its batches are skipped", self._iterations - 1)
        return True

    def _begin_batch(self, batch: Any) -> Any:
        assert self.run is not None
        batch = self.unit.prepared.batches.part_of(batch)
        self.batch, self.window, self._in_batch, self.unit.has_updated = batch, None, True, False
        self.run.took_step = False
        return batch

    def _end_batch(self) -> None:
        """Check the window of the last batch, when the loop asks for the next one or has left its epoch."""
        window, self.window, self._in_batch, batch = self.window, None, False, self.batch
        self.batch = None
        if window is None:
            self.unit.window.passed_over += 1
            return
        if window.error is not None:
            raise OwnLoopError(
                f"a loop must not go on after an error in a window, got the next batch after {type(window.error).__name__}: "
                f"{window.error}. A rank may have failed alone. Skip a batch by `continue` before its window, on all ranks."
            ) from window.error
        if window.is_last and not window.stepped and self.unit.several is None:
            raise OwnLoopError(
                "the update must end with optimizer.step(), got the next batch before it. Call it after window.backward(loss), "
                "on the optimizer that prepare() returned. Remove a GradScaler, which may skip the step: "
                "prepare(precision='fp16') has one."
            )
        if self.unit.taken is not None and window.trained is not None:
            self.unit.taken(self.state, batch, *window.trained)

    def failed(self, error: BaseException) -> None:
        if self.run is not None and not isinstance(error, GeneratorExit):
            self.run.failed(error)

    # --- called by windows, optimizers and schedulers

    def enter(self, window: OwnWindow) -> None:
        """
        Raises:
            UsageError: the prepared loader has no current batch, or this batch has had its window.
        """
        if not self._in_batch:
            raise OwnLoopError(
                "echelon.window(...) must be entered for a batch of the training loader that prepare() returned, got no current "
                "batch. Iterate over that loader, `for batch in loader:`, and open one window in it for each batch."
            )
        if self.window is not None:
            raise OwnLoopError(
                "echelon.window(...) must be entered once for each batch, got a second window. Use one for the whole batch."
            )
        if self.unit.begins_update:
            self.accumulates = False
            for cleared, _ in self._cleared:
                cleared.begins_update()
        if self._cleared:
            self._watch_gradients()
        self.window = window
        assert self.run is not None
        if self.run.only_looks:
            self._modes.epoch_begins()
        elif not self._modes.model.training:
            self._modes.left_in_eval()
        self.run.trains()

    def goes_back(self) -> None:
        """Before a backward pass."""
        assert self.window is not None
        for cleared, turn in self._cleared:
            cleared.follow(self.unit.optimizer if turn is None else turn.optimizer)
            if turn is None:
                cleared.before_backward(is_last=self.window.is_last)
        if self.unit.several is None and not self.accumulates:
            self.unit.update.put_left_aside(self.unit.optimizer)

    def went_back(self) -> None:
        assert self.window is not None
        if self.unit.several is None:
            self.accumulates = True
            for cleared, _ in self._cleared:
                cleared.after_backward(is_last=self.window.is_last)
        else:
            self._watch_gradients()

    def _of_optimizers(self) -> list[tuple[Cleared, Turn | None]]:
        """A Cleared for each optimizer, with its turn if there are several; none if each batch updates an unsplit model."""
        unit = self.unit
        if unit.several is None:
            is_needed = unit.window.size > 1 or any(map(is_split, unit.module.parameters()))
            return [(Cleared(unit.module), None)] if is_needed else []
        assert isinstance(unit.prepared, Networks)
        parts = [(part.module, set(map(id, part.module.parameters()))) for part in unit.prepared.parts]
        turns = [(turn, set(map(id, turn.parameters))) for turn in unit.several.turns]
        return [(Cleared(module), turn) for module, own in parts for turn, held in turns if own & held]

    def _watch_gradients(self) -> None:
        """Watch whether the loop clears gradients before the next backward pass; not within an update of a single optimizer."""
        if not self.accumulates:
            for cleared, turn in self._cleared:
                cleared.watch(self.unit.optimizer if turn is None else turn.optimizer)

    def optimizer_step(self, turn: Turn | None, original: Callable[..., Any], closure: Any = None) -> Any:
        """
        Args:
            turn: the optimizer's turn, if there are several optimizers.
        """
        if self._applying:
            return original() if closure is None else original(closure)
        if closure is not None:
            raise OwnLoopError(
                "optimizer.step() must be called without a closure in a prepared loop, got one. To use a closure, write a "
                "TrainUnit."
            )
        window = self.window
        if window is None or not window.went_back:
            raise OwnLoopError(
                "optimizer.step() must follow window.backward(loss) in `with echelon.window(model) as window:`, got a call "
                + ("without a window." if window is None else "before window.backward. loss.backward() does not weigh the loss.")
            )
        if turn is not None and not window.is_open:
            raise OwnLoopError(
                f"step() of {turn} must be called inside its window, `with echelon.window(...) as window:`, because there are "
                "several optimizers, got it after the window."
            )
        if not window.is_last:
            if turn is not None:
                window.keep(turn)
            return None
        self._applying, before = True, enter(Part.OPTIMIZER)
        try:
            window.step(turn, original)
        finally:
            self._applying = self.accumulates = False
            enter(before)
        return None

    def zero_grad(self, original: Callable[..., Any], *args: Any, **options: Any) -> None:
        if self.accumulates:
            return
        if args or options or getattr(original, "__func__", None) is not torch.optim.Optimizer.zero_grad:
            original(*args, **options)
        else:  # torch's zero_grad without its profiler range, which takes longer than the work
            for group in original.__self__.param_groups:  # type: ignore[attr-defined]
                for parameter in group["params"]:
                    parameter.grad = None

    def scheduler_step(self, turn: Turn | None, original: Callable[..., Any], *args: Any, **options: Any) -> None:
        window = self.window
        if self._in_batch and not self._counts(window, turn):
            return
        if self._skipped:  # the restored scheduler's state already contains these steps
            return
        if not self._replays:
            original(*args, **options)
            return
        with warnings.catch_warnings():  # the optimizer did step before, in the restored run
            warnings.filterwarnings("ignore", "Detected call of", UserWarning)
            original(*args, **options)

    def _counts(self, window: OwnWindow | None, turn: Turn | None) -> bool:
        """Whether a scheduler's step in a batch counts: its update steps, before it or, in some scripts, after it."""
        if window is None:
            return self.unit.begins_update
        if turn is not None:
            return window.is_last and (turn.updated or not turn.stepped)
        trains = window.updated or not (window.stepped or (window.went_back and self.unit.window.is_nothing))
        return window.is_last and trains

    def take_over(self) -> None:
        """Replace `step` and `zero_grad` of the loop's optimizers and schedulers by ones that know the window.

        Raises:
            UsageError: a scheduler would not be saved.
        """
        for optimizer, first in self.unit.configured:
            further = [
                each for each in self.unit.tracked_lr_schedulers().values() if each.optimizer is optimizer and each is not first
            ]
            schedulers = further if first is None else [first, *further]
            if self.saver is not None and not schedulers and _is_scheduled(optimizer):
                raise OwnLoopError(
                    f"prepare(..., checkpoints=...) must be given each scheduler, got a {type(optimizer).__name__} with a "
                    "scheduler that it was not given: a resumed run would begin the schedule anew. Make the scheduler before "
                    "prepare(), and give it to prepare(), too."
                )
            self._take_over(optimizer, schedulers, None if self.unit.several is None else self.unit.several.of(optimizer))

    def _take_over(self, optimizer: Any, schedulers: list[Any], turn: Turn | None) -> None:
        hooked(optimizer)  # before its `step` is replaced by one that calls it, since a layout may divide the optimizer by hooks
        replace(optimizer, "step", partial(self.optimizer_step, turn))
        replace(optimizer, "zero_grad", self.zero_grad)
        for scheduler in schedulers:
            if getattr(scheduler.step, "knows_window", False):
                continue
            # Replaced on its class, because a scheduler's own attributes are its state.
            kind = type(scheduler)
            step = knowing(kind.step, partial(self.scheduler_step, turn), bound_to=scheduler)
            own = {"step": step, "__module__": kind.__module__, "__reduce_ex__": _as_its_own_kind}
            replace_class(scheduler, "window", type(kind.__name__, (kind,), own))


def _is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one of torch's schedulers was made for it: its first one replaces the optimizer's `step`."""
    step = vars(optimizer).get("step")
    return getattr(step, "__globals__", {}).get("__name__") == torch.optim.lr_scheduler.__name__


def _as_its_own_kind(scheduler: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle and copy a scheduler as its original class: the copy belongs to no session."""
    kind: Any = type(scheduler).__base__
    return kind.__new__, (kind,), vars(scheduler)


# --- methods of a loop's optimizer and scheduler that the session calls


def replace(thing: Any, name: str, by: Callable[..., Any]) -> None:
    original = getattr(thing, name)
    if not getattr(original, "knows_window", False):  # the mark is also on wrappers of it: `functools.wraps` copies it
        patching.replace(thing, name, "window", types.MethodType(knowing(original, by), thing))


def knowing(original: Callable[..., Any], by: Callable[..., Any], bound_to: Any = None) -> Callable[..., Any]:
    """A method that calls `by(original, ...)` in place of `original`."""
    call = original if bound_to is None else functools.partial(original, bound_to)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return by(call, *args, **options)

    method.knows_window = True  # type: ignore[attr-defined]
    return method


# --- the session of a model, an optimizer or a loader is kept in an attribute, as long as the object lives


_OF, _OF_COPY = "_echelon_session", "_echelon_session_of_copy"


class _Kept:
    """Value of that attribute. A copy or a pickle of the object has no session."""

    def __init__(self, session: Any = None) -> None:
        self.session = session

    def __deepcopy__(self, memo: Any) -> _Kept:
        if self.session is not None:
            self.session.copied()
        return _Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, ()


def kept_for(thing: Any, name: str = _OF) -> Any:
    """The session of an object; None if it has none."""
    kept = getattr(thing, "__dict__", {}).get(name)
    return None if kept is None else kept.session
