"""Run a program under a matrix of strategies, numbers of ranks and accumulation splits, and say whether all train alike."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from echelon.contracts.errors import RankFailedError, UsageError
from echelon.launcher.function import launch
from echelon.prover import causes
from echelon.prover.judge import Difference, Verdict, compare, larger, mean_loss
from echelon.prover.matrix import AS_WRITTEN, Row, matrix
from echelon.prover.rank import Target, run_reference, run_row
from echelon.prover.reference import by_index, micros_in_order
from echelon.prover.streams import Micro, NotJoinable, digest, join

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
        """Every row agrees or is not possible, and one was compared: on several ranks, if any row has several."""
        compared = [r.ranks for r in self.results if r.verdict in ("agrees", "bit-equal")]
        several = any(r.ranks > 1 for r in self.results)
        return all(r.agrees for r in self.results) and max(compared, default=0) > (1 if several else 0)

    def to_json(self) -> dict[str, Any]:
        """For JSON, which has no word for nan and infinity: they are null."""
        rows = [_without_nan(asdict(r)) for r in self.results]
        return {"holds": self.holds, "dtype": self.dtype, "notes": self.notes, "rows": rows}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    timeout_s: float | None = 600.0,
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
        timeout_s: a row that takes longer is stopped and failed, with the stacks of its ranks; None waits for ever.
        on_result: called with each row as it is ready.
    Raises:
        UsageError: there is nothing to compare, or the reference cannot be computed.
    """
    rows = matrix(strategies, ranks, accumulation, sgd=sgd, parts=parts)
    return prove_target(Target(make_unit=make_unit, make_data=make_data), rows, updates, float64, seed, on_result, timeout_s)


def prove_target(
    target: Target,
    rows: list[Row],
    updates: int,
    float64: bool,
    seed: int = 0,
    on_result: Callable[[Result], None] | None = None,
    timeout_s: float | None = 600.0,
    logs: Path | None = None,
) -> Proof:
    """`prove` for a script or functions, over rows that are given.

    Args:
        logs: folder for what the ranks of failed rows wrote; by default a temporary one each, which stays.
    """
    if updates < 1:
        raise UsageError(f"updates {updates}: at least 1.")
    if timeout_s is not None and not timeout_s > 0:
        raise UsageError(f"timeout {timeout_s}: more than 0 seconds.")
    with tempfile.TemporaryDirectory(prefix="echelon-prove-", ignore_cleanup_errors=True) as folder:
        run = _Proving(target, Path(folder), updates, torch.float64 if float64 else torch.float32, seed, timeout_s, logs)
        for row in run.fitting(rows):
            result = run.row(row)
            run.proof.results.append(result)
            if on_result is not None:
                on_result(result)
        return run.proof


@dataclass(frozen=True)
class _Ran:
    """A row that was run: where its values are, and what its ranks wrote down."""

    row: Row
    folder: Path
    records: list[dict[str, Any]]

    @property
    def files(self) -> list[str]:
        return [str(self.folder / f"rank{r}.pt") for r in range(self.row.ranks)]


class _Proving:
    """The rows of one proof: what was run so far, and the references, by the data that they trained on."""

    def __init__(
        self,
        target: Target,
        folder: Path,
        updates: int,
        dtype: torch.dtype,
        seed: int,
        timeout_s: float | None,
        logs: Path | None,
    ) -> None:
        self.target, self.folder, self.updates, self.dtype, self.seed = target, folder, updates, dtype, seed
        self.timeout_s, self.logs = timeout_s, logs
        self.proof = Proof(str(dtype).removeprefix("torch."))
        self.kind = ""
        self.overridable = True
        self.has_plan = False
        self._references: dict[Any, tuple[Path, dict[str, Any]]] = {}
        self._batches: dict[Any, str] = {}
        self._bitwise: dict[str, dict[str, torch.Tensor]] = {}
        self._count = 0

    def fitting(self, rows: list[Row]) -> Iterator[Row]:
        """The rows as far as this script allows: one that wraps its module by hand can only be run as written."""
        first, rest = rows[0], rows[1:]
        yield first
        if self.overridable or not self.kind:
            own = self.kind == "TrainUnit"  # accumulates by itself, and makes its own optimizer
            yield from (
                row
                for row in rest
                if (self.has_plan or not row.needs_plan) and not (own and (row.optimizer == "sgd" or (row.accumulation or 1) > 1))
            )
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
            self._launch(run_row, row.ranks, self.target, row, str(here), self.updates, self.dtype, self.seed)
        except RankFailedError as error:
            refused = isinstance(error.__cause__, UsageError)
            result.verdict = "not possible" if refused else "failed"
            result.message = str(error.__cause__) if refused else self._kept(error)
            return result
        try:
            self._compare(row, result, here)
        except RankFailedError as error:
            refused = isinstance(error.__cause__, UsageError)
            why = str(error.__cause__) if refused else self._kept(error)
            result.verdict = "not possible" if refused else "failed"
            result.message = f"the reference in plain PyTorch could not be computed: {why}"
        shutil.rmtree(here, ignore_errors=True)
        return result

    def _launch(self, fn: Callable[..., dict[str, Any]], ranks: int, *args: Any) -> dict[str, Any]:
        """Run on ranks, and return rank 0's value. Logs are left only if it fails."""
        logs = self.folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        found: dict[str, Any] = launch(fn, ranks=ranks, args=args, quiet=True, timeout_s=self.timeout_s, run_dir=logs)[0]
        return found

    def _kept(self, error: RankFailedError) -> str:
        """The error's text; the logs that it names are put where they stay."""
        logs = self.folder / "logs"
        kept = Path(tempfile.mkdtemp(prefix="echelon-")) if self.logs is None else self.logs / f"row-{self._count}"
        shutil.copytree(logs, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pkl"))
        return str(error).replace(str(logs), str(kept))

    def _compare(self, row: Row, result: Result, here: Path) -> None:
        records = [torch.load(here / f"rank{r}.pt", weights_only=False) for r in range(row.ranks)]
        ran = _Ran(row, here, records)
        self.kind, self.has_plan = records[0]["kind"], self.has_plan or records[0]["has_plan"]
        if row.strategy is not None and self.kind and not records[0]["overridable"]:
            self.overridable = False
            result.label = Row(AS_WRITTEN, row.ranks, None, row.accumulation, row.optimizer).label
        if not records[0]["updates"]:
            what = "no optimizer took a step before it ended" if self.kind else "it never called echelon's train or fit"
            result.verdict, result.message = "failed", f"there is nothing to compare: {what}."
            return
        reference, facts = self._reference(ran)
        verdict = compare(here, reference, records, self.dtype)
        self._judge(result, ran, verdict, facts, reference)

    def _reference(self, ran: _Ran) -> tuple[Path, dict[str, Any]]:
        key = _data_of(ran.row, ran.records)
        if key not in self._references:
            folder = self.folder / f"reference-{len(self._references)}"
            folder.mkdir()
            self._references[key] = folder, self._compute_reference(ran, folder)
        self._note(ran, self._references[key][1])
        self._check_order(ran, key)
        return self._references[key]

    def _compute_reference(self, ran: _Ran, folder: Path) -> dict[str, Any]:
        arguments = (self.target, ran.row, ran.files, str(folder), self.dtype, self.seed)
        facts = self._launch(run_reference, 1, *arguments)
        if self.dtype is torch.float64:
            return facts
        if ran.records[0]["kind"] != "TrainUnit":  # which may have wrapped its module in something with float32 built in
            with contextlib.suppress(RankFailedError):  # so may a forward pass
                if self._launch(run_reference, 1, *arguments, "wide")["draws"] == facts["draws"]:
                    return facts
        self._launch(run_reference, 1, *arguments, "shaken")
        return facts

    def _note(self, ran: _Ran, facts: dict[str, Any]) -> None:
        if facts["drew"]:
            self._say(
                "Random numbers are drawn in the forward pass: "
                "the reference repeats each rank's draws, micro-batch by micro-batch."
            )
        elif not facts["joined"]:
            self._say("Micro-batches cannot be joined into one batch: the reference adds them up by their weights.")
        untrained = sorted(ran.records[0]["trainable"] - facts["held"])
        if untrained and not ran.records[0]["flattened"]:
            more = f" ({len(untrained) - 3} more)" if len(untrained) > 3 else ""
            self._say(f"To be trained, but in no optimizer, in one process either: {', '.join(untrained[:3])}{more}.")

    def _say(self, note: str) -> None:
        if note not in self.proof.notes:
            self.proof.notes.append(note)

    def _check_order(self, ran: _Ran, key: Any) -> None:
        """Rule of truth 1: an echelon.Loader gives the same global batches however they are split."""
        known = self._batches.setdefault(ran.row.optimizer, key)
        if key != known and ran.records[0]["global_batch"] is None:
            self._say(
                "The global batch depends on the number of ranks or on the split: every row was compared with one process on "
                "its own batches. With echelon.Loader, which is given the global batch, they would be the same."
            )

    def _judge(self, result: Result, ran: _Ran, verdict: Verdict, facts: dict[str, Any], reference: Path) -> None:
        records = ran.records
        result.loss, result.gradient, result.parameter = verdict.loss, larger(verdict.gradient, verdict.norm), verdict.parameter
        result.of_tolerance = verdict.used
        result.updates, result.first, result.undetermined = verdict.updates, verdict.first, verdict.undetermined
        times = records[0]["step_s"][1:] or records[0]["step_s"]
        result.step_s = median(times) if times else None
        peaks = [r["peak_bytes"] for r in records if r["peak_bytes"] is not None]
        result.peak_bytes = max(peaks, default=None)
        if verdict.meaningless is not None:
            result.verdict, result.message = "failed", verdict.meaningless
            return
        result.causes = causes.from_records(records)
        if verdict.first is not None:
            self._add_causes(result, causes.from_verdict(verdict, records, facts))
            if verdict.first.phase in ("forward", "gradient"):
                self._add_causes(result, self._mistakes(ran, verdict, reference))
        if verdict.first is not None or result.causes:
            result.verdict = "DIFFERS"
        elif ran.row.parts:
            result.verdict = "bit-equal" if self._same_bits(ran, verdict) else "DIFFERS"
        else:
            result.verdict = "bit-equal" if verdict.bit_equal else "agrees"

    def _add_causes(self, result: Result, found: list[tuple[str, str]]) -> None:
        known = dict(result.causes)
        result.causes += [cause for cause in found if cause[0] not in known]

    def _mistakes(self, ran: _Ran, verdict: Verdict, reference: Path) -> list[tuple[str, str]]:
        assert verdict.first is not None
        k = verdict.first.update
        arguments = (self.target, ran.row, ran.files, str(self.folder), self.dtype, self.seed, "right", k)
        try:
            mistakes = self._launch(run_reference, 1, *arguments)
        except RankFailedError:  # the row differs whether or not it can be said why
            return []
        mine, right = (torch.load(folder / f"update-{k:03d}.pt", weights_only=True) for folder in (ran.folder, reference))
        mine["loss"], mine["norm"] = mean_loss(micros_in_order(ran.records)[k]), ran.records[0]["norms"][k]
        return causes.from_mistakes(verdict, mine, right, mistakes, ran.records[0]["batch_norms"])

    def _same_bits(self, ran: _Ran, verdict: Verdict) -> bool:
        """Whether this row's last parameters have the very bits of the first row of the bit-equal mode."""
        last = torch.load(ran.folder / f"update-{verdict.updates - 1:03d}.pt", weights_only=True)["parameters"]
        known = self._bitwise.setdefault(ran.row.optimizer, last)
        return known is last or all(torch.equal(last[n], known[n]) for n in known)


def _data_of(row: Row, records: list[dict[str, Any]]) -> Any:
    """What the reference of a row depends on. Rows with the same share it.

    As a rule the samples of each update alone. Dropped units depend on the micro-batches and on the random streams in front of
    them; a step of one's own, which may accumulate, on which micro-batches came at the same time.
    """
    updates = range(len(micros_in_order(records)))
    epochs = tuple(records[0]["updates"][k][0].epoch for k in updates)
    if records[0]["kind"] == "TrainUnit":
        return row.optimizer, epochs, tuple(tuple(map(_digest_of_samples, by_index(records, k))) for k in updates)
    merged = micros_in_order(records)
    if any(m.stream is not None for u in merged for m in u):
        return row.optimizer, epochs, tuple(tuple((digest(m.plain), digest(m.stream)) for m in u) for u in merged)
    return row.optimizer, epochs, tuple(map(_digest_of_samples, merged))


def _digest_of_samples(micros: list[Micro]) -> Any:
    try:
        return digest(join([m.plain for m in micros]))
    except NotJoinable:
        return tuple(digest(m.plain) for m in micros)
