"""What the ranks of a run agree on before they rely on it: limits, lengths of loaders, ends of epochs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from echelon.common.errors import RanksDisagreeError
from echelon.contracts.overrides import overrides
from echelon.data.base import loaders_of
from echelon.data.loader import Loader
from echelon.data.prefetch import Feed
from echelon.loop.callback import Callback
from echelon.loop.progress import Progress
from echelon.loop.state import EntryPoint, PhaseState, State
from echelon.world import agree

__all__ = ["CutShort", "cuts_evaluation", "on_calls", "on_end", "on_lengths", "on_limits"]


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
        "seed of the order": _seeds(phase.dataloader),
        "epochs done": progress.num_epochs_completed,
        "updates done": progress.num_updates_completed,
        "steps done": progress.num_steps_completed,
    }
    agree.same_on_all("where training begins and ends", limits, "Give all ranks the same limits, loader and checkpoint.")


def _seeds(dataloader: Any) -> list[int | None]:
    """By loader, where they decide which samples a rank has: with others, some come twice and some never."""
    if overrides().observes:
        return []
    return [each.order.seed if isinstance(each, Loader) and each.options.dp is None else None for each in loaders_of(dataloader)]


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


def on_end(phase: str, used: int, *, ended: bool, is_last: bool, drops: bool) -> bool | None:
    """Between two batches of loaders without a length: all ranks have one more, or none has. Nor is it the last on some ranks
    only: there it would end a window, whose gradients the others do not sum up yet.

    Args:
        drops: what not all ranks have is left out.
    Returns:
        None where ranks go on. Else the epoch ends, since others have no more: with this rank's batch if True, else without it.
    """
    if not agree.any_rank(ended or is_last):
        return None
    told = agree.gather([used, ended, is_last, drops])
    if all(each[1:3] == told[0][1:3] for each in told):
        return None
    if all(each[3] for each in told):
        return not any(each[1] for each in told)
    shown = ", ".join(
        f"rank {r}: {'ended after' if e else 'has only' if last else 'has batch'} {n}" for r, (n, e, last, _) in enumerate(told)
    )
    raise RanksDisagreeError(
        f"ranks disagree about the end of the {phase} epoch: {shown}. Give every rank equally many batches; "
        "StreamLoader(tail='drop') leaves out what not all ranks have."
    )


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
