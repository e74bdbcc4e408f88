"""Compare a row with the reference, step by step, and say where it first differs.

The tolerance is not chosen: for every tensor of every update it is `FACTOR` times what rounding alone did to that tensor in
the reference (its distance from float64), and at least one rounding of the largest value of its kind. `FACTOR` covers that
this distance is one sample of an error whose size depends on the order of the sums: two sums of n terms in other orders
lie within a small multiple of one another. In float64, where there is no wider type to compare with, it is 1e-11 of the largest
value: plain torch reaches 4e-13 after twenty updates, and the mistakes of the catalogue are larger than 1e-6.

An element whose true gradient is zero (the key biases of attention) has a gradient of rounding noise, which Adam turns into steps
of full length: its parameter has no right value, in any implementation. Such elements are known by their gradient being
smaller than its tolerance; they are left out of the comparison of parameters, and reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from echelon.prover.reference import Values, micros_in_order

__all__ = ["Difference", "Verdict", "compare"]

FACTOR = 8.0
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
        total = sum(m.weight for m in micros)
        mine["loss"] = sum(m.loss * m.weight for m in micros) / total if total else float("nan")
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
    values: dict[str, Any] = torch.load(path, weights_only=False, mmap=True)
    return values


class _Comparison:
    """Keeps the marks of undetermined elements over the updates."""

    def __init__(self, verdict: Verdict, epsilon: float, is_float64: bool, without_gradients: bool) -> None:
        self.verdict, self.epsilon, self.is_float64 = verdict, epsilon, is_float64
        self.without_gradients = without_gradients
        self.undetermined: Values = {}

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
        errors = right["errors"]
        self._scalar(k, "forward", "loss", mine["loss"], right["loss"], errors and errors["loss"])
        if not self.without_gradients:
            self._gradients(k, mine["gradients"], right["gradients"], errors)
        if mine["norm"] is not None and right["norm"] is not None:
            self._scalar(k, "gradient", "gradient norm", mine["norm"], right["norm"], errors and errors["norm"])
        self._parameters(k, mine["parameters"], right["parameters"], errors)

    def _scalar(self, k: int, phase: str, name: str, mine: float, right: float, error: float | None) -> None:
        difference, scale = abs(mine - right), abs(right) or 1.0
        allowed = self._allowed(error, scale, scale)
        relative = difference / scale
        if name == "loss":
            self.verdict.loss = max(self.verdict.loss, relative)
        else:
            self.verdict.norm = max(self.verdict.norm, relative)
        self._check(k, phase, name, difference, allowed, scale)

    def _allowed(self, error: float | None, own: float, largest: float) -> float:
        if self.is_float64 or error is None:
            return FLOAT64_TOLERANCE * max(own, largest)
        return FACTOR * max(error, self.epsilon * max(own, largest))

    def _gradients(self, k: int, mine: Values, right: Values, errors: Any) -> None:
        largest = max(map(_largest, right.values()), default=0.0)
        for name, value in right.items():
            allowed = self._allowed(_largest(errors["gradients"][name]) if errors else None, _largest(value), largest)
            noise = value.abs() <= allowed
            known = self.undetermined.get(name)
            self.undetermined[name] = noise if known is None else known | noise
            if name not in mine:
                if _largest(value) > allowed:
                    self._differs(k, "gradient", name, 1.0, 0.0)
                continue
            difference = _largest(mine[name] - value)
            scale = _largest(value) or 1.0
            if not bool(noise.all()):
                self.verdict.gradient = max(self.verdict.gradient, difference / scale)
            self._check(k, "gradient", name, difference, allowed, scale)

    def _parameters(self, k: int, mine: Values, right: Values, errors: Any) -> None:
        largest = max(map(_largest, right.values()), default=0.0)
        for name, value in right.items():
            if name not in mine:
                continue  # said at the initialisation
            if not torch.equal(mine[name], value):
                self.verdict.bit_equal = False
            difference = (mine[name] - value).abs()
            allowed = self._allowed(_largest(errors["parameters"][name]) if errors else None, _largest(value), largest)
            if name in self.undetermined:
                loose = self.undetermined[name] & (difference > self._allowed(0.0, _largest(value), largest))
                if bool(loose.any()):
                    self.verdict.undetermined[name] = int(loose.sum())
                    difference = difference.masked_fill(loose, 0.0)
            scale = _largest(value) or 1.0
            self.verdict.parameter = max(self.verdict.parameter, _largest(difference) / scale)
            self._check(k, "update", name, _largest(difference), allowed, scale)

    def _check(self, k: int, phase: str, tensor: str, difference: float, allowed: float, scale: float) -> None:
        self.verdict.used = max(self.verdict.used, difference / allowed if allowed else float(difference > 0))
        if not difference <= allowed:  # nan differs
            self._differs(k, phase, tensor, difference / scale, allowed / scale)

    def _differs(self, k: int, phase: str, tensor: str, relative: float, tolerance: float) -> None:
        if self.verdict.first is None:
            self.verdict.first = Difference(k, phase, tensor, relative, tolerance)


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; nan if there is one."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
