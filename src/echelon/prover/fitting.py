"""Which of the rows a script allows, as those that were run show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from echelon.parallel.layouts import in_words, resolve
from echelon.prover.matrix import AS_WRITTEN, Row
from echelon.prover.proof import Result
from echelon.prover.ran import Ran
from echelon.prover.unit_kind import UnitKind

__all__ = ["Fitting"]


@dataclass
class Fitting:
    """
    Args:
        run: a row.
        say: adds a note to the proof.
    Attributes:
        kind: of the unit.
        overridable: the layout can be another one than the script's.
        idle: the script never trains.
    """

    run: Callable[[Row], Result]
    say: Callable[[str], None]
    kind: UnitKind | None = None
    overridable: bool = True
    idle: bool = False
    _yours: tuple[str, int, int] | None = None  # layout, ranks, accumulation
    _failures: dict[str, set[int]] = field(default_factory=dict)  # numbers of ranks by their last line
    _hopeless: set[int] = field(default_factory=set)  # numbers of ranks

    def results(self, rows: list[Row]) -> Iterator[Result]:
        """Of the rows, as far as this script allows."""
        unfit: dict[str, tuple[str, list[str]]] = {}
        for row in self._rows(rows):
            result = self._of_yours(row, rows) if row is rows[0] and row.yours else self.run(row)
            if row.fits_some and result.verdict == "not possible":
                why = result.message.partition(". ")[0].rstrip(".")
                unfit.setdefault(re.sub(r"[0-9]+", "", why), (why, []))[1].append(row.name)  # numbers differ by row
            else:
                yield result
        for why, names in unfit.values():
            self.say(f"Not for this model: {'; '.join(dict.fromkeys(names))}. {why}. --layouts with its name says more.")

    def _rows(self, rows: list[Row]) -> Iterator[Row]:
        """A script that wraps its module by hand can only be run as written; one that trains nothing, once."""
        done: set[int] = set()
        left_out, several = 0, False
        for row in rows:
            if self.idle:
                return
            # A step of one's own accumulates by itself, makes its own optimizer, computes in its own precision.
            differs = row.optimizer == "sgd" or (row.accumulation or 1) > 1 or row.precision is not None
            if row.ranks in self._hopeless:
                left_out += 1
            elif not self.overridable:
                self.say(
                    "The script makes its module parallel itself, or has no layout to choose: "
                    "it was run as written, on each number of ranks."
                )
                if row.ranks not in done:
                    yield replace(rows[0], ranks=row.ranks) if rows[0].yours else Row(AS_WRITTEN, row.ranks)
            # One optimizer's step changes what the loss of another meets, in an update's last micro-batch alone; and the loop
            # steps its own optimizers by name.
            elif self.kind is UnitKind.LOOP_OF_SEVERAL and (row.optimizer == "sgd" or (row.accumulation or 1) > 1):
                several = True
            elif not (self.kind is UnitKind.STEP and differs) and not self._is_done(row):
                yield row
            done.add(row.ranks)
        if several:
            self.say(
                "Rows with another accumulation, or with SGD, were left out: with several optimizers the first changes which "
                "step a loss comes after, and the loop steps optimizers of its own."
            )
        if left_out:
            self.say(f"{left_out} more rows were left out: the script fails with the same error on so many ranks.")

    def _of_yours(self, row: Row, rows: list[Row]) -> Result:
        """The script's own configuration, on as few of the numbers of ranks as it can have."""
        refused = None
        for ranks in dict.fromkeys([*sorted({r.ranks for r in rows if r.ranks > 1}), 1]):
            result = self.run(replace(row, ranks=ranks))
            if result.verdict != "not possible":
                return result
            refused = refused or result
        assert refused is not None
        return refused

    def _is_done(self, row: Row) -> bool:
        """It is the script's own configuration, which was run already."""
        if self._yours is None or row.precision or row.parts or row.optimizer != "script" or not isinstance(row.layout, str):
            return False
        layout = resolve(row.layout)
        return layout is not None and (in_words(layout), row.ranks, row.accumulation) == self._yours

    def failed(self, error: str, ranks: int, *, began: bool) -> None:
        """What fails in one process, or twice before it trains, need not be seen again."""
        seen = self._failures.setdefault(error.strip().rpartition("\n")[2], set())
        again = bool(seen)
        seen.add(ranks)
        if 1 in seen or (again and not began):
            self._hopeless |= seen

    def name(self, row: Row, result: Result, ran: Ran) -> None:
        """Say which layout a row had, and whether it is the script's own; learn from it."""
        record = ran.records[0]
        self.kind = record["kind"]
        accumulation = row.accumulation or record["accumulation"]
        if self.kind and not record["overridable"]:
            self.overridable = False
            result.label = Row(AS_WRITTEN, row.ranks, None, row.accumulation, row.optimizer).label
            result.yours = row.accumulation is None
        elif row.yours and self.kind:
            own = record["own_layout"]
            if not (ran.row.half or (ran.row.compiles and ran.row.is_compiled)):  # in which no other row is as the script's own
                self._yours = record["own_row"], row.ranks, accumulation
            result.label = Row(own, row.ranks, None, accumulation).label
        elif self._yours is not None:
            is_script = row.optimizer == "script" and not (row.precision or row.parts)
            result.yours = bool(record["is_own"]) and is_script and accumulation == self._yours[2]
        self.idle = not record["updates"] and not self.kind
