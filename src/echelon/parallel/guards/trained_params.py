"""Whether all ranks train the same parameters, while layers are frozen and unfrozen: what they send in a backward pass follows
from it, so that it would fail, or wait for ever, where one rank alone has changed something.

A rank sees what it has changed itself, and nobody else does. It says so where ranks tell each other something in any case: after
a step or an epoch, or by the window's message before a backward pass. Where nobody says anything, nobody has changed anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from echelon.common.errors import RanksDisagreeError
from echelon.world import agree

__all__ = ["SameTrained"]


class SameTrained:
    """Notes which parameters are trained, when all ranks have the same ones.

    Args:
        named: those of all modules that ranks share, by names that say which module's.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        both = list(named)
        self._names, self._parameters = [n for n, _ in both], [p for _, p in both]
        self._agreed = self._now()

    def _now(self) -> list[bool]:
        return [p.requires_grad for p in self._parameters]

    @property
    def in_doubt(self) -> bool:
        """Whether this rank has changed something since the ranks had the same."""
        return self._now() != self._agreed

    def check(self) -> None:
        """When a rank is in doubt. Collective.

        Raises:
            RanksDisagreeError: on every rank: they have not changed the same.
        """
        now = self._now()
        every = agree.unless_same("which parameters were frozen or unfrozen", self._changed(now))
        if every is not None:
            other = next(rank for rank, each in enumerate(every) if each != every[0])
            name = next(n for n in self._names if (n in every[0]) != (n in every[other]))
            raise self._differs(name, *((0, other) if name in every[0] else (other, 0)))
        self._agreed = now

    def differs_from_some(self) -> RanksDisagreeError:
        """For a rank in doubt which knows that another one is not, and waits in its backward pass."""
        return self._differs(self._changed(self._now())[0], agree.rank(), None)

    def _changed(self, now: list[bool]) -> list[str]:
        return [name for name, a, b in zip(self._names, now, self._agreed, strict=True) if a != b]

    def _differs(self, name: str, here: int, there: int | None) -> RanksDisagreeError:
        did = "frozen" if self._agreed[self._names.index(name)] else "unfrozen"
        other = "another" if there is None else f"rank {there}"
        return RanksDisagreeError(
            f"ranks that share a model must train the same parameters of it, and disagree: {name} was {did} on rank {here} and "
            f"not on {other}. Freeze and unfreeze the same on all ranks, at the same step."
        )
