"""The request of `echelon run --profile` and `--memory-snapshot` to the ranks: which steps of which ranks to trace."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.common.errors import CommandError, LauncherEnvironmentError, require

__all__ = ["MEMORY_VARIABLE", "VARIABLE", "Profile", "wants_memory_snapshot"]

VARIABLE = "ECHELON_PROFILE"
MEMORY_VARIABLE = "ECHELON_MEMORY_SNAPSHOT"

_NUMBER = r"[0-9]{1,12}"
_STEPS = re.compile(rf"({_NUMBER})(?::({_NUMBER}))?")
_RANKS = re.compile(rf"{_NUMBER}(\+{_NUMBER})*")
_MOST_STEPS = 1000  # each step takes megabytes of a trace
_FORM = "steps=FIRST:LAST, or steps=FIRST:LAST,ranks=0+3, such as steps=10:12"


@dataclass(frozen=True)
class Profile:
    """The steps to trace.

    Args:
        first, last: training steps, counted from 1 as in metrics.jsonl; both are included.
        ranks: ranks that write a trace; None for all.
    """

    first: int
    last: int
    ranks: tuple[int, ...] | None = (0,)

    @classmethod
    def parse(cls, text: str, what: str = "--profile") -> Profile:
        """From `steps=10:12`, `steps=10` or `steps=10:12,ranks=0+3`. Without `ranks`, rank 0 alone; `ranks=all` is all ranks.

        Args:
            what: source of the text, for messages.
        Raises:
            UsageError: anything else.
        """
        pairs = [part.partition("=") for part in text.split(",")]
        fields = {name: value for name, _, value in pairs}
        steps = _STEPS.fullmatch(fields.get("steps", ""))
        ranks = fields.get("ranks", "0")
        known = len(fields) == len(pairs) and set(fields) <= {"steps", "ranks"}
        are_ranks = ranks == "all" or _RANKS.fullmatch(ranks) is not None
        kind = LauncherEnvironmentError if what == VARIABLE else CommandError
        require(known and steps is not None and are_ranks, what, _FORM, text, kind=kind)
        assert steps is not None
        first, last = int(steps[1]), int(steps[2] or steps[1])
        if not 1 <= first <= last:
            raise kind(f"{what} must name steps from 1 on, the first one first, got {text}. Write steps=10:12.")
        if last - first >= _MOST_STEPS:
            raise kind(f"{what} must name at most {_MOST_STEPS} steps, got {last - first + 1}. Three tell as much.")
        return cls(first, last, None if ranks == "all" else tuple(sorted({int(rank) for rank in ranks.split("+")})))

    def check_ranks(self, ranks: int) -> None:
        """Check that the ranks exist.

        Raises:
            UsageError: a run with `ranks` ranks lacks one of them.
        """
        if self.ranks is not None and self.ranks[-1] >= ranks:
            raise CommandError(f"--profile must name ranks from 0 to {ranks - 1}, got {self.ranks[-1]}.")

    def __str__(self) -> str:
        ranks = "all" if self.ranks is None else "+".join(map(str, self.ranks))
        return f"steps={self.first}:{self.last},ranks={ranks}"

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Profile | None:
        """The request to this process, from its environment.

        Raises:
            UsageError: the variable does not hold what the launcher writes.
        """
        return cls.parse(env[VARIABLE], VARIABLE) if env.get(VARIABLE) else None


def wants_memory_snapshot(env: Mapping[str, str] = os.environ) -> bool:
    return env.get(MEMORY_VARIABLE) == "1"
