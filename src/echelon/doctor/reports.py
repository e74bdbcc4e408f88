"""The ranks' reports, parsed from their lines. Malformed lines are ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echelon.common.files import is_deeper
from echelon.common.terminal import rank_ranges

__all__ = ["Checkup", "RankReport"]

MARK = "echelon-doctor "
_LONGEST_LINE, _MOST_RANKS = 1 << 16, 1 << 20


@dataclass
class RankReport:
    """One rank: its host, its values by name, and the parts that failed, with the error."""

    rank: int
    host: str = "?"
    values: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.values.get(name)
        return value if isinstance(value, dict) else {}

    def texts(self, name: str) -> Mapping[str, str]:
        return {key: value for key, value in self.mapping(name).items() if isinstance(value, str)}

    def numbers(self, name: str, least: int = 1) -> list[float]:
        """A list of at least `least` numbers; empty if the value is anything else."""
        value = self.values.get(name)
        good = isinstance(value, list) and len(value) >= least and all(is_number(each) for each in value)
        return list(value) if good and isinstance(value, list) else []

    def number(self, name: str, key: str) -> float | None:
        value = self.mapping(name).get(key)
        return float(value) if is_number(value) else None  # type: ignore[arg-type]


def is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


@dataclass
class Checkup:
    """All that is known when the ranks have ended, or the time limit is over.

    Args:
        size: number of ranks that were started.
        hosts: the nodes that were asked, in order; empty for this machine.
        ranks: by number, those that reported anything.
        silent: for each node without an answer, the reason.
        ended: a sentence if the checkup ended early; else empty.
        quick: too little was measured to compare speeds.
    """

    size: int
    hosts: Sequence[str] = ()
    ranks: dict[int, RankReport] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    ended: str = ""
    quick: bool = False

    def read(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line.startswith(MARK) and len(line) <= _LONGEST_LINE:
                self._take(line.removeprefix(MARK))

    def _take(self, text: str) -> None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(value, list) or len(value) != 3 or is_deeper(value, 6):
            return
        rank, name, value_of_part = value
        if type(rank) is not int or not 0 <= rank < min(self.size, _MOST_RANKS) or not isinstance(name, str):
            return
        report = self.ranks.setdefault(rank, RankReport(rank))
        if name == "here" and isinstance(value_of_part, dict) and isinstance(value_of_part.get("host"), str):
            report.host = value_of_part["host"][:64]
        if (
            name == "error"
            and isinstance(value_of_part, list)
            and len(value_of_part) == 2
            and all(isinstance(each, str) for each in value_of_part)
        ):
            report.errors[value_of_part[0][:64]] = value_of_part[1]
        elif len(report.values) < 64:
            report.values[name] = value_of_part

    @property
    def in_order(self) -> list[RankReport]:
        return [self.ranks[rank] for rank in sorted(self.ranks)]

    @property
    def several_hosts(self) -> bool:
        return len({report.host for report in self.ranks.values()}) > 1

    def who(self, ranks: Iterable[int]) -> str:
        """Ranks in words; grouped by host, if there are several."""
        names = sorted(ranks)
        if not self.several_hosts:
            return rank_ranges(names)
        of_host: dict[str, list[int]] = {}
        for rank in names:
            of_host.setdefault(self.ranks[rank].host if rank in self.ranks else "?", []).append(rank)
        shown = [f"{host} ({rank_ranges(members)})" for host, members in list(of_host.items())[:8]]
        return ", ".join(shown) + (f" and {len(of_host) - 8} more hosts" if len(of_host) > 8 else "")
