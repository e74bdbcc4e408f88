"""The interface between the loop and guards, which check that all ranks do the same with a module.

If ranks differ, collectives are paired wrongly or hang, or replicas silently drift apart. A guard sees what its own rank does.
Its signature travels in the message that each window sends anyway, so it costs no further message.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from echelon.common.errors import RanksDisagreeError, UsageError
from echelon.world import agree, rng

__all__ = ["Guard", "SameDraws", "explain"]


class Guard:
    """One of `Prepared.guards`. All ranks have the same guards in the same order, and the loop calls them alike.

    Attributes:
        numbers: how many numbers its signature has.
        is_always_told: its signature is in every window's message; else only if a rank has news.
        has_news: this rank did something else than in the window before, so all ranks must sum their signatures.
        in_doubt: this rank changed something on which passes or steps rely: all ranks must `compare` before they continue.
    """

    numbers = 0
    is_always_told = False
    has_news = False
    in_doubt: bool = False

    def begin_pass(self, *, first: bool) -> None:
        """Called before a micro-batch's forward pass; `first` of its window."""

    def end_pass(self) -> None:
        """Called when the pass has computed its loss."""

    def explain(self, error: BaseException) -> UsageError | None:
        """A clearer error for one that a pass has raised, if it is torch's and does not name its cause. Per rank."""
        return None

    def signature(self) -> tuple[float, ...]:
        """The current window's signature, before its last backward pass: integers, so that sums over the ranks are exact."""
        return ()

    def check(self, sums: Sequence[float], ranks: int, update: int) -> None:
        """Called when the window has been reduced, before the optimizer steps. Collective if signatures were sent.

        Args:
            sums: sums of all ranks' signatures; empty if they were not sent.
            ranks: number of ranks.
            update: the window's update, from 0.
        Raises:
            RanksDisagreeError: on every rank.
        """

    def compare(self) -> None:
        """Called on all ranks if one is in doubt. Collective.

        Raises:
            RanksDisagreeError: on every rank: they have not made the same changes.
        """

    def differs_from_some(self) -> RanksDisagreeError:
        """The error for a rank in doubt if another rank is not in doubt and already waits in its backward pass."""
        raise NotImplementedError(f"{type(self).__name__} is never in doubt.")

    def discard(self) -> None:
        """Called when the current window is discarded, on all ranks."""

    def begin_epoch(self, modules: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Called before each epoch of training. Collective.

        Args:
            modules, optimizers: a unit's modules (as `Prepared`) and optimizers, by attribute name.
        Raises:
            RanksDisagreeError: on every rank.
        """

    def evaluating(self) -> AbstractContextManager[Any]:
        """Context of the passes of an evaluation or prediction."""
        return nullcontext()

    def evaluated(self) -> None:
        """Called at the end of an evaluation or prediction. Collective.

        Raises:
            RanksDisagreeError: on every rank.
        """

    def settle(self) -> None:
        """Compare what no window's message has reported yet: before a save, and at the end. Collective.

        Raises:
            RanksDisagreeError: on every rank.
        """


def explain(guards: Iterable[Guard], error: BaseException) -> None:
    """Explain an error that a pass has raised.

    Raises:
        UsageError: from torch's error, if a guard knows the cause that torch's error does not name.
    """
    for guard in guards:
        if (explanation := guard.explain(error)) is not None:
            raise explanation.with_traceback(error.__traceback__) from error  # shows the user's line that failed


# Ranks that share layers must draw the same random numbers in their passes.
#
# Under tensor parallelism all tp ranks compute what lies between split layers, so dropout there and the noise of a loss must be
# equal. The ranks' RNG states are equal until one rank draws alone, as rank 0 does for a picture or a sample in its log
# (tests/parallel/test_same_calls.py). From then on each rank trains with its own masks, whole parameters drift apart, and nothing
# fails.
#
# So each rank sends a number in the message that a window sends anyway. The numbers of ranks that share layers add up to 0 if
# their RNG states are equal. If the passes draw nothing, ranks send 0: then nothing is wrong.


class SameDraws(Guard):
    """Compares this rank's RNG state with that of the ranks that share its layers.

    Args:
        rank, size: this rank's place among them.
        device: the device that computes, whose RNG state is compared.
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
                "or noise would differ by rank, and parameters would drift apart. Some code draws random numbers on some ranks "
                "only, such as a sample for rank 0's log: let all ranks draw, or give that code a generator of its own "
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
