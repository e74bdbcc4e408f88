"""Run a program under a matrix of strategies, numbers of ranks and accumulation splits, and say whether all train alike."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from echelon.contracts.errors import RankFailedError, UsageError
from echelon.launcher.function import launch
from echelon.prover import causes
from echelon.prover.judge import Difference, Verdict, compare
from echelon.prover.matrix import AS_WRITTEN, Row, matrix
from echelon.prover.rank import Target, run_reference, run_row
from echelon.prover.reference import micros_in_order
from echelon.prover.streams import NotJoinable, digest, join

__all__ = ["Proof", "Result", "prove", "prove_target"]


@dataclass
class Result:
    """One row of the table.

    Args:
        verdict: "agrees", "bit-equal", "DIFFERS", "failed", or "not possible": the strategy refuses this model or world.
        loss, gradient, parameter: largest relative differences from one process over all updates.
        step_s: median seconds per micro-batch step on rank 0, without the first. peak_bytes: largest of all ranks.
        of_tolerance: the largest share of its tolerance that a value used.
        first: what differs first.
        causes: likely ones, each with what was seen.
        undetermined: elements by parameter whose true gradient is zero, so that their value is rounding noise in any run.
        message: why it failed or is not possible.
    """

    label: str
    ranks: int
    verdict: str = ""
    loss: float | None = None
    gradient: float | None = None
    parameter: float | None = None
    updates: int = 0
    step_s: float | None = None
    peak_bytes: int | None = None
    of_tolerance: float | None = None
    first: Difference | None = None
    causes: list[tuple[str, str]] = field(default_factory=list)
    undetermined: dict[str, int] = field(default_factory=dict)
    message: str = ""

    @property
    def agrees(self) -> bool:
        return self.verdict in ("agrees", "bit-equal", "not possible")


@dataclass
class Proof:
    """The whole table.

    Args:
        dtype: "float32" or "float64".
        notes: what was left out, and what the numbers mean for this script.
    """

    dtype: str
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Every row agrees, and at least one was compared."""
        return all(r.agrees for r in self.results) and any(r.verdict in ("agrees", "bit-equal") for r in self.results)

    def to_json(self) -> dict[str, Any]:
        return {"holds": self.holds, "dtype": self.dtype, "notes": self.notes, "rows": [asdict(r) for r in self.results]}


def prove(
    make_unit: Callable[[], Any],
    make_data: Callable[[], Any],
    *,
    strategies: Sequence[str] | Mapping[str, Any] | None = None,
    ranks: Sequence[int] = (1, 2, 4),
    accumulation: Sequence[int] = (1, 2),
    updates: int = 5,
    float64: bool = False,
    sgd: bool = True,
    parts: int | None = None,
    seed: int = 0,
    on_result: Callable[[Result], None] | None = None,
) -> Proof:
    """Train what two functions make under every strategy, and compare each step with one process in plain PyTorch.

    Args:
        make_unit: builds the unit; called on every rank after the ranks have joined. Both functions are sent to other
            processes, as with `launch`.
        make_data: builds the loader, best an `echelon.Loader`, whose global batches do not depend on the ranks.
        strategies: names, or a mapping of the table's names to Strategies. By default ddp, fsdp, hsdp, zero1, zero2, and tp if
            the module has a `tp_plan`.
        ranks: numbers of processes. 1 is the loop itself against plain PyTorch.
        accumulation: micro-batches per update on each rank, tried at the smallest number of ranks above one.
        updates: how many optimizer updates are compared. A mistake shows in the first, as a rule; five let buffers, momentum
            and schedules take part.
        float64: compare in float64, to 1e-11.
        sgd: each strategy once with SGD in place of the unit's optimizer.
        parts: also the bit-equal mode, with global batches in so many micro-batches.
        seed: of every process before `make_unit`.
        on_result: called with each row as it is ready.
    Raises:
        UsageError: there is nothing to compare, or the reference cannot be computed.
    """
    rows = matrix(strategies, ranks, accumulation, sgd=sgd, parts=parts)
    return prove_target(Target(make_unit=make_unit, make_data=make_data), rows, updates, float64, seed, on_result)


def prove_target(
    target: Target, rows: list[Row], updates: int, float64: bool, seed: int = 0, on_result: Callable[[Result], None] | None = None
) -> Proof:
    """`prove` for a script or functions, over rows that are given."""
    if updates < 1:
        raise UsageError(f"updates {updates}: at least 1.")
    folder = Path(tempfile.mkdtemp(prefix="echelon-prove-"))
    try:
        run = _Proving(target, folder, updates, torch.float64 if float64 else torch.float32, seed)
        for row in run.fitting(rows):
            result = run.row(row)
            run.proof.results.append(result)
            if on_result is not None:
                on_result(result)
        return run.proof
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Proving:
    """The rows of one proof: what was run so far, and the references, by the data that they trained on."""

    def __init__(self, target: Target, folder: Path, updates: int, dtype: torch.dtype, seed: int) -> None:
        self.target, self.folder, self.updates, self.dtype, self.seed = target, folder, updates, dtype, seed
        self.proof = Proof(str(dtype).removeprefix("torch."))
        self.kind = ""
        self.overridable = True
        self.has_plan = False
        self._references: dict[Any, tuple[Path, dict[str, Any]]] = {}
        self._batches: dict[Any, str] = {}
        self._bitwise: dict[str, dict[str, torch.Tensor]] = {}
        self._count = 0

    def fitting(self, rows: list[Row]) -> Any:
        """The rows as far as this script allows: one that wraps its module by hand can only be run as written."""
        first, rest = rows[0], rows[1:]
        yield first
        if self.overridable or not self.kind:
            yield from (row for row in rest if self.has_plan or not row.needs_plan)
            return
        self.proof.notes.append(
            "The script makes its module parallel itself, or has no strategy to choose: "
            "it was run as written, on each number of ranks."
        )
        for ranks in sorted({row.ranks for row in rest} - {first.ranks}):
            yield Row(AS_WRITTEN, ranks)

    def row(self, row: Row) -> Result:
        """Run one row, find or compute its reference, and compare."""
        self._count += 1
        here = self.folder / f"row-{self._count}"
        here.mkdir()
        result = Result(row.label, row.ranks)
        try:
            launch(
                run_row,
                ranks=row.ranks,
                args=(self.target, row, str(here), self.updates, self.dtype, self.seed),
                quiet=True,
            )
        except RankFailedError as error:
            refused = isinstance(error.__cause__, UsageError)
            result.verdict = "not possible" if refused else "failed"
            result.message = str(error.__cause__) if refused else str(error)
            return result
        try:
            return self._compared(row, result, here)
        except RankFailedError as error:
            why = error.__cause__ if isinstance(error.__cause__, UsageError) else error
            result.verdict, result.message = "failed", f"the reference in plain PyTorch could not be computed: {why}"
            return result

    def _compared(self, row: Row, result: Result, here: Path) -> Result:
        files = [here / f"rank{r}.pt" for r in range(row.ranks)]
        records = [torch.load(f, weights_only=False) for f in files]
        self.kind, self.has_plan = records[0]["kind"], records[0]["has_plan"]
        if row.strategy is not None and not records[0]["overridable"]:
            self.overridable = False
            result.label = Row(AS_WRITTEN, row.ranks, None, row.accumulation, row.optimizer).label
        if not records[0]["updates"]:
            what = "no optimizer took a step before it ended" if self.kind else "it never called echelon's train or fit"
            result.verdict, result.message = "failed", f"there is nothing to compare: {what}."
            return result
        reference, facts = self._reference(row, records, files)
        verdict = compare(here, reference, records, self.dtype)
        self._judge(result, row, records, verdict, facts, here, reference, files)
        shutil.rmtree(here)
        return result

    def _reference(self, row: Row, records: list[dict[str, Any]], files: list[Path]) -> tuple[Path, dict[str, Any]]:
        key = _data_of(row, records)
        if key not in self._references:
            folder = self.folder / f"reference-{len(self._references)}"
            folder.mkdir()
            arguments = (self.target, row, [str(f) for f in files], str(folder), self.dtype, self.seed)
            facts = launch(run_reference, ranks=1, args=arguments, quiet=True)[0]
            self._references[key] = folder, facts
            self._note(facts)
        self._check_order(row, records, key)
        return self._references[key]

    def _note(self, facts: dict[str, Any]) -> None:
        if facts["drew"]:
            note = (
                "Random numbers are drawn in the forward pass: "
                "the reference repeats each rank's draws, micro-batch by micro-batch."
            )
        elif not facts["joined"]:
            note = "Micro-batches cannot be joined into one batch: the reference adds them up by their weights."
        else:
            return
        if note not in self.proof.notes:
            self.proof.notes.append(note)

    def _check_order(self, row: Row, records: list[dict[str, Any]], key: Any) -> None:
        """Rule of truth 1: an echelon.Loader gives the same global batches however they are split."""
        known = self._batches.setdefault(row.optimizer, key)
        if key != known:
            note = (
                "The global batch depends on the number of ranks or on the split: every row was compared with one process on "
                "its own batches. With echelon.Loader, which is given the global batch, they would be the same."
            )
            if note not in self.proof.notes and records[0]["global_batch"] is None:
                self.proof.notes.append(note)

    def _judge(
        self,
        result: Result,
        row: Row,
        records: list[dict[str, Any]],
        verdict: Verdict,
        facts: dict[str, Any],
        here: Path,
        reference: Path,
        files: list[Path],
    ) -> None:
        result.loss, result.gradient, result.parameter = verdict.loss, max(verdict.gradient, verdict.norm), verdict.parameter
        result.of_tolerance = verdict.used
        result.updates, result.first, result.undetermined = verdict.updates, verdict.first, verdict.undetermined
        times = records[0]["step_s"][1:] or records[0]["step_s"]
        result.step_s = median(times) if times else None
        peaks = [r["peak_bytes"] for r in records if r["peak_bytes"] is not None]
        result.peak_bytes = max(peaks, default=None)
        result.causes = causes.from_records(records)
        if verdict.first is not None:
            result.causes += [c for c in causes.from_verdict(verdict, records, facts["held"]) if c[0] not in dict(result.causes)]
            if verdict.first.phase in ("forward", "gradient"):
                known = dict(result.causes)
                result.causes += [c for c in self._mistakes(row, records, verdict, here, reference, files) if c[0] not in known]
        if verdict.first is not None or result.causes:
            result.verdict = "DIFFERS"
        elif row.parts:
            result.verdict = "bit-equal" if self._same_bits(row, here, verdict) else "DIFFERS"
        else:
            result.verdict = "bit-equal" if verdict.bit_equal else "agrees"

    def _mistakes(
        self, row: Row, records: list[dict[str, Any]], verdict: Verdict, here: Path, reference: Path, files: list[Path]
    ) -> list[tuple[str, str]]:
        assert verdict.first is not None
        k = verdict.first.update
        arguments = (self.target, row, [str(f) for f in files], str(self.folder), self.dtype, self.seed, k)
        found = launch(run_reference, ranks=1, args=arguments, quiet=True)[0]
        mine, right = (torch.load(folder / f"update-{k:03d}.pt", weights_only=False) for folder in (here, reference))
        micros = micros_in_order(records)[k]
        mine["loss"] = sum(m.loss * m.weight for m in micros) / sum(m.weight for m in micros)
        return causes.from_mistakes(verdict, mine, right, found["mistakes"], records[0]["batch_norms"])

    def _same_bits(self, row: Row, here: Path, verdict: Verdict) -> bool:
        """Whether this row's last parameters have the very bits of the first row of the bit-equal mode."""
        last = torch.load(here / f"update-{verdict.updates - 1:03d}.pt", weights_only=False)["parameters"]
        known = self._bitwise.setdefault(row.optimizer, last)
        return known is last or all(torch.equal(last[n], known[n]) for n in known)


def _data_of(row: Row, records: list[dict[str, Any]]) -> Any:
    """What the reference of a row depends on. Rows with the same share it.

    As a rule the samples of each update alone. Dropped units depend on the micro-batches and on the random streams in front of
    them; a step of one's own, which may accumulate, on which micro-batches came at the same time.
    """
    epochs = tuple(u[0].epoch if u else 0 for u in micros_in_order(records))
    if records[0]["kind"] == "TrainUnit":
        return row.optimizer, epochs, tuple(tuple(tuple(digest(m.data) for m in u) for u in r["updates"]) for r in records)
    merged = micros_in_order(records)
    if any(m.stream is not None for u in merged for m in u):
        return row.optimizer, epochs, tuple(tuple((digest(m.data), digest(m.stream)) for m in u) for u in merged)
    return row.optimizer, epochs, tuple(_digest_of_samples([m.data for m in u]) for u in merged)


def _digest_of_samples(batches: list[Any]) -> int:
    try:
        return digest(join(batches))
    except NotJoinable:
        return hash(tuple(map(digest, batches)))
