"""What watches that the ranks do the same with a module, and what the loop tells it.

Where ranks do not do the same, collectives are paired wrongly or wait for ever, or copies drift apart in silence. A guard sees
what its own rank does. What it has to say travels in the message that a window sends in any case, so it costs none.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from echelon.common.errors import RanksDisagreeError, UsageError
from echelon.world import agree, rng

__all__ = ["Guard", "SameDraws"]


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


# Whether ranks that share layers draw the same random numbers in their passes, as they must.
#
# Tensor parallelism computes on all of its ranks what lies between split layers: dropout there, and the noise that a loss draws,
# must be alike. Their streams are, until one rank draws for itself, as rank 0 does for a picture in its log: from then on each
# trains with masks of its own, parameters that all have whole drift apart, and nothing fails.
#
# It saves who draws a picture or a sample for the log on rank 0 (tests/parallel/test_same_draws.py).
#
# Each window ends with a number of each rank, in the message that the window sends in any case. The numbers of ranks that share
# layers add up to 0 if their streams stand alike. Where the passes draw nothing, ranks say 0: then nothing is wrong.


class SameDraws(Guard):
    """What this rank says of its stream.

    Args:
        rank, size: its place among the ranks that share its layers.
        device: what it computes on, whose stream is looked at.
    """

    numbers = 1
    is_always_told = True

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self._factor, self._device = (size - 1 if rank == 0 else -1), device
        self._before = self._said = 0

    def begin_pass(self, *, first: bool) -> None:
        self._before, self._said = self._now(), 0 if first else self._said

    def end_pass(self) -> None:
        if (now := self._now()) != self._before:
            self._before, self._said = now, zlib.crc32(now.to_bytes(4, "little"), self._said)

    def signature(self) -> tuple[float]:
        return (float(self._said * self._factor),)  # below 2**32 x size

    def check(self, sums: Sequence[float], ranks: int, update: int) -> None:
        if any(sums):
            raise RanksDisagreeError(
                f"ranks that share layers (tp) must draw the same random numbers, got different ones in update {update}: dropout "
                "or noise would differ from rank to rank, and their parameters would drift apart. Something draws on some ranks "
                "only, such as a sample for rank 0's log: let all ranks draw, or give it a generator of its own "
                "(torch.Generator().manual_seed(0))."
            )

    def check_now(self, update: int) -> None:
        """As `check`, in the middle of a window. Collective."""
        signatures = agree.gather(self.signature())
        self.check([sum(each for (each,) in signatures)], len(signatures), update)

    def _now(self) -> int:
        on_gpu = self._device.type == "cuda"
        state = torch.cuda.get_rng_state(self._device) if on_gpu else torch.default_generator.get_state()
        return rng.position(state)
