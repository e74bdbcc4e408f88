"""The ways of running a script that are compared, one row each.

Rows have the script's own optimizer; some have SGD instead, since Adam with clipping hides a gradient of the wrong scale.
Layouts that the user names are also tried on more ranks, with accumulation and with SGD; by default only `ddp` and `fsdp` are,
whose engines the others use.
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


# More directions, by the number of ranks: a row each, if so many ranks run and the model can be divided in these directions.
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
        parts: in bit-equal mode, how many parts a global batch has, over all ranks.
        precision: "bf16" compares with one process under autocast; None is float32.
        workers: ranks train by themselves and average after each update. This equals one process only for plain SGD without
            clipping, so the row trains with that.
        yours: the script's own layout and accumulation; also its precision, and compiled if it compiles, as no other row is.
        restores: paths of state kept between passes (`pass_state.py`): the reference's passes begin with the ranks' values.
        constant_draws: random operators give a sample the same numbers in any batch (`operators.py`).
        apart: one process cannot train on joined batches; it adds up the batches by their weights.
        draws: the row before drew random numbers, or no row ran yet. If not, ranks that share samples need no constant draws.
        drawn_alike: with constant draws, operators (and numbers of dimensions) that give all samples the same numbers.
        fits_some: the user did not name it: if the model cannot run so, that is no failure, and a note says why.
        brief: compare fewer updates if all end within the first epoch: an earlier row that divides batches compares all.
        eager: compilation is off in the row `yours`, too.
        seeded_alike: RNGs that the script does not seed begin alike on all ranks, which they do not without prove.
        compiles, half: found during the run: the script compiles; "bf16", "fp16" or "float8" if it computes in that.
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
        """The type with few digits in which it computes; None for float32."""
        return self.half or self.precision

    @property
    def is_compiled(self) -> bool:
        """Whether the script may compile. Constant draws do not reach compiled code: with them, it runs uncompiled."""
        return self.yours and not self.eager and not self.constant_draws

    @property
    def cuts_sequences(self) -> bool:
        """Whether ranks get parts of sequences, which code that was not written for this may not support."""
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
    """Whether it divides batches between all of its ranks, so that none share samples."""
    layout = resolve(row.layout)
    return row.ranks > 1 and not (isinstance(layout, Layout) and (layout.cp, layout.tp, layout.pp) != (1, 1, 1))


def _of_layout(
    name: str, layout: Any, several: Sequence[int], accumulation: Sequence[int], *, sgd: bool, bf16: bool, once: bool
) -> list[Row]:
    """The rows of one layout.

    Args:
        once: only on the smallest number of ranks.
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
    """One row each, with the largest accumulation: a pipeline runs the micro-batches of an update at once."""
    return [
        Row(name, size, Layout(**axes), max(accumulation), fits_some=True)
        for size in several
        for name, axes in DIRECTIONS.get(size, {}).items()
    ]


def _bitwise(named: Mapping[str, Any], ranks: Sequence[int], parts: int) -> list[Row]:
    """Rows of the bit-equal mode, for numbers of ranks that divide the number of parts."""
    return [
        Row(name, r, layout, None, parts=parts)
        for name, layout in {"none": "none", **named}.items()
        if name in ("none", "ddp", "fsdp")
        for r in (sorted(set(ranks)) if name != "none" else [1])
        if parts % r == 0 and (r > 1 or name == "none")
    ]


@dataclass
class Fitting:
    """Runs the rows that fit a script, and learns from each which others do.

    Args:
        run: runs a row.
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
    _failures: dict[str, set[int]] = field(default_factory=dict)  # by an error's last line, the numbers of ranks
    _hopeless: set[int] = field(default_factory=set)  # numbers of ranks

    def results(self, rows: list[Row]) -> Iterator[Result]:
        """The results of the rows that this script allows."""
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
            # One optimizer's step changes the next loss, in the last micro-batch of an update only; and the loop steps its own
            # optimizers by name.
            elif self.kind is UnitKind.LOOP_OF_SEVERAL and (row.optimizer == "sgd" or (row.accumulation or 1) > 1):
                several = True
            elif not (self.kind is UnitKind.STEP and differs) and not self._is_done(row):
                yield row
            done.add(row.ranks)
        if several:
            self.say(
                "Rows with another accumulation, or with SGD, were left out: with several optimizers, accumulation changes which "
                "steps precede a loss, and the loop steps optimizers of its own."
            )
        if left_out:
            self.say(f"{left_out} more rows were left out: the script fails with the same error on so many ranks.")

    def _of_yours(self, row: Row, rows: list[Row]) -> Result:
        """The script's own configuration, on the smallest number of ranks above one that it allows, or else on one."""
        refused = None
        for ranks in dict.fromkeys([*sorted({r.ranks for r in rows if r.ranks > 1}), 1]):
            result = self.run(replace(row, ranks=ranks))
            if result.verdict != "not possible":
                return result
            refused = refused or result
        assert refused is not None
        return refused

    def _is_done(self, row: Row) -> bool:
        """Whether the row is the script's own configuration, which was run already."""
        if self._yours is None or row.precision or row.parts or row.optimizer != "script" or not isinstance(row.layout, str):
            return False
        layout = resolve(row.layout)
        return layout is not None and (in_words(layout), row.ranks, row.accumulation) == self._yours

    def failed(self, error: str, ranks: int, *, began: bool) -> None:
        """Note a failure. An error in one process, or twice before training, rules out more rows on so many ranks."""
        seen = self._failures.setdefault(error.strip().rpartition("\n")[2], set())
        again = bool(seen)
        seen.add(ranks)
        if 1 in seen or (again and not began):
            self._hopeless |= seen

    def name(self, row: Row, result: Result, ran_as: Row, record: RankRecord) -> None:
        """Label a row's result with its layout, note whether that is the script's own, and learn from the record."""
        self.kind = record.kind
        accumulation = row.accumulation or record.accumulation
        if self.kind and not record.overridable:
            self.overridable = False
            result.label = Row(AS_WRITTEN, row.ranks, None, row.accumulation, row.optimizer).label
            result.yours = row.accumulation is None
        elif row.yours and self.kind:
            own = record.own_layout
            if not (ran_as.half or (ran_as.compiles and ran_as.is_compiled)):  # no other row computes as the script does
                self._yours = record.own_row, row.ranks, accumulation
            result.label = Row(own, row.ranks, None, accumulation).label
        elif self._yours is not None:
            is_script = row.optimizer == "script" and not (row.precision or row.parts)
            result.yours = bool(record.is_own) and is_script and accumulation == self._yours[2]
        self.idle = not record.updates and not self.kind
