"""What a proof runs in other processes: its target for each row, and references, each shared by all rows with its data."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import RankFailedError, UsageError
from echelon.common.files import read_end
from echelon.launcher.functions.launch import launch
from echelon.loop.target import Target
from echelon.prover.matrix import Row
from echelon.prover.micro import Micro, NotJoinable, digest, join, leaves
from echelon.prover.probe import UNKNOWN, probe
from echelon.prover.proof import Verdict
from echelon.prover.rank import Replay, run_reference, run_row
from echelon.prover.records import RankRecord, by_index, load_records, load_values, micros_in_order
from echelon.prover.reference import Reference, Shake
from echelon.prover.values import UnitKind, near

__all__ = [
    "CONSTANT",
    "SHAKES",
    "Computed",
    "Judged",
    "OnRanks",
    "ReferenceStore",
    "RowRun",
    "are_alike",
    "data_of",
    "of_same_samples",
]

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.float8_e4m3fn}
CONSTANT = "-constant"  # the suffix of folders of rows that were run again with constant draws
_BRIEF = 2  # updates; two, since an optimizer's first step may hide a wrong scale and has no state yet
SHAKES = 3
_Data = tuple[Any, Sequence[Any]]


@dataclass(frozen=True)
class RowRun:
    """A row that was run: where its values are, and what its ranks wrote down."""

    row: Row
    folder: Path
    records: list[RankRecord]
    dtype: torch.dtype

    @property
    def files(self) -> list[str]:
        return [str(self.folder / f"rank{r}.pt") for r in range(self.row.ranks)]

    @property
    def narrow(self) -> torch.dtype | None:
        """The type with few digits in which it computes, or None."""
        return _NARROW[self.row.narrow] if self.row.narrow is not None else None

    @property
    def precision(self) -> str:
        """The precision in which it computes, or keeps its parameters."""
        return str(self.row.narrow or self.records[0].narrow or "float32")

    @property
    def has_streams(self) -> bool:
        """Its passes drew random numbers."""
        return any(m.streams for r in self.records for m in r.micros)

    @property
    def drew(self) -> bool:
        """Its passes drew random numbers, or would have: dropout that was switched off."""
        return self.has_streams or any(r.dropouts for r in self.records)

    @property
    def is_auto(self) -> bool:
        return self.records[0].kind is not UnitKind.STEP


@dataclass
class Computed:
    """The reference of rows with the same data. `facts` come from its run, `probed` from trying the forward pass."""

    folder: Path
    facts: dict[str, Any]
    probed: dict[str, Any] | None = None
    shaken: tuple[int, int] = (0, 0)  # how many shaken references there are, and over how many updates
    scaling: list[tuple[str, str]] | None = None  # causes in the script's own gradient scaler; None until it was checked


@dataclass
class Judged:
    """A row against its reference, in one precision. `is_recorded`: the ranks' records alone show a mistake."""

    ran: RowRun
    reference: Computed
    verdict: Verdict
    is_recorded: bool = False

    @property
    def in_words(self) -> str:
        """What the row's own precision showed, where float64 decided."""
        first, own = self.verdict.first, self.ran.precision
        if first is not None:
            return f"{own}: update {first.update}, {first.phase}, {first.tensor} differs by {first.relative:.1e}"
        return f"{own}: {self.verdict.blindness}"

    def values_at(self, k: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values of the row and of the reference at update k."""
        values, right = (load_values(folder / f"update-{k:03d}.pt") for folder in (self.ran.folder, self.reference.folder))
        return values, right


def of_same_samples(one: RowRun, other: RowRun) -> bool:
    """Whether both trained on the same micro-batches, to a few digits: otherwise they cannot be compared."""

    values, others = (leaves([m.plain for r in ran.records for m in r.micros]) for ran in (one, other))
    return all(_is_like(a, b) for a, b in zip(values, others, strict=False))


def _is_like(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or not one.is_floating_point():
        return digest(one) == digest(other)
    return near(one, other, 1e-2)


@dataclass(frozen=True)
class OnRanks:
    """Runs rows and references on ranks.

    Args:
        folder: for the ranks' files.
        updates: how many to compare.
        timeout_s: for each launch.
        logs: where the logs of a failed run are kept; None is a new temporary folder.
    """

    target: Target
    folder: Path
    updates: int
    seed: int
    timeout_s: float | None
    logs: Path | None

    def row(self, row: Row, folder: Path, dtype: torch.dtype) -> RowRun:
        """Run the target as `row` says; its ranks write into `folder`."""
        folder.mkdir()
        self.launch(run_row, row.ranks, self.target, row, str(folder), self.updates_of(row), dtype, self.seed)
        records = load_records([folder / f"rank{r}.pt" for r in range(row.ranks)])
        if any(r.wants_constant_draws for r in records) and not row.constant_draws:
            shutil.rmtree(folder)
            return self.row(replace(row, constant_draws=True), folder, dtype)
        ran_as = replace(
            row,
            constant_draws=any(r.constant_draws for r in records),
            compiles=any(r.compiles for r in records),
            half=next((r.half for r in records if r.half), None),
        )
        return RowRun(ran_as, folder, records, dtype)

    def updates_of(self, row: Row) -> int:
        """How many updates of a row are compared."""
        return min(self.updates, _BRIEF) if row.brief else self.updates

    def replay(self, ran: RowRun, folder: Path) -> Replay:
        """What a reference on the micro-batches of `ran` needs; it writes into `folder`."""
        return Replay(self.target, ran.row, ran.files, str(folder), ran.dtype, self.seed)

    def launch(self, fn: Callable[..., dict[str, Any]], ranks: int, *args: Any) -> dict[str, Any]:
        """Run a function on ranks, and return rank 0's value. Its logs stay only if it fails."""
        logs = self.folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        value: dict[str, Any] = launch(fn, ranks=ranks, args=args, quiet=True, timeout_s=self.timeout_s, run_dir=logs)[0]
        return value

    def failure(self, error: RankFailedError, name: str) -> tuple[str, str]:
        """The verdict and the error's text; keeps the logs that it names, under `name`."""
        if isinstance(error.__cause__, UsageError):
            return "not possible", str(error.__cause__)
        logs = self.folder / "logs"
        kept = Path(tempfile.mkdtemp(prefix="echelon-")) if self.logs is None else self.logs / name
        shutil.copytree(logs, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pkl"))
        return "failed", f"{self._said_last(error, kept)}{error}".replace(str(logs), str(kept))

    def _said_last(self, error: RankFailedError, logs: Path) -> str:
        """The last line that the script printed as it ended by itself, which no traceback has."""
        logs_of_rank = sorted(logs.rglob(f"rank{error.rank}.log"))
        text = read_end(logs_of_rank[-1]).decode("utf-8", "replace").strip() if logs_of_rank else ""
        last = text.rpartition("\n")[2].strip()
        if not last or last in str(error):
            return ""
        hint = " (options of prove stand before the script, those after it are the script's own)" if self.target.args else ""
        return f"the script's last words: {last}{hint}\n"


class ReferenceStore:
    """Computes references, each once for all rows with the same data.

    Args:
        folder: for the references' files.
    """

    def __init__(self, on_ranks: OnRanks, folder: Path) -> None:
        self._on_ranks, self.folder = on_ranks, folder
        self._known: list[tuple[_Data, Computed]] = []

    def of(self, ran: RowRun) -> Computed:
        """The reference of a row, shared by all rows with the same data, or with its first updates."""
        data = data_of(ran)
        for known, reference in self._known:
            if are_alike(data, known) and len(data[1]) <= len(known[1]):
                return reference
        folder = self.folder / f"reference-{len(self._known)}"
        shutil.rmtree(folder, ignore_errors=True)  # left by a reference that failed for an earlier row
        folder.mkdir()
        self._known.append((data, self._computed(ran, folder)))
        return self._known[-1][1]

    def _computed(self, ran: RowRun, folder: Path) -> Computed:
        """The reference, and in float32 a first sample of rounding; in half precision more."""
        replay = self._on_ranks.replay(ran, folder)
        reference = Computed(folder, self._on_ranks.launch(run_reference, 1, replay))
        if ran.dtype is torch.float64:
            return reference
        half = ran.narrow
        if half is not None:
            self.shake(ran, reference, SHAKES - 1, half)
        if ran.is_auto:  # a unit with a step of its own may have wrapped its module in something with float32 built in
            with contextlib.suppress(RankFailedError):  # a forward pass may have float32 built in, too
                if self._on_ranks.launch(run_reference, 1, replay, Reference.run, "wide")["draws"] == reference.facts["draws"]:
                    return reference
            for other in folder.glob("again-wide-*"):
                shutil.rmtree(other)
        if half is None:
            self.shake(ran, reference, 1, None)
        return reference

    def shake(self, ran: RowRun, reference: Computed, samples: int, narrowest: torch.dtype | None) -> None:
        """Ensure `samples` shaken references; with `narrowest`, shaken by the rounding of that type."""
        replay = self._on_ranks.replay(ran, reference.folder)
        rounding = torch.finfo(narrowest).eps if narrowest is not None else None
        if rounding is not None and ran.narrow is not None:
            rounding /= 4  # what a cast of each weight changes on average
        updates = len(ran.records[0].updates)
        known, length = reference.shaken if updates <= reference.shaken[1] else (0, updates)
        for sample in range(0 if narrowest is not None else known, samples):
            self._on_ranks.launch(run_reference, 1, replay, Reference.run, "shaken", Shake(sample, rounding))
        reference.shaken = max(samples, known), length

    def probed(self, ran: RowRun, reference: Computed) -> dict[str, Any]:
        if reference.probed is None:
            reference.probed = dict(UNKNOWN)
            with contextlib.suppress(RankFailedError):
                reference.probed = self._on_ranks.launch(run_reference, 1, self._on_ranks.replay(ran, self.folder), probe)
        return reference.probed

    def state(self, ran: RowRun, reference: Computed) -> dict[str, list[str]]:
        """State kept between passes on which the loss or a gradient depends: paths by name."""
        keeps = any(m.state for r in ran.records for m in r.micros)
        return dict(self.probed(ran, reference)["state"]) if keeps else {}


def are_alike(one: _Data, other: _Data) -> bool:
    """Whether both are the same, as far as the shorter one goes."""
    return one[0] == other[0] and all(a == b for a, b in zip(one[1], other[1], strict=False))


def data_of(ran: RowRun) -> _Data:
    """What the reference of a row depends on: how it trains, and its data in each update. Rows with the same value share it.

    As a rule the data is the samples of each update, whichever ranks had them. With dropout and other draws, it is the
    micro-batches and the RNG states before them. For a step of the user's own, which may accumulate, and for several optimizers,
    whose losses follow each other's steps, it also says which micro-batches ran at the same time.
    """
    row, first, merged = ran.row, ran.records[0], micros_in_order(ran.records)
    states = [{path: m.state[path] for path in sorted(row.restores & m.state.keys())} for u in merged for m in u]
    as_script = row.yours and bool(row.compiles or row.half)
    kept = row.restores, digest(states) if row.restores else 0
    how = (
        ran.dtype,
        row.optimizer,
        row.narrow,
        row.workers,
        row.constant_draws,
        row.apart,
        first.by_sample,
        row.drawn_alike,
        as_script,
        kept,
    )
    at_once = first.kind in (UnitKind.STEP, UnitKind.LOSSES)
    drawn = not row.constant_draws and first.kind is not UnitKind.STEP and any(m.streams for u in merged for m in u)

    def of_update(k: int) -> tuple[Any, ...]:
        epoch, same = first.updates[k][0].epoch, by_index(ran.records, k)
        if drawn:
            sizes = tuple(map(len, same)) if at_once else ()
            return epoch, sizes, *((digest(m.plain), digest(m.streams)) for m in merged[k])
        return epoch, *map(_digest_of_samples, same if at_once else [merged[k]])

    return how, [of_update(k) for k in range(len(merged))]


def _digest_of_samples(micros: list[Micro]) -> Any:
    try:
        return digest(join([m.plain for m in micros], [m.samples for m in micros]))
    except NotJoinable:
        return tuple(digest(m.plain) for m in micros)
