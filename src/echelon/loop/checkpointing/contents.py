"""What a checkpoint holds: a unit's state by name, per-rank state, the loader's position, and facts for the manifest."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import weakref
from typing import TYPE_CHECKING, Any

import torch

from echelon.checkpoint.buffers import Buffers
from echelon.checkpoint.policy import BestCheckpointConfig
from echelon.checkpoint.snapshot import Planned, Snapshot, snapshot
from echelon.common.errors import CheckpointError
from echelon.data.base import BaseLoader
from echelon.data.fingerprint import checksum
from echelon.data.lossy import shuffle_buffer
from echelon.data.stream import StreamLoader
from echelon.loop.checkpointing import changes, restoring
from echelon.loop.checkpointing.frozen import Frozen, changes_since_built
from echelon.loop.records import monitored as numbers
from echelon.loop.records.metrics import share_of
from echelon.loop.records.monitored import Unknown
from echelon.loop.replicas import check_ranks, seen
from echelon.loop.unit import TrainedUnit
from echelon.parallel.meta.deferred import tensors_in
from echelon.parallel.shards import is_split
from echelon.parallel.state.optimizer_state import OptimizerState
from echelon.parallel.state.state import states_by_name
from echelon.world import agree, rng

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["is_unevaluated", "monitored", "prepare", "take"]

logger = logging.getLogger(__name__)


def take(
    state: State,
    unit: TrainedUnit,
    planned: Planned,
    best: BestCheckpointConfig | None,
    frozen: Frozen | None = None,
) -> tuple[Snapshot, dict[str, Any]]:
    """Take a snapshot of the whole state, with facts for the manifest. Collective.

    Args:
        planned: which rank writes what, from the previous save.
        best: names the number that decides which checkpoints are kept.
        frozen: leaves out frozen parameters.
    """
    metrics = unit.tracked_metrics()
    check_ranks(unit)
    states = states_by_name({name: value for name, value in unit.app_state().items() if name not in metrics})
    loader = state.train_state.dataloader if state.train_state is not None else None
    own: dict[str, Any] = {
        "streams": unit.resumes_with or rng.states(),  # resumes_with: restored, and not trained since
        "metrics": {name: share_of(metric) for name, metric in metrics.items()},
        "logged": state.logged.state_dict(numbers.numbers(state, unit), metrics),
    }
    for name, prepared in unit.prepared_modules().items():
        for key, value in prepared.extras.state_dict().items():
            own.setdefault(key, {})[name] = value
    position = state.train_state.loader_state(unit.train_progress) if state.train_state is not None else None
    if unit.train_progress.num_steps_completed_in_epoch:
        _warn_if_inexact(state, loader, position)
    if not isinstance(loader, BaseLoader) and restoring.differs_by_rank(position):
        in_epoch = unit.train_progress.num_steps_completed_in_epoch > 0
        own["train_dataloader"], position = position, restoring.BY_RANK if in_epoch else restoring.BETWEEN_BY_RANK
    by_rank, alike = _others({name: value for name, value in unit.tracked_misc_statefuls().items() if name in states})
    states |= {name: _Fixed(value) for name, value in (by_rank | alike).items()}
    by_rank |= _kept_apart(states)
    if by_rank:
        own["others"] = by_rank
    # Empty for a loader without state; after an epoch's end, also for a loader without generators of its own.
    states["train_dataloader"] = _Fixed(position or {})
    left: dict[str, Any] = {}
    if frozen is not None:
        states, left = frozen.leave_out(states, unit)
    taken = snapshot(states, own, planned)
    metrics_now = monitored(best.monitored_metric, state, unit) if best is not None else {}
    config = changes.facts(unit, loader)
    if (
        position and unit.train_progress.num_steps_completed_in_epoch and not isinstance(loader, BaseLoader)
    ):  # for other loaders, progress alone does not tell the position
        config["position"] = loader.__class__.__name__
    facts = {"config": config, "host": socket.gethostname(), "metrics": metrics_now}
    if best is not None:
        averages: Any = getattr(unit, "swa_model", None)
        averaged = state.eval_state is not None and averages is not None and averages.params.use_in_evaluation
        # The state that was evaluated; before the warm-up is over there are no averages yet.
        best_of = {"state": "swa_model" if averages.n_averaged else "module"} if averaged else {}
        facts["best"] = {"name": best.monitored_metric, "mode": best.mode, **best_of}
    if left:
        facts["frozen"] = left
    if where := {str(number): at for number, each in enumerate(getattr(unit, "beside", ()), 1) if (at := each.where())}:
        facts["beside"] = where
    facts["trained"] = changes_since_built(unit)
    if by_rank:
        facts["by_rank"] = list(by_rank)
    return taken, facts


# Larger states are not compared: they are those of models, which are equal, and comparing them would slow every save.
_MOST_COMPARED = 1 << 24


def _others(objects: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of the user's objects, by name: those that differ between ranks, such as sums over a rank's samples, and those
    that are equal or were not compared. If an object's state_dict() fails, it is left out here, and the save itself will raise.
    Collective.
    """
    states: dict[str, Any] = {}
    for name, value in objects.items():
        is_own = type(value).__module__.startswith(("echelon.", "torch.")) or hasattr(value, "keyed_by_name")
        if not is_own or isinstance(value, rng.GeneratorState):
            with contextlib.suppress(Exception):
                states[name] = value.state_dict()
    states = {name: value for name, value in states.items() if isinstance(value, dict)}
    sums = {name: _checksum(value) for name, value in states.items()}
    sums_of_all = agree.kinds(sums)
    differ = {
        name for name in sums if all(name in each for each in sums_of_all) and len({each[name] for each in sums_of_all}) > 1
    }
    by_rank = {name: states.pop(name) for name in sorted(differ)}
    return by_rank, states


def _kept_apart(states: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """What each rank keeps for itself in optimizers of the script's own, such as the momentum of the parameters that the rank
    steps for all: tensors under one key with other values on each rank. Collective.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, state in states.items():
        if agree.is_joined() and isinstance(state, OptimizerState) and state.may_differ:
            tensors = state.whole()
            numbers = agree.kinds({key: str(seen(tensor).tolist()) for key, tensor in tensors.items()})
            kept = {k: v for k, v in tensors.items() if all(k in each for each in numbers) and len({n[k] for n in numbers}) > 1}
            found |= {name: kept} if kept else {}
    return found


def _checksum(state: Any) -> int | None:
    with contextlib.suppress(Exception):  # for example a state that contains itself, which the save refuses
        tensors = list(tensors_in(state))
        if not any(map(is_split, tensors)) and sum(each.numel() for each in tensors) <= _MOST_COMPARED:
            return checksum(state)
    return None


def prepare(unit: TrainedUnit, planned: Planned, frozen: Frozen | None, buffers: Buffers) -> None:
    """Once in a run: start to allocate page-locked memory for a copy of the state at its present size. Collective.

    Without a GPU this would only hold the memory earlier, and gain nothing.
    """
    if buffers.begun or not torch.cuda.is_initialized():
        return
    buffers.begun = True
    metrics = unit.tracked_metrics()
    states = states_by_name({name: value for name, value in unit.app_state().items() if name not in metrics})
    if frozen is not None:
        states, _ = frozen.leave_out(states, unit)
    with contextlib.suppress(CheckpointError):  # raised on all ranks; the save will raise it again if it still applies
        snapshot(states, {}, planned).prepare(buffers)


# Runs that were warned.
_told: weakref.WeakSet[State] = weakref.WeakSet()


def _warn_if_inexact(state: State, loader: Any, position: Any) -> None:
    """Warn once, at the first save within an epoch, if a run that resumes from it will not see the same samples."""
    if loader is None or state in _told:
        return
    kind, why = loader.__class__.__name__, None
    if isinstance(loader, StreamLoader):
        why = loader.inexact()
    elif position is None:
        why = f"{kind} has no state: a run that resumes from here starts the epoch over, with samples that it has seen. "
        why += "echelon.Loader resumes."
    elif buffer := shuffle_buffer(getattr(loader, "dataset", None)):
        why = f"the dataset of the {kind} shuffles through a buffer, which is not in its state: a run that resumes from here "
        why += f"misses up to {buffer} samples of each stream in this epoch."
    if why is not None:
        _told.add(state)
        if agree.is_rank0():
            logger.warning("saved in the middle of an epoch, but %s", why)


def is_unevaluated(state: State, unit: TrainedUnit) -> bool:
    """Whether an evaluation of these weights is due and not finished."""
    return state.eval_state is not None and unit.train_progress.evaluation_due


def monitored(name: str, state: State, unit: TrainedUnit) -> dict[str, float]:
    """The monitored number of these weights; {} if there is none or it is not finite. Collective."""
    if is_unevaluated(state, unit):
        logger.warning("the checkpoint has no %s: the run ends before the evaluation of these weights", name)
        return {}
    may_come = state.logged.evaluated_at is None and (state.eval_state is not None or numbers.is_own_loop(unit))
    say = logger.info if may_come else logger.error
    try:
        number, is_fresh = numbers.number(name, state, unit, "eval")
    except Unknown as error:
        say("the checkpoint has no %s: %s", name, error)
        return {}
    if not is_fresh:  # it is of older weights
        return {}
    if not math.isfinite(number):
        say("the checkpoint is saved without its %s, which is %s", name, number)
        return {}
    return {name: number}


class _Fixed:
    """A state that was already taken."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("only ever saved")
