"""What watches that the ranks do the same with a module, and what the loop tells it.

Where ranks do not do the same, collectives are paired wrongly or wait for ever, or copies drift apart in silence. A guard sees
what its own rank does. What it has to say travels in the message that a window sends in any case, so it costs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from echelon.common.errors import RanksDisagreeError, UsageError

__all__ = ["Guard"]


class Guard:
    """One of `Prepared.guards`, of which all ranks have the same ones in the same order. The loop calls all of them alike.

    Attributes:
        numbers: of how many numbers its signature consists.
        is_always_told: its signature is in the message of every window; else only where a rank has news.
        has_news: this rank has done something else than in the window before, so that all signatures are to be summed up.
        in_doubt: this rank has changed something on which passes or steps rely: all ranks are to `compare` before they go on.
    """

    numbers = 0
    is_always_told = False
    has_news = False
    in_doubt: bool = False

    def begin_pass(self, *, first: bool) -> None:
        """A micro-batch's forward pass is about to begin, perhaps a window's `first`."""

    def end_pass(self) -> None:
        """Its loss is there."""

    def explain(self, error: BaseException) -> UsageError | None:
        """A pass has raised this: what it means, if it is torch's and says nothing of its cause. Rank by rank."""
        return None

    def signature(self) -> tuple[float, ...]:
        """Of the window under way, before its last backward pass: whole numbers, whose sums over the ranks are exact."""
        return ()

    def check(self, sums: Sequence[float], ranks: int, update: int) -> None:
        """When the window has been reduced, before the optimizer steps. Collective if it was told.

        Args:
            sums: of all ranks' signatures; empty if they were not told.
            ranks: how many these are.
            update: the window's, from 0.
        Raises:
            RanksDisagreeError: on every rank.
        """

    def compare(self) -> None:
        """When a rank is in doubt. Collective.

        Raises:
            RanksDisagreeError: on every rank: they have not changed the same.
        """

    def differs_from_some(self) -> RanksDisagreeError:
        """For a rank in doubt which knows that another one is not, and waits in its backward pass."""
        raise NotImplementedError(f"{type(self).__name__} is never in doubt.")

    def discard(self) -> None:
        """The window under way was given up, on all ranks."""

    def begin_epoch(self, modules: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Before each epoch of training. Collective.

        Args:
            modules, optimizers: a unit's, as `Prepared`, by the attributes' names.
        Raises:
            RanksDisagreeError: on every rank.
        """

    def evaluated(self) -> None:
        """At the end of an evaluation or prediction. Collective.

        Raises:
            RanksDisagreeError: on every rank.
        """

    def settle(self) -> None:
        """Compare what no window has told yet: before a save, and at the end. Collective.

        Raises:
            RanksDisagreeError: on every rank.
        """
