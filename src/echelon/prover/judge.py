"""Compare a row with the reference, step by step, and say where it first differs.

The tolerance is measured. The reference was computed twice (`prover/reference.py`); how far the two lie apart in a tensor,
relative to its largest value, is one sample of what rounding does to it. That sample can be small by luck, most of all in a
tensor of few elements, so three things stand in for it if they are larger: what it was in an earlier update, what is usual
(the median) among all tensors of the update, and one rounding. A row may differ by `FACTOR` times that. Two samples of one
size differ by a factor themselves: on twelve right scripts the largest of 13,000 was 9.6; mistakes are 1e2 to 1e7.

A tensor that is smaller as a whole than roundings of the largest of its kind has no digits of its own: for it, those count.
In float64, where there is no wider type to compare with, it is 1e-11 of the largest value of its kind: plain torch reaches 4e-13
after twenty updates.

An element whose true gradient is zero (the key biases of attention) has a gradient of rounding noise, which Adam turns into steps
of full length: its parameter has no right value, in any implementation. Such elements are known by their gradient being
smaller than its tolerance; they are left out of the comparison of parameters, and reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from echelon.prover.reference import AGAIN, Values, micros_in_order
from echelon.prover.streams import Micro

__all__ = ["Difference", "Verdict", "compare", "larger", "mean_loss"]

FACTOR = 32.0
FLOAT64_TOLERANCE = 1e-11


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    Args:
        update: from 0.
        phase: "initialisation", "forward", "gradient" or "update".
        tensor: a parameter's or buffer's name, "loss" or "gradient norm".
        relative: the largest difference of an element over the largest element.
        tolerance: what it may be, in the same unit.
    """

    update: int
    phase: str
    tensor: str
    relative: float
    tolerance: float


@dataclass
class Verdict:
    """What comparing one row gave: the largest relative differences over all updates, and the first that is too large."""

    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    norm: float = 0.0
    updates: int = 0
    bit_equal: bool = True
    used: float = 0.0  # the largest share of a tolerance that was used
    first: Difference | None = None
    meaningless: str | None = None  # why the reference itself is no measure
    undetermined: dict[str, int] = field(default_factory=dict)  # elements without a gradient beyond rounding, by parameter
    unmoved: list[str] = field(default_factory=list)  # parameters that the reference changed and the row did not


def compare(row: Path, reference: Path, records: list[dict[str, Any]], dtype: torch.dtype) -> Verdict:
    """Compare the files of a row with those of the reference on the same micro-batches.

    Args:
        row, reference: folders with `initial.pt` and `update-NNN.pt`.
        records: of all ranks of the row.
    """
    verdict = Verdict()
    comparison = _Comparison(verdict, torch.finfo(dtype).eps, dtype is torch.float64, records[0]["flattened"])
    before, reference_before = _load(row / "initial.pt"), _load(reference / "initial.pt")
    comparison.initial(before["parameters"], reference_before["parameters"])
    for k, micros in enumerate(micros_in_order(records)):
        file = f"update-{k:03d}.pt"
        if not (reference / file).exists():
            break
        verdict.updates = k + 1
        if not (row / file).exists():
            continue
        mine, right = _load(row / file), _load(reference / file)
        again = reference / AGAIN / file
        right["errors"] = _errors(right, _load(again)) if again.exists() else None
        verdict.meaningless = _meaningless(k, right)
        if verdict.meaningless is not None:
            break
        mine["loss"] = mean_loss(micros)
        mine["norm"] = records[0]["norms"][k]
        comparison.update(k, mine, right)
        if verdict.first is not None and verdict.first.update == k and not verdict.unmoved:
            trained = right["parameters"].keys() & mine["parameters"].keys() & right["gradients"].keys()
            verdict.unmoved = [
                n
                for n in trained
                if torch.equal(mine["parameters"][n], before["parameters"][n])
                and not torch.equal(right["parameters"][n], reference_before["parameters"][n])
            ]
        before, reference_before = mine, right
    verdict.bit_equal = verdict.bit_equal and verdict.first is None and verdict.updates > 0
    return verdict


def _load(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)  # tensors and numbers: nothing in it can run
    return values


def mean_loss(micros: list[Micro]) -> float | None:
    """Of the global batch; None if the unit does not tell its losses."""
    known = [(m.loss, m.weight) for m in micros if m.loss is not None]
    total = sum(weight for _, weight in known)
    return sum(loss * weight for loss, weight in known) / total if total else None


def _errors(right: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """What rounding did: how far the two ways of computing the reference lie apart."""
    errors: dict[str, Any] = {
        kind: {n: (again[kind][n].double() - v.double()).abs().float() for n, v in right[kind].items() if n in again[kind]}
        for kind in ("gradients", "parameters")
    }
    for kind in ("loss", "norm"):
        errors[kind] = abs(again[kind] - right[kind]) if right[kind] is not None and again[kind] is not None else 0.0
    return errors


def _meaningless(k: int, right: dict[str, Any]) -> str | None:
    """Why nothing can be compared with this."""
    named = [("the loss", right["loss"])]
    named += [(f"the {kind[:-1]} of {n}", t) for kind in ("gradients", "parameters") for n, t in right[kind].items()]
    for name, value in named:
        if value is not None and not bool(torch.isfinite(torch.as_tensor(value)).all()):
            return f"in one process in plain PyTorch, too, {name} is inf or nan in update {k}: there is nothing to compare."
    return None


@dataclass(frozen=True)
class _Tolerances:
    """By name, absolute: as measured, and what a few roundings of the tensor's largest value make."""

    measured: dict[str, float]
    smallest: dict[str, float]


class _Comparison:
    """Keeps the marks of undetermined elements over the updates."""

    def __init__(self, verdict: Verdict, epsilon: float, is_float64: bool, without_gradients: bool) -> None:
        self.verdict, self.epsilon, self.is_float64 = verdict, epsilon, is_float64
        self.without_gradients = without_gradients
        self.undetermined: Values = {}
        self.roundings: dict[str, dict[str, float]] = {}  # by kind and name: the largest relative error so far

    def initial(self, mine: Values, right: Values) -> None:
        missing = sorted(mine.keys() ^ right.keys())
        if missing:
            self._differs(0, "initialisation", missing[0], float("inf"), 0.0)
        for name in right:
            if name in mine and not torch.equal(mine[name], right[name]):
                relative = _largest(mine[name] - right[name]) / (_largest(right[name]) or 1.0)
                self._differs(0, "initialisation", name, relative, 0.0)

    def update(self, k: int, mine: dict[str, Any], right: dict[str, Any]) -> None:
        """One update: loss, gradients and norm, then parameters, in the order in which they come about."""
        errors = right["errors"] or {}
        if mine["loss"] is not None and right["loss"] is not None:
            self._scalar(k, "forward", "loss", mine["loss"], right["loss"], errors.get("loss", 0.0))
        if not self.without_gradients:
            self._gradients(k, mine["gradients"], right["gradients"], self._tolerances("gradients", right, errors))
        if mine["norm"] is not None and right["norm"] is not None:
            self._scalar(k, "gradient", "gradient norm", mine["norm"], right["norm"], errors.get("norm", 0.0))
        self._parameters(k, mine["parameters"], right["parameters"], self._tolerances("parameters", right, errors))

    def _tolerances(self, kind: str, right: dict[str, Any], errors: dict[str, Any]) -> _Tolerances:
        values: Values = right[kind]
        own = {n: _largest(v) for n, v in values.items()}
        largest = max(own.values(), default=0.0)
        if self.is_float64:
            return _Tolerances(dict.fromkeys(own, FLOAT64_TOLERANCE * largest), dict.fromkeys(own, FLOAT64_TOLERANCE * largest))
        known = self.roundings.setdefault(kind, {})
        for name, scale in own.items():
            seen = _largest(errors[kind][name]) / scale if scale and name in errors.get(kind, {}) else 0.0
            known[name] = max(seen, known.get(name, 0.0), self.epsilon)
        usual = median(known.values()) if known else 0.0
        nothing = FACTOR * self.epsilon * largest
        allowed = {n: FACTOR * max(known[n], usual) * scale if scale > nothing else nothing for n, scale in own.items()}
        return _Tolerances(allowed, {n: FACTOR * self.epsilon * scale for n, scale in own.items()})

    def _scalar(self, k: int, phase: str, name: str, mine: float, right: float, error: float) -> None:
        difference, scale = abs(mine - right), abs(right) or 1.0
        known = self.roundings.setdefault(name, {})
        known[name] = max(error / scale, known.get(name, 0.0), self.epsilon)
        allowed = scale * (FLOAT64_TOLERANCE if self.is_float64 else FACTOR * known[name])
        relative = difference / scale
        if name == "loss":
            self.verdict.loss = larger(self.verdict.loss, relative)
        else:
            self.verdict.norm = larger(self.verdict.norm, relative)
        self._check(k, phase, name, difference, allowed, scale)

    def _gradients(self, k: int, mine: Values, right: Values, tolerances: _Tolerances) -> None:
        for name, value in right.items():
            allowed, scale = tolerances.measured[name], _largest(value) or 1.0
            noise = value.abs() <= allowed
            known = self.undetermined.get(name)
            self.undetermined[name] = noise if known is None else known | noise
            if name not in mine:
                if _largest(value) > allowed:
                    self._differs(k, "gradient", name, 1.0, 0.0)
                continue
            difference = _largest(mine[name] - value)
            if not bool(noise.all()):
                self.verdict.gradient = larger(self.verdict.gradient, difference / scale)
            self._check(k, "gradient", name, difference, allowed, scale)
        largest = max(map(_largest, right.values()), default=0.0)
        for name in mine.keys() - right.keys():
            self._check(k, "gradient", name, _largest(mine[name]), FACTOR * self.epsilon * largest, largest or 1.0)

    def _parameters(self, k: int, mine: Values, right: Values, tolerances: _Tolerances) -> None:
        for name, value in right.items():
            if name not in mine:
                continue  # said at the initialisation
            if not torch.equal(mine[name], value):
                self.verdict.bit_equal = False
            difference, scale = (mine[name] - value).abs(), _largest(value) or 1.0
            if name in self.undetermined:
                loose = self.undetermined[name] & (difference > tolerances.smallest[name])
                if bool(loose.any()):
                    self.verdict.undetermined[name] = int(loose.sum())
                    difference = difference.masked_fill(loose, 0.0)
            self.verdict.parameter = larger(self.verdict.parameter, _largest(difference) / scale)
            self._check(k, "update", name, _largest(difference), tolerances.measured[name], scale)

    def _check(self, k: int, phase: str, tensor: str, difference: float, allowed: float, scale: float) -> None:
        self.verdict.used = larger(self.verdict.used, difference / allowed if allowed else float(difference > 0))
        if not difference <= allowed:  # nan differs
            self._differs(k, phase, tensor, difference / scale, allowed / scale)

    def _differs(self, k: int, phase: str, tensor: str, relative: float, tolerance: float) -> None:
        if self.verdict.first is None:
            self.verdict.first = Difference(k, phase, tensor, relative, tolerance)


def larger(a: float, b: float) -> float:
    """The larger one; nan if one of them is."""
    return b if b != b else max(a, b)


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; nan if there is one."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
