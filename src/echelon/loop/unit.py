"""Units: the user's code for one step, with the hooks around it. A unit's attributes, set by plain assignment, are its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_origin, get_type_hints

import torch
from torch import nn

from echelon.checkpoint.layout import Stateful
from echelon.common.arguments import check_hooks
from echelon.loop.progress import Progress
from echelon.parallel.names import Kind, kind_of, without_compile
from echelon.parallel.prepared import Prepared
from echelon.world.init import World
from echelon.world.rng import GENERATORS, GeneratorState

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["AppStateMixin", "EvalUnit", "PredictUnit", "Stateful", "TestUnit", "TrainUnit", "TrainedUnit", "Unit"]

T = TypeVar("T")


LRScheduler = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


class AppStateMixin:
    """Finds the attributes that are saved: modules, optimizers, schedulers, progress, metrics, generators, other Statefuls.

    Also those in a list, tuple or dict, as `nets[0]`, unless they are part of another. Attributes are looked up at each call, so
    assignment, reassignment and deletion need no bookkeeping.

    Attributes:
        unsaved: attributes that are no state.
    """

    unsaved: tuple[str, ...] = ()

    def app_state(self) -> dict[str, Any]:
        """Everything to be saved, by attribute name."""
        return {
            **self.tracked_modules(),
            **self.tracked_optimizers(),
            **self.tracked_lr_schedulers(),
            **self.tracked_progress(),
            **self.tracked_misc_statefuls(),
            **self.tracked_metrics(),
        }

    def _tracked(self, kind: str) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in self.unsaved}
        return {name: value for name, value in (*own.items(), *_held_by_containers(own)) if _kind(value) == kind}

    def tracked_modules(self) -> dict[str, nn.Module]:
        return self._tracked("module")

    def tracked_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return self._tracked("optimizer")

    def tracked_lr_schedulers(self) -> dict[str, Any]:
        return self._tracked("lr_scheduler")

    def tracked_progress(self) -> dict[str, Progress]:
        return self._tracked("progress")

    def tracked_metrics(self) -> dict[str, Any]:
        return self._tracked("metric")

    def tracked_misc_statefuls(self) -> dict[str, Any]:
        others, generators = self._tracked("misc"), self._tracked("generator")
        return {**others, **{name: GeneratorState(generator) for name, generator in generators.items()}}


def _kind(value: object) -> str | None:
    if isinstance(value, type):
        return None
    if isinstance(value, nn.Module):
        return "metric" if _has(value, _METRIC) else "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, LRScheduler):
        return "lr_scheduler"
    if isinstance(value, Progress):
        return "progress"
    if isinstance(value, GENERATORS):
        return None if value is torch.default_generator else "generator"  # the ranks' own streams are saved as such
    if not _has(value, _STATE):
        return None
    return "metric" if _has(value, _METRIC) else "misc"


_MOST_HELD = 1000  # a longer list is data, and a save looks at each member


def _held_by_containers(own: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a unit's lists, tuples and dicts hold to be saved, once each, without what is an attribute or in one's module, too."""
    containers = {n: v for n, v in own.items() if isinstance(v, (list, tuple, dict)) and 0 < len(v) <= _MOST_HELD}
    members = [
        (f"{name}[{str(key).replace('.', '%2E')}]", value)  # a state's name ends at the first dot in its tensors' names
        for name, container in containers.items()
        for key, value in (container.items() if isinstance(container, dict) else enumerate(container))
        if isinstance(key, (str, int)) and _kind(value) is not None
    ]
    if not members:
        return
    modules = [value for value in (*own.values(), *(value for _, value in members)) if isinstance(value, nn.Module)]
    seen = {id(value) for value in own.values()} | {id(part) for each in modules for part in each.modules() if part is not each}
    for name, value in members:
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


# Checked by hand: isinstance with a Protocol takes Python 3.11 fifty times as long, and a save checks every attribute.
_STATE = ("state_dict", "load_state_dict")
_METRIC = (*_STATE, "update", "compute")


def _has(value: object, methods: tuple[str, ...]) -> bool:
    # A module's own attributes may be more than they seem: a model of diffusers answers `update` by its config, with a KeyError.
    return all(hasattr(type(value) if isinstance(value, nn.Module) else value, name) for name in methods)


class Unit(AppStateMixin):
    """Base of all units. Not for direct use.

    Attributes:
        reports_own_steps: the unit's steps call `on_*_step_end` themselves, with more arguments than the loop has.
        weighs_padding: the unit gives a batch of padding no weight. `weighs_padding_in_evaluation`: in evaluations only.
        may_lack: names of saved state that a run may continue without.
        keeps_modes: training leaves modules in train or eval mode as they are.
        restored_from: the checkpoint that the unit was last restored from.
        has_updated: whether the latest training step made, or skipped, an update. A user's own `train_step` always does.
        resumes_with: this rank's RNG states from the restored checkpoint, until training continues.
        resumes_logged: what this rank had logged by then, likewise.
    """

    reports_own_steps = False
    weighs_padding = weighs_padding_in_evaluation = False
    keeps_modes = False
    has_updated = True
    # State of an option; a run without the option continues without this state.
    may_lack: tuple[str, ...] = ()
    restored_from: str | None = None
    resumes_with: dict[str, Any] | None = None
    resumes_logged: dict[str, Any] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_hooks(cls)

    def on_exception(self, state: State, exc: BaseException) -> None:
        """The run ends with this exception. No collective here: the other ranks may not have it."""

    # Called by the loop, implemented by AutoUnit. Not hooks for users: overriding a hook must never switch off AutoUnit's work.
    def phase_started(self, state: State, phase: str) -> None: ...

    def epoch_closed(self, state: State, phase: str) -> None: ...

    def numbers_settled(self, state: State, phase: str) -> None: ...

    def phase_ended(self, state: State, phase: str) -> None: ...

    def restored(self) -> None: ...

    def evaluating(self) -> AbstractContextManager[Any]:
        """Context of the steps of an evaluation, a prediction or a test."""
        return nullcontext()

    @property
    def at_boundary(self) -> bool:
        """False within an accumulation window, where neither a stop nor a checkpoint is allowed."""
        return True

    def steps_until(self, updates: int) -> int:
        """Number of training steps until `updates` more updates are made, unless an epoch ends before."""
        return updates

    @property
    def agrees_to_stop(self) -> bool:
        """True if the unit's own step makes ranks agree to stop, so that the loop need not do it after every step."""
        return False

    @property
    def steps_by_itself(self) -> bool:
        """Whether forward, backward and update are the user's own code."""
        return True

    @property
    def forward_is_collective(self) -> bool:
        """Whether all ranks must take equally many evaluation steps."""
        return any(prepared.forward_is_collective for prepared in self.prepared_modules().values())

    def meets_at_end(self, phase: str) -> bool:
        """Whether the ranks meet at the end of an evaluation, a prediction or a test, so that all must run it, or none."""
        return False

    @property
    def data_rank_and_size(self) -> tuple[int, int] | None:
        """(rank, size) among the ranks that see different data; None if the modules do not say."""
        sizes = (prepared.data.rank_and_size for prepared in self.prepared_modules().values())
        return next((each for each in sizes if each is not None), None)

    def prepared_modules(self) -> dict[str, Prepared[Any]]:
        """The Prepared of each module among the attributes, by the attribute's name. Each module is recognised once."""
        return self._recognise(self.tracked_modules())

    def _recognise(self, modules: dict[str, nn.Module]) -> dict[str, Prepared[Any]]:
        known: Recognised = self.__dict__.setdefault("_recognised", Recognised())
        return known.of(modules)

    def placement(self, phase: str) -> tuple[Any, Any]:
        """(move, stream) for the loop's iterator: the function that moves a batch to the device, and the stream for the copy."""
        return None, None


def wants_iterator(step: Any) -> bool:
    """Whether a step's `data` is annotated as an Iterator, so that the step fetches its own batches."""
    try:
        hints = get_type_hints(step)
    except (NameError, TypeError):  # an annotation imported only under TYPE_CHECKING
        hints = getattr(step, "__annotations__", {})
    hint = hints.get("data")
    return get_origin(hint) is Iterator or hint is Iterator


def _data_for(step: Any, batches: Iterator[T]) -> T | Iterator[T]:
    """The `data` of a step: the next batch, or the iterator if the step fetches its own batches."""
    return batches if wants_iterator(step) else next(batches)


class TrainedUnit(Unit, ABC):
    """A unit that is trained, by a `train_step` or by a user's own loop.

    `on_train_*` hooks run before the callbacks' hooks of the same name.

    Attributes:
        may_stop: whether a step may call `state.stop()`. If so, several ranks wait for one another after each step, and all stop
            after the step that called it. With False (set it in your class) they do not wait, and a stop comes one step later.
    """

    may_stop = True

    def __init__(self) -> None:
        super().__init__()
        self.train_progress = Progress()

    def on_train_start(self, state: State) -> None:
        """Before the first epoch."""

    def on_train_epoch_start(self, state: State) -> None:
        """Before an epoch; not when resuming inside one."""

    def on_train_step_end(self, state: State, *results: Any) -> None:
        """After a step, before the callbacks. AutoUnit passes more: (state, data, step, results)."""

    def on_train_epoch_end(self, state: State) -> None:
        """After a whole epoch."""

    def on_train_end(self, state: State) -> None:
        """After the last epoch."""


class TrainUnit(TrainedUnit, Generic[T], ABC):
    """Training: write `train_step`."""

    @abstractmethod
    def train_step(self, state: State, data: T) -> Any:
        """One step on one batch. Annotate `data` as `Iterator[...]` to fetch batches yourself."""

    def get_next_train_batch(self, state: State, data_iter: Iterator[T]) -> Any:
        """Fetch a batch; override to combine or replace batches."""
        return _data_for(self.train_step, data_iter)


def _hook(self: Unit, state: State) -> None:
    """Called when its name says, before the callbacks' hooks of the same name."""


class EvalUnit(Unit, Generic[T], ABC):
    """Evaluation: write `eval_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.eval_progress = Progress()

    @abstractmethod
    def eval_step(self, state: State, data: T) -> Any:
        """One step on one batch, without gradients."""

    on_eval_start = on_eval_epoch_start = on_eval_epoch_end = on_eval_end = _hook

    def on_eval_step_end(self, state: State, *results: Any) -> None:
        """After a step, before the callbacks. AutoUnit passes more: (state, data, step, loss, outputs)."""

    def get_next_eval_batch(self, state: State, data_iter: Iterator[T]) -> Any:
        return _data_for(self.eval_step, data_iter)


class PredictUnit(Unit, Generic[T], ABC):
    """Prediction: write `predict_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.predict_progress = Progress()

    @abstractmethod
    def predict_step(self, state: State, data: T) -> Any:
        """One step on one batch, without gradients."""

    on_predict_start = on_predict_epoch_start = on_predict_epoch_end = on_predict_end = _hook

    def on_predict_step_end(self, state: State, *results: Any) -> None:
        """After a step, before the callbacks. AutoUnit passes more: (state, data, step, outputs)."""

    def get_next_predict_batch(self, state: State, data_iter: Iterator[T]) -> Any:
        return _data_for(self.predict_step, data_iter)


class TestUnit(Unit, Generic[T], ABC):
    """A final test: write `test_step`."""

    __test__ = False  # not a test case for pytest

    def __init__(self) -> None:
        super().__init__()
        self.test_progress = Progress()

    @abstractmethod
    def test_step(self, state: State, data: T) -> Any:
        """One step on one batch, without gradients."""

    on_test_start = on_test_epoch_start = on_test_epoch_end = on_test_end = _hook

    def on_test_step_end(self, state: State, *results: Any) -> None:
        """After a step, before the callbacks."""

    def get_next_test_batch(self, state: State, data_iter: Iterator[T]) -> Any:
        return _data_for(self.test_step, data_iter)


# --- modules of a unit that the user has made parallel by hand


class Recognised:
    """The Prepared of modules by name. Each module is recognised once, until another takes its place.

    A copy or a pickle of this object starts empty.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[nn.Module, Kind | None, Prepared[Any]]] = {}

    def of(self, modules: Mapping[str, nn.Module]) -> dict[str, Prepared[Any]]:
        return {name: self._one(name, module) for name, module in modules.items()}

    def _one(self, name: str, module: nn.Module) -> Prepared[Any]:
        kind, known = kind_of(without_compile(module)), self._known.get(name)
        if known is None or known[0] is not module or known[1] is not kind:  # `fully_shard` changes a module in place
            known = self._known[name] = module, kind, Prepared.of(module, World.current(torch.device("cpu")))
        return known[2]

    def __reduce__(self) -> Any:
        return Recognised, ()
