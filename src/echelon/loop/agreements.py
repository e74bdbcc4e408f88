"""What the ranks of a run agree on before they rely on it: limits, lengths of loaders, ends of epochs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from echelon.common.errors import RanksDisagreeError
from echelon.contracts.overrides import overrides
from echelon.data.prefetch import Feed
from echelon.loop.callback import Callback
from echelon.loop.progress import Progress
from echelon.loop.state import EntryPoint, PhaseState, State
from echelon.loop.unit import Unit
from echelon.parallel.guards.trained_params import SameTrained
from echelon.parallel.prepared import Prepared
from echelon.parallel.state.stage_group import ranks_apart
from echelon.world import agree

__all__ = ["CutShort", "cuts_evaluation", "on_calls", "on_end", "on_lengths", "on_limits", "on_optimizers", "same_trained"]


def on_limits(phase: PhaseState, progress: Progress, callbacks: Iterable[Callback], window: Any) -> None:
    """Ranks that would stop at other places, or that begin at other places, leave one another waiting; and so does one that has a
    callback in which ranks meet, where others have none.
    """
    meeting = [type(each).__name__ for each in callbacks if getattr(each, "meets", False) is True]
    agree.same_on_all(
        "the callbacks in which they meet",
        meeting,
        "Give all ranks the same callbacks, without `if rank == 0`: who writes is decided within them.",
    )
    limits = {
        "max_epochs": phase.max_epochs,
        "max_updates": phase.max_updates,
        "updates_per_epoch": phase.updates_per_epoch,
        "max_steps": phase.max_steps,
        "max_steps_per_epoch": phase.max_steps_per_epoch,
        "accumulate": getattr(window, "size", None),
        "epochs done": progress.num_epochs_completed,
        "updates done": progress.num_updates_completed,
        "steps done": progress.num_steps_completed,
    }
    agree.same_on_all("where training begins and ends", limits, "Give all ranks the same limits and the same checkpoint.")


def _shared(unit: Unit) -> dict[str, Prepared[Any]]:
    """The modules, by the attributes' names, of which all ranks train the same parameters."""
    shared = {
        name: prepared
        for name, prepared in unit.prepared_modules().items()
        if prepared.averaged or prepared.forward_is_collective
    }
    # Others have other parameters on each rank, or train by themselves.
    own = (p.works_alone or p.stages or p.flattens_parameters or ranks_apart(p.module) is not None for p in shared.values())
    return {} if overrides().observes or any(own) else shared


def _named(shared: Mapping[str, Prepared[Any]]) -> dict[str, nn.Parameter]:
    for prepared in shared.values():
        prepared.reshard()
    return {f"{name}.{n}": p for name, each in shared.items() for n, p in each.named_parameters()}


def same_trained(unit: Unit) -> SameTrained | None:
    """After `on_optimizers`: looks whether ranks go on to train the same of what they share; None if they share nothing."""
    named = _named(_shared(unit))
    trained = SameTrained(named.items()) if named and agree.is_joined() else None
    for prepared in unit.prepared_modules().values():
        prepared.trained = trained
    return trained


def on_optimizers(unit: Unit) -> None:
    """Before each epoch: ranks that share a model train the same of it, and alike. Copies would drift apart, or shards of one
    parameter be trained in different ways, in silence; a backward pass would wait for gradients that others do not have.

    Raises:
        RanksDisagreeError: on all ranks, with what differs.
    """
    shared = _shared(unit)
    told: dict[str, list[Any]] = {}
    ids = {id(p) for each in shared.values() for p in (*each.module.parameters(), *each.others)}
    for name, optimizer in unit.tracked_optimizers().items() if shared else ():
        groups = getattr(optimizer, "param_groups", [])
        held = {id(p) for group in groups for p in group["params"]}  # a divided one may hold none here
        if not held or not ids.isdisjoint(held):  # else of what each rank has for itself
            rates = [float(g["lr"]) for g in groups if isinstance(g.get("lr"), (int, float, torch.Tensor))]
            told[name] = [type(optimizer).__name__, *rates]
    kinds = agree.kinds([told, [n for n, p in _named(shared).items() if not p.requires_grad]])
    if len(kinds) == 1:
        return
    (optimizers, first), (others, second) = kinds[:2]
    for name in {**optimizers, **others}:
        one, another = optimizers.get(name, ["none"]), others.get(name, ["none"])
        if one != another:
            raise RanksDisagreeError(
                f"ranks that share a model must train it alike, and disagree about {name}: {_told(one)} on one, "
                f"{_told(another)} on another. Make the same optimizer on all ranks, of the same groups, and change its lr alike."
            )
    differ = sorted(set(first) ^ set(second))
    raise RanksDisagreeError(
        "ranks that share a model must train the same parameters of it, and disagree: "
        f"{differ[0] if differ else 'some'} is frozen on one and trained on another. Freeze and unfreeze the same on all ranks."
    )


def _told(optimizer: list[Any]) -> str:
    kind, *rates = optimizer
    shown = ", ".join(f"{rate:g}" for rate in rates[:8])
    return f"{kind} (lr of its groups: {shown}{', ...' if len(rates) > 8 else ''})" if rates else str(kind)


def on_calls(phase: str) -> None:
    """Where an evaluation begins at whose end the ranks meet: one that evaluates alone would meet the others at something else.

    Raises:
        RanksDisagreeError: on all ranks, if others do something else.
    """
    agree.unless_same(f"the beginning of the {phase} epoch", 0)


def on_lengths(phase: str, feed: Feed, unit: Any) -> bool:
    """Compare the lengths of the ranks' loaders; True if they have none and must agree batch by batch.

    Without this, ranks with fewer batches leave the others waiting in a collective.
    """
    length = agree.same_on_all(
        f"the number of {phase} steps of this epoch",
        feed.length,
        "Give every rank a loader of the same length; echelon.Loader does.",
    )
    return length is None


def on_end(phase: str, used: int, *, ended: bool, is_last: bool) -> None:
    """Between two batches of loaders without a length: all ranks have one more, or none has. Nor is it the last on some ranks
    only: there it would end a window, whose gradients the others do not sum up yet.
    """
    if not agree.any_rank(ended or is_last):
        return
    told = agree.gather([used, ended, is_last])
    if all(each[1:] == told[0][1:] for each in told):
        return
    shown = ", ".join(
        f"rank {r}: {'ended after' if e else 'has only' if last else 'has batch'} {n}" for r, (n, e, last) in enumerate(told)
    )
    raise RanksDisagreeError(f"ranks disagree about the end of the {phase} epoch: {shown}. Give every rank equally many batches.")


class CutShort:
    """Whether an evaluation, a prediction or a test ends before its time, since a rank was asked to stop.

    Ranks that meet in collectives, in their forward passes or in callbacks, learn it at the same step; without any, each
    leaves by itself.
    """

    def __init__(self, state: State, *, together: bool) -> None:
        self._state = state
        self._any_rank = agree.AnyRanksLater() if together else None

    def asked(self) -> bool:
        wants = self._state.stop_requested
        asked = self._any_rank(wants)[0] if self._any_rank is not None else wants
        if asked and self._state.entry_point is not EntryPoint.FIT:  # there, ranks agree after it
            self._state.agree_to_stop()
        return asked

    def settle(self) -> None:
        if self._any_rank is not None:
            self._any_rank.last()


def cuts_evaluation(state: State, *, together: bool) -> CutShort | None:
    """None where `state.should_stop` is enough. Without `together` no collective is allowed: a rank may evaluate alone."""
    return None if state.alone else CutShort(state, together=together)
