"""A row that was run, its reference, and what comparing them says in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.prover.matrix import Row
from echelon.prover.micro import digest
from echelon.prover.proof import Result
from echelon.prover.unit_kind import UnitKind
from echelon.prover.values import load_values, near
from echelon.prover.verdict import SMALL_SHARE, Verdict, larger

__all__ = [
    "CONSTANT",
    "Computed",
    "Judged",
    "Ran",
    "blindness",
    "fill",
    "in_float64",
    "in_words",
    "of_same_samples",
    "values_of_first",
    "with_constant_draws",
]

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.float8_e4m3fn}
CONSTANT = "-constant"  # how folders of rows end that were run again with constant draws


@dataclass(frozen=True)
class Ran:
    """A row that was run: where its values are, and what its ranks wrote down."""

    row: Row
    folder: Path
    records: list[dict[str, Any]]
    dtype: torch.dtype

    @property
    def files(self) -> list[str]:
        return [str(self.folder / f"rank{r}.pt") for r in range(self.row.ranks)]

    @property
    def narrow(self) -> torch.dtype | None:
        """The type with few digits in which it computes."""
        return _NARROW[self.row.narrow] if self.row.narrow is not None else None

    @property
    def precision(self) -> str:
        """In which it computes, or keeps its parameters."""
        return str(self.row.narrow or self.records[0]["narrow"] or "float32")

    @property
    def has_streams(self) -> bool:
        """Its passes drew random numbers."""
        return any(m.streams for r in self.records for u in r["updates"] for m in u)

    @property
    def drew(self) -> bool:
        """Its passes drew random numbers, or would have: dropout that was switched off."""
        return self.has_streams or any(r["dropouts"] for r in self.records)

    @property
    def is_auto(self) -> bool:
        return self.records[0]["kind"] is not UnitKind.STEP


@dataclass
class Computed:
    """The reference of rows with the same data. `facts` are its own, `probed` those of the forward pass once it was tried."""

    folder: Path
    facts: dict[str, Any]
    probed: dict[str, Any] | None = None
    shaken: tuple[int, int] = (0, 0)  # how many such references, and over how many updates
    scaling: list[tuple[str, str]] | None = None  # what is wrong with the script's own gradient scaler, once it was looked for


@dataclass
class Judged:
    """A row against its reference, in one precision. `is_recorded`: what the ranks wrote down shows a mistake by itself."""

    ran: Ran
    reference: Computed
    verdict: Verdict
    is_recorded: bool = False


def in_float64(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-float64")


def with_constant_draws(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{CONSTANT}")


def values_of_first(judged: Judged) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The row's and the right gradients or parameters, where something differs first."""
    first = judged.verdict.first
    assert first is not None
    kind, file = "gradients" if first.phase == "gradient" else "parameters", f"update-{first.update:03d}.pt"
    mine, right = (load_values(folder / file)[kind] for folder in (judged.ran.folder, judged.reference.folder))
    return mine, right


def fill(result: Result, verdict: Verdict) -> None:
    result.loss, result.gradient, result.parameter = verdict.loss, larger(verdict.gradient, verdict.norm), verdict.parameter
    result.of_tolerance, result.updates = verdict.used, verdict.updates
    result.first, result.undetermined = verdict.first, verdict.undetermined


def in_words(seen: Judged) -> str:
    """What the row's own precision showed, where float64 decided."""
    first, own = seen.verdict.first, seen.ran.precision
    if first is not None:
        return f"{own}: update {first.update}, {first.phase}, {first.tensor} differs by {first.relative:.1e}"
    return f"{own}: {blindness(seen)}"


def blindness(judged: Judged) -> str:
    """What could not be compared."""
    verdict, said = judged.verdict, []
    if verdict.blind:
        b = verdict.blind[0]
        said.append(f"update {b.update}, {b.phase}, {b.tensor}: rounding alone may change it by {b.tolerance:.1e}")
    if verdict.resolved < verdict.updates:
        said.append(f"compared as far as update {verdict.resolved - 1}" if verdict.resolved else "nothing else could be compared")
    if verdict.excused > SMALL_SHARE:
        said.append(f"{verdict.excused:.0%} of all elements have no gradient beyond rounding")
    return "; ".join(said)


def of_same_samples(one: Ran, other: Ran) -> bool:
    """Whether both trained on the same micro-batches, to a few digits: else they tell nothing of each other."""

    def leaves(ran: Ran) -> Iterator[Any]:
        waiting = [m.plain for record in ran.records for update in record["updates"] for m in update][::-1]
        while waiting:
            each = waiting.pop()
            if isinstance(each, (list, dict)):
                waiting.extend(each.values() if isinstance(each, dict) else each)
            else:
                yield each

    return all(_is_like(a, b) for a, b in zip(leaves(one), leaves(other), strict=False))


def _is_like(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or not one.is_floating_point():
        return digest(one) == digest(other)
    return near(one, other, 1e-2)
