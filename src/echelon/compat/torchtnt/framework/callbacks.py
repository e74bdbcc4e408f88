"""torchtnt.framework.callbacks: the callbacks that programs use, under TorchTNT's names."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from echelon.common.errors import CallbackError, UsageError
from echelon.common.numbers import whole
from echelon.compat.torchtnt.framework.savers import DistributedCheckpointSaver, TorchSnapshotSaver
from echelon.compat.torchtnt.utils import module_summary as summaries_of
from echelon.data.prefetch import known_length
from echelon.loop.callback import Callback
from echelon.loop.callbacks.early_stopping import EarlyStopping
from echelon.loop.callbacks.monitors import GarbageCollector as OwnGarbageCollector
from echelon.loop.callbacks.monitors import LearningRateMonitor, PyTorchProfiler
from echelon.loop.progress import Progress
from echelon.loop.state import EntryPoint, PhaseState, State
from echelon.world import agree

__all__ = [
    "DistributedCheckpointSaver",
    "EarlyStopping",
    "GarbageCollector",
    "Lambda",
    "LearningRateMonitor",
    "ModuleSummary",
    "PyTorchProfiler",
    "TQDMProgressBar",
    "TorchSnapshotSaver",
]


def _by_phase(*moments: str) -> dict[str, Callable[[Any, State, Any], None]]:
    """Hooks for a class body: for "step_end", every `on_<phase>_step_end` calls `step_end(state, unit, phase)`."""

    def hook(phase: str, moment: str) -> Callable[[Any, State, Any], None]:
        return lambda self, state, unit: getattr(self, moment)(state, unit, phase)

    phases = ("train", "eval", "predict", "test")
    return {f"on_{phase}_{moment}": hook(phase, moment) for phase in phases for moment in moments}


def progress_of(unit: Any, phase: str) -> Progress:
    """The unit's progress in the phase."""
    progress: Progress = getattr(unit, f"{phase}_progress")
    return progress


class GarbageCollector(OwnGarbageCollector):
    """As echelon's."""

    locals().update(_by_phase("step_end"))

    def begin(self, state: State, unit: Any) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def finish(self, state: State, unit: Any) -> None:
        if self._was_on:
            gc.enable()

    def step_end(self, state: State, unit: Any, phase: str) -> None:
        gc.collect(generation=1)
        phases = ("train", "eval") if state.entry_point is EntryPoint.FIT else (phase,)
        if sum(progress_of(unit, each).num_steps_completed for each in phases) % self._interval == 0:
            gc.collect()
        if phase == "train":
            gc.disable()  # in case something has turned it on


_HOOKS = frozenset(name for name in vars(Callback) if name.startswith("on_"))


class Lambda(Callback):
    """`Lambda(on_train_step_end=lambda state, unit: ...)`: any of Callback's hooks, by name.

    Args:
        hooks: each a function of (state, unit), `on_exception` of (state, unit, exception); None is ignored.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        if unknown := sorted(hooks.keys() - _HOOKS):
            raise TypeError(f"Lambda: no such hook: {', '.join(unknown)}. Hooks are named as in echelon.Callback.")
        for name, hook in hooks.items():
            if hook is not None:
                setattr(self, name, hook)


logger = logging.getLogger(__name__)


def _log(summaries: list[summaries_of.ModuleSummary]) -> None:
    """Log the tables as INFO on rank 0."""
    for each in summaries if agree.is_rank0() else ():
        logger.info("\n%s", each)


class ModuleSummary(Callback):
    """Summarises every module of the unit, once as the run starts, on all ranks: modules may be split over them.

    Args:
        max_depth: 1 is the modules themselves; None shows all.
        process_fn: gets the summaries, on every rank; by default rank 0 logs them.
        module_inputs: {the module's attribute: (arguments, keyword arguments)}, for operations, shapes and times.
    """

    may_stop = False

    def __init__(
        self,
        max_depth: int | None = None,
        process_fn: Callable[[list[summaries_of.ModuleSummary]], None] = _log,
        module_inputs: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]] | None = None,
    ) -> None:
        self._max_depth, self._process_fn, self._inputs = max_depth, process_fn, dict(module_inputs or {})

    def on_train_start(self, state: State, unit: Any) -> None:
        modules = unit.tracked_modules()
        if unknown := sorted(self._inputs.keys() - modules.keys()):
            raise UsageError(f"module_inputs for {', '.join(unknown)}: the unit's modules are {', '.join(modules) or 'none'}.")
        summaries = []
        for name, module in modules.items():
            args, kwargs = self._inputs.get(name, (None, None))
            summary = summaries_of.get_module_summary(module, args, kwargs)
            summary.name = name
            if self._max_depth is not None:
                summaries_of.prune_module_summary(summary, max_depth=self._max_depth)
            summaries.append(summary)
        self._process_fn(summaries)

    def on_eval_start(self, state: State, unit: Any) -> None:
        if state.entry_point is not EntryPoint.FIT:
            self.on_train_start(state, unit)

    on_predict_start = on_test_start = on_train_start


class TQDMProgressBar(Callback):
    """Rank 0 draws a bar for every epoch, also for one that is resumed in its middle. On a terminal, echelon draws progress
    itself; this is for a notebook or a file.

    Args:
        refresh_rate: draw after every so many steps.
        file: where to; by default standard error.
        mininterval: least seconds between two drawings.
    """

    may_stop = False
    locals().update(_by_phase("epoch_start", "dataloader_iter_creation_end", "step_end", "epoch_end", "end"))

    def __init__(self, refresh_rate: int = 1, file: TextIO | None = None, *, mininterval: float = 0.1) -> None:
        whole("refresh_rate", refresh_rate, at_least=1, kind=CallbackError)
        from tqdm.auto import tqdm

        self._tqdm, self._refresh_rate, self._options = tqdm, refresh_rate, {"file": file, "mininterval": mininterval}
        self._bars: dict[str, Any] = {}
        self._train_progress_bar = self._eval_progress_bar = self._predict_progress_bar = None  # the latest; programs read them

    def epoch_start(self, state: State, unit: Any, phase: str) -> None:
        progress, phase_state = progress_of(unit, phase), getattr(state, f"{phase}_state")
        if phase_state is not None:
            before = progress.num_steps_completed - progress.num_steps_completed_in_epoch
            ends = (
                known_length(phase_state.dataloader),
                phase_state.max_steps_per_epoch,
                phase_state.max_steps and phase_state.max_steps - before,
            )
            self._open(unit, phase, min((end for end in ends if end is not None), default=None))

    def dataloader_iter_creation_end(self, state: State, unit: Any, phase: str) -> None:
        phase_state = getattr(state, f"{phase}_state")
        left = phase_state.feed.total if isinstance(phase_state, PhaseState) and phase_state.feed is not None else None
        done = progress_of(unit, phase).num_steps_completed_in_epoch
        total = None if left is None else done + left
        if done:  # a resumed epoch has no epoch_start
            self._open(unit, phase, total)
        elif (bar := self._bars.get(phase)) is not None:
            bar.total = total

    def _open(self, unit: Any, phase: str, total: int | None) -> None:
        self._close(phase)
        if agree.is_rank0():
            progress = progress_of(unit, phase)
            bar = self._bars[phase] = self._tqdm(
                desc=f"{phase.capitalize()} Epoch {progress.num_epochs_completed}",
                total=total,
                initial=progress.num_steps_completed_in_epoch,
                **self._options,
            )
            setattr(self, f"_{phase}_progress_bar", bar)

    def step_end(self, state: State, unit: Any, phase: str) -> None:
        bar = self._bars.get(phase)
        if bar is not None:
            done = progress_of(unit, phase).num_steps_completed_in_epoch
            if done % self._refresh_rate == 0:
                bar.update(done - bar.n)

    def epoch_end(self, state: State, unit: Any, phase: str) -> None:
        bar = self._bars.get(phase)
        if bar is not None:  # the progress has begun to count the next epoch
            bar.update(max(0, progress_of(unit, phase).num_steps_completed_in_prev_epoch - bar.n))
        self._close(phase)

    def end(self, state: State, unit: Any, phase: str) -> None:
        """Close the bar, also that of an epoch that was cut short."""
        self._close(phase)

    def _close(self, phase: str) -> None:
        bar = self._bars.pop(phase, None)
        if bar is not None:
            bar.close()

    def on_exception(self, state: State, unit: Any, exc: BaseException) -> None:
        while self._bars:
            self._bars.popitem()[1].close()
