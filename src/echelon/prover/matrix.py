"""Which ways of running a script are compared: a row each.

The script's own optimizer is in every row; there are rows with SGD as well, since Adam with clipping hides a gradient of the
wrong scale. What a row says beyond its layout (more ranks, a split, SGD) is asked of every layout that somebody names; by
default, of `ddp` and `fsdp` alone, of whose engines the others are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echelon.common.errors import ProveError
from echelon.parallel.composed import Layout
from echelon.parallel.ddp.local_sgd import DiLoCoStrategy, LocalSGDStrategy
from echelon.parallel.layouts import in_words, resolve
from echelon.parallel.pipeline.schedules import SCHEDULES
from echelon.prover.proof import Result
from echelon.prover.records import RankRecord
from echelon.prover.values import UnitKind

__all__ = ["AS_WRITTEN", "DIRECTIONS", "YOURS", "Fitting", "Row", "matrix"]

AS_WRITTEN = "as written"
YOURS = "yours"
# Of LAYOUTS those that train the same numbers as one process, and tp.
DEFAULT = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "tp")
_ENGINES = ("ddp", "fsdp")


# More directions, by the number of ranks: each where so many are run and the model can be divided so.
DIRECTIONS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp, sequence parallel": {"tp": 2, "sequence_parallel": True},
        "cp": {"cp": 2},
        **{f"pp, {schedule}": {"pp": 2, "schedule": schedule} for schedule in SCHEDULES},
        "ep": {"dp_shard": 2, "ep": 2},
    },
    4: {
        "fsdp x cp": {"dp_shard": 2, "cp": 2},
        "fsdp x pp": {"dp_shard": 2, "pp": 2},
        "tp x pp": {"tp": 2, "pp": 2},
        "cp x tp": {"cp": 2, "tp": 2},
        "hsdp x ep": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    },
    8: {"hsdp x tp": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}},
}


@dataclass(frozen=True)
class Row:
    """One way of running the script.

    Args:
        name: what the table shows.
        ranks: processes.
        layout: a layout's name or a Strategy; None leaves what the script says.
        accumulation: micro-batches per update on each rank; None leaves what the script says.
        optimizer: "script", or "sgd" in place of the script's.
        parts: with bit-equal numbers: micro-batches of a global batch over all ranks.
        precision: "bf16" compares with one process under autocast; None is float32.
        workers: ranks train by themselves and meet after each update: that equals one process for plain SGD without clipping
            alone, which therefore take the place of the script's.
        yours: the script's own layout and accumulation; also its precision, and compiled if it compiles, as no other row is.
        restores: paths of state that the unit keeps between passes (`pass_state.py`), with which those of the reference begin.
        constant_draws: random operators give a sample the same numbers in any batch (`operators.py`).
        apart: one process cannot train on joined batches, and adds them up by their weights.
        draws: the row before drew random numbers, or none has told yet. If not, ranks that share samples need no constant draws.
        drawn_alike: and these the same for all samples: operators, with numbers of dimensions.
        fits_some: nobody asked for it by name; a model that cannot be run so is not a failure, and a note says why.
        brief: an earlier row divides batches between ranks, and is compared for all updates: fewer are, if those end within the
            first epoch.
        eager: compilation is off in the row `yours`, too.
        seeded_alike: what the script does not seed draws alike on all ranks before it trains, as it does not without prove.
        compiles, half: what was found as it ran: that the script compiles; "bf16", "fp16" or "float8" if it computes in that.
    """

    name: str
    ranks: int
    layout: Any = None
    accumulation: int | None = None
    optimizer: str = "script"
    parts: int | None = None
    workers: bool = False
    fits_some: bool = False
    precision: str | None = None
    yours: bool = False
    constant_draws: bool = False
    apart: bool = False
    draws: bool = True
    drawn_alike: frozenset[tuple[str, int]] = frozenset()
    restores: frozenset[str] = frozenset()
    brief: bool = False
    eager: bool = False
    seeded_alike: bool = False
    compiles: bool = False
    half: str | None = None

    def imposed_precision(self, *, wide: bool) -> str | None:
        """None leaves the script's own; in float64 nothing is cast."""
        return None if self.yours and not wide else self.precision or "fp32"

    @property
    def narrow(self) -> str | None:
        """In which type with few digits it computes; None for float32."""
        return self.half or self.precision

    @property
    def is_compiled(self) -> bool:
        """Constant draws do not reach compiled code: it runs uncompiled with them."""
        return self.yours and not self.eager and not self.constant_draws

    @property
    def cuts_sequences(self) -> bool:
        """Ranks are given parts of sequences, which code that was not written for it may not be able to use."""
        return isinstance(self.layout, Layout) and self.layout.cp > 1

    @property
    def label(self) -> str:
        extra = [f"accumulation {self.accumulation}"] if self.accumulation not in (None, 1) else []
        extra += [self.optimizer] if self.optimizer != "script" else []
        extra += ["bitwise"] if self.parts else []
        extra += [self.precision] if self.precision else []
        return ", ".join([self.name, *extra])


def matrix(
    layouts: Sequence[str] | Mapping[str, Any] | None,
    ranks: Sequence[int],
    accumulation: Sequence[int],
    *,
    sgd: bool,
    parts: int | None = None,
    bf16: bool = False,
    yours: bool = False,
    eager: bool = False,
) -> list[Row]:
    """Every layout at every number of ranks above one; accumulation splits, SGD and bf16 at the smallest of them.

    A layout on one rank is compared once, with `none`. Splits, SGD and bf16 do not depend on how many ranks there are beyond
    one, so they are not multiplied with them. The first layout that divides batches is compared for all updates.

    Args:
        layouts: names, or Layouts by the names to show; None is `DEFAULT`, and `DIRECTIONS` and tp where they fit.
        yours: the script's own configuration comes first. eager: but uncompiled.
    Raises:
        UsageError: nothing would be compared, or a layout's name is unknown.
    """
    chosen = DEFAULT if layouts is None else layouts
    named = dict(chosen) if isinstance(chosen, Mapping) else {name: name for name in chosen}
    for layout in named.values():
        if isinstance(resolve(layout), DiLoCoStrategy):
            raise ProveError(
                "prove has nothing to compare DiLoCo with: its outer optimizer trains other numbers than one process, even when "
                "it steps after every update. 'local_sgd' is compared, with an average after each update."
            )
    accumulation = sorted(set(accumulation))
    several = sorted({r for r in ranks if r > 1})
    rows = [Row("none", 1, "none", a) for a in accumulation if a > 1] if 1 in ranks else []
    if 1 in ranks:
        rows.insert(0, Row("none", 1, "none", 1))
        rows += [Row("none", 1, "none", 1, precision="bf16")] if bf16 else []
    for name, layout in named.items():
        if name == "none":
            continue
        more = layouts is not None or name in _ENGINES
        rows += _of_layout(name, layout, several, accumulation if more else [1], sgd=sgd and more, bf16=bf16, once=not more)
    if layouts is None:
        rows = [replace(row, fits_some=True) if row.name.startswith("tp") else row for row in rows]
        rows += _directions(several, accumulation)
    if (whole := next((row for row in rows if _divides_batches(row)), None)) is not None:
        full = (whole, rows[0])
        rows = [replace(row, brief=row not in full and row.precision is None) for row in rows]
    if parts:
        rows += _bitwise(named, ranks, parts)
    if not rows:
        raise ProveError("prove needs at least one layout and one number of ranks, got none.")
    return [Row(YOURS, (several or [1])[0], yours=True, eager=eager), *rows] if yours else rows


def _divides_batches(row: Row) -> bool:
    """Between all of its ranks: none of them share samples."""
    layout = resolve(row.layout)
    return row.ranks > 1 and not (isinstance(layout, Layout) and (layout.cp, layout.tp, layout.pp) != (1, 1, 1))


def _of_layout(
    name: str, layout: Any, several: Sequence[int], accumulation: Sequence[int], *, sgd: bool, bf16: bool, once: bool
) -> list[Row]:
    """
    Args:
        once: on the fewest ranks alone.
    """
    sizes = [r for r in several if r >= 4] if name == "hsdp" else several  # two ranks cannot be split in both ways
    sizes = sizes[:1] if once else sizes
    if isinstance(resolve(layout), LocalSGDStrategy):
        return [Row(f"{name}, every update", r, LocalSGDStrategy(every=1), 1, "sgd", workers=True) for r in sizes]
    rows = [Row(name, r, layout, 1) for r in sizes]
    if sizes:
        first = rows[0]
        rows += [replace(first, accumulation=a) for a in accumulation if a > 1]
        rows += [replace(first, optimizer="sgd")] if sgd else []
        rows += [replace(first, precision="bf16", accumulation=max(accumulation))] if bf16 else []
    if name == "tp" and layout == "tp" and 4 in several:
        rows.append(Row("tp x fsdp", 4, Layout(tp=2), 1))
    return rows


def _directions(several: Sequence[int], accumulation: Sequence[int]) -> list[Row]:
    """Each alone with the most micro-batches of an update, which a pipeline has under way at once."""
    return [
        Row(name, size, Layout(**axes), max(accumulation), fits_some=True)
        for size in several
        for name, axes in DIRECTIONS.get(size, {}).items()
    ]


def _bitwise(named: Mapping[str, Any], ranks: Sequence[int], parts: int) -> list[Row]:
    """Rows of the bit-equal mode, where the number of ranks divides that of the parts."""
    return [
        Row(name, r, layout, None, parts=parts)
        for name, layout in {"none": "none", **named}.items()
        if name in ("none", "ddp", "fsdp")
        for r in (sorted(set(ranks)) if name != "none" else [1])
        if parts % r == 0 and (r > 1 or name == "none")
    ]


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

    def name(self, row: Row, result: Result, ran_as: Row, record: RankRecord) -> None:
        """Say which layout a row had, and whether it is the script's own; learn from it."""
        self.kind = record.kind
        accumulation = row.accumulation or record.accumulation
        if self.kind and not record.overridable:
            self.overridable = False
            result.label = Row(AS_WRITTEN, row.ranks, None, row.accumulation, row.optimizer).label
            result.yours = row.accumulation is None
        elif row.yours and self.kind:
            own = record.own_layout
            if not (ran_as.half or (ran_as.compiles and ran_as.is_compiled)):  # in which no other row is as the script's own
                self._yours = record.own_row, row.ranks, accumulation
            result.label = Row(own, row.ranks, None, accumulation).label
        elif self._yours is not None:
            is_script = row.optimizer == "script" and not (row.precision or row.parts)
            result.yours = bool(record.is_own) and is_script and accumulation == self._yours[2]
        self.idle = not record.updates and not self.kind
