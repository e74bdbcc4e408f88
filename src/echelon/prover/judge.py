"""Compare a row with the reference, step by step, and say where it first differs, and what could not be compared.

**Tolerance.** It is measured. The reference was computed several times (`prover/reference.py`). The distances between these runs
in a tensor, relative to its largest value, are samples of what rounding does to it through the whole chain of updates: a flipped
gate or an amplification by chaotic training shows among them as in a row. A sample can be small by luck, most of all in
a tensor of few elements. So the measure of a tensor is the largest of: its samples of this and earlier updates, the median
over all tensors of the update, one rounding. A row may differ by `FACTOR` times the measure. Two samples of one size differ
by a factor themselves: on twelve right scripts the largest of 13,000 was 9.6; mistakes are 1e2 to 1e7.

**Resolution.** Samples that lie far apart do not excuse a row; they say that this precision cannot tell. A tensor that may differ
by more than `RESOLUTION` of its own size has not been compared: it is listed in `Verdict.blind`, and the caller has to look
closer, in float64. Only a value that is truly zero has no size of its own: one that float64 finds a hundred times smaller than
the samples lie apart, or one below a few roundings of the largest value of its kind in every reference.

**Elements without a right value.** An element whose true gradient is zero (the key biases of attention) has a gradient of
rounding noise, which Adam turns into steps of full length: its parameter has no right value, in any implementation. Such an
element is excused if its gradient is within tolerance of zero in every reference, and if the effect of the difference on the
loss (gradient times difference) is no more than that of rounding, or small beside that of the update. They are counted.

A row in bf16 is compared with a reference in bf16. Its samples are one run in float64, and two more in bf16 whose weights are
rounded differently. A rounding is a hundredth there, so that 32 of them would hide a gradient of half the size: beyond
`RESOLUTION`, the factor is `HALF_FACTOR`; and where more than `HALF_RESOLUTION` would be allowed, float64 decides, in which
nothing is cast.

In float64 a single reference can suffice, as there is nothing wider: the tolerance is then 1e-11 of the largest value of its
kind; plain torch reaches 4e-13 after twenty updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from echelon.prover.micro import Micro
from echelon.prover.proof import Blind, Difference, Verdict, larger
from echelon.prover.records import RankRecord, load_values, micros_in_order
from echelon.prover.reference import AGAIN
from echelon.prover.values import Values

__all__ = ["compare", "mean_loss"]

FACTOR = 32.0
FLOAT64_TOLERANCE = 1e-11
HALF_FACTOR = 8.0
RESOLUTION = 5e-3
HALF_RESOLUTION = 0.25
HARMLESS = 1e-4  # of an update's effect on the loss
_MANY = 10_000_000  # parameters; with fewer, threads wait longer than they compare, on a busy machine for seconds
DIGITS = 1e-2  # a tensor whose samples lie within this of each other is no noise, however small it is


def compare(
    row: Path,
    reference: Path,
    records: list[RankRecord],
    dtype: torch.dtype,
    narrowest: torch.dtype | None = None,
    *,
    half: bool = False,
) -> Verdict:
    """Compare the files of a row with those of the reference on the same micro-batches.

    Args:
        row, reference: folders with `initial.pt` and `update-NNN.pt`; the reference's also has a folder for each further run.
        records: of all ranks of the row.
        narrowest: a floating-point type with fewer digits than `dtype` in which the forward pass computes, if there is one.
        half: row and reference compute in half precision.
    """
    verdict = Verdict()
    # A norm after a forward pass in float32 has float32's digits, even if all references round it to the same number.
    epsilon = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if narrowest is not None else 0.0)
    # Types with few digits round by as much as RESOLUTION: that must not be taken for chaos.
    resolution = HALF_RESOLUTION if half else max(RESOLUTION, 2 * FACTOR * torch.finfo(narrowest or dtype).eps)
    again = sorted(p for p in reference.glob(f"{AGAIN}*") if (p / "update-000.pt").exists())
    comparison = _Comparison(verdict, epsilon, resolution, dtype is torch.float64 and not again, records[0].flattened)
    comparison.factor = HALF_FACTOR if half else FACTOR
    before, reference_before = load_values(row / "initial.pt"), load_values(reference / "initial.pt")
    comparison.initial(before["parameters"], reference_before["parameters"])
    with _threads(1 if sum(p.numel() for p in before["parameters"].values()) < _MANY else torch.get_num_threads()):
        for k, micros in enumerate(micros_in_order(records)):
            file = f"update-{k:03d}.pt"
            verdict.updates = k + 1
            values, right = load_values(row / file), load_values(reference / file)
            verdict.meaningless = _meaningless(k, right)
            if verdict.meaningless is not None:
                break
            values["loss"] = mean_loss(micros)
            values["norm"] = records[0].norms[k]
            samples = [_Sample(load_values(p / file), "wide" in p.name) for p in again if (p / file).exists()]
            comparison.update(k, values, right, samples, reference_before["parameters"])
            if verdict.first is not None and verdict.first.update == k and not verdict.unmoved:
                verdict.unmoved = _unmoved(values, right, before["parameters"], reference_before["parameters"])
            before, reference_before = values, right
    verdict.bit_equal = verdict.bit_equal and verdict.first is None and verdict.updates > 0
    verdict.exact = verdict.exact and verdict.bit_equal
    return verdict


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rounding_of(value: torch.Tensor) -> float:
    """One rounding of a tensor that is kept in half precision, scaled so that FACTOR of these are HALF_FACTOR roundings."""
    half = value.dtype in (torch.bfloat16, torch.float16)
    return HALF_FACTOR / FACTOR * torch.finfo(value.dtype).eps if half else 0.0


def _unmoved(own_values: dict[str, Any], right: dict[str, Any], before: Values, right_before: Values) -> list[str]:
    """The parameters that this update changed in the reference, but not in the row."""
    values, rights = own_values["parameters"], right["parameters"]
    trained = rights.keys() & values.keys() & right["gradients"].keys()
    return [n for n in trained if torch.equal(values[n], before[n]) and not torch.equal(rights[n], right_before[n])]


def mean_loss(micros: list[Micro]) -> float | None:
    """The mean loss of the global batch; None if the unit does not tell its losses."""
    known = [(m.loss, m.weight) for m in micros if m.loss is not None]
    total = sum(weight for _, weight in known)
    return sum(loss * weight for loss, weight in known) / total if total else None


def _meaningless(k: int, right: dict[str, Any]) -> str | None:
    """Why nothing can be compared with this reference; None if it can."""
    named = [("the loss", right["loss"])]
    named += [(f"the {kind[:-1]} of {n}", t) for kind in ("gradients", "parameters") for n, t in right[kind].items()]
    for name, value in named:
        if value is not None and not bool(torch.isfinite(torch.as_tensor(value)).all()):
            return f"in one process in plain PyTorch, too, {name} is inf or nan in update {k}: there is nothing to compare."
    return None


@dataclass(frozen=True)
class _Sample:
    """A further run of the reference.

    Args:
        wide: it ran in float64, where a value that is truly zero is much smaller.
    """

    values: dict[str, Any]
    wide: bool


class _Comparison:
    """Compares update by update; keeps the undetermined elements, and the measured rounding, over the updates."""

    def __init__(self, verdict: Verdict, epsilon: float, resolution: float, alone: bool, without_gradients: bool) -> None:
        self.verdict, self.epsilon, self.resolution = verdict, epsilon, resolution
        self.alone = alone  # one reference in float64
        self.without_gradients = without_gradients
        self.factor = FACTOR
        self.undetermined: Values = {}
        self.roundings: dict[str, dict[str, float]] = {}  # by kind and name: the largest relative error so far
        self.loss = 0.0  # the largest so far
        self.loss_allowed = 0.0  # the largest tolerance of the loss so far

    def initial(self, values: Values, right: Values) -> None:
        missing = sorted(values.keys() ^ right.keys())
        if missing:
            self._differs(0, "initialisation", missing[0], float("inf"), 0.0)
        for name in right:
            if name in values and not torch.equal(values[name], right[name]):
                relative = _largest(values[name] - right[name]) / (_largest(right[name]) or 1.0)
                self._differs(0, "initialisation", name, relative, 0.0)

    def update(self, k: int, values: dict[str, Any], right: dict[str, Any], samples: list[_Sample], before: Values) -> None:
        """Compare one update in the order of computation: loss, gradients and norm, then parameters."""
        self._scalar(k, "forward", "loss", "loss", values, right, samples)
        if not self.without_gradients:
            self._gradients(k, values["gradients"], right["gradients"], samples)
        self._scalar(k, "gradient", "gradient norm", "norm", values, right, samples)
        self.loss = max(self.loss, abs(right["loss"] or 0.0))
        self._parameters(k, values["parameters"], right, samples, before)

    # --- loss and norm

    def _scalar(
        self, k: int, phase: str, name: str, key: str, own_value: dict[str, Any], right: dict[str, Any], samples: list[_Sample]
    ) -> None:
        if own_value[key] is None or right[key] is None:
            return
        value, scale = right[key], abs(right[key]) or self.loss or 1.0
        others = [(s.values[key], s.wide) for s in samples if s.values[key] is not None]
        error = max((abs(other - value) for other, _ in others), default=0.0)
        is_zero = any(wide and abs(other) <= DIGITS * abs(other - value) for other, wide in others)
        known = self.roundings.setdefault(name, {})
        known[name] = max(error / scale, 0.0 if is_zero else known.get(name, 0.0), self.epsilon)
        allowed = scale * (FLOAT64_TOLERANCE if self.alone else max(self._allowed(known[name]), self._least))
        if allowed > self.resolution * scale and not is_zero:
            self.verdict.blind.append(Blind(k, phase, name, allowed / scale, 0.0))
        difference = abs(own_value[key] - value)
        if key == "loss":
            self.loss_allowed = max(self.loss_allowed, allowed)
            self.verdict.loss = larger(self.verdict.loss, difference / scale)
        else:
            self.verdict.norm = larger(self.verdict.norm, difference / scale)
        self._check(k, phase, name, difference, allowed, scale)

    def _allowed(self, sample: float) -> float:
        """The tolerance where the references differ by `sample`; both are relative."""
        return max(self.factor * sample, min(FACTOR * sample, RESOLUTION))

    @property
    def _least(self) -> float:
        """The least tolerance, relative to a value's own size: float64 has digits to spare."""
        return FLOAT64_TOLERANCE if self.epsilon < 1e-12 else 0.0

    # --- tensors

    def _tolerances(self, k: int, kind: str, values: Values, samples: list[_Sample], excused: Values) -> dict[str, float]:
        """The absolute tolerance of each tensor; notes those that cannot be compared.

        Args:
            excused: elements that are left out of the measure.
        """
        own = {n: _largest(v) for n, v in values.items()}
        largest, count = max(own.values(), default=0.0), sum(v.numel() for v in values.values())
        roundings = self.factor * self.epsilon * largest
        zero, relative = self._measure(kind, values, own, samples, excused, roundings)
        usual = median(relative.values()) if relative else 0.0
        allowed = {}
        for name, scale in own.items():
            allowed[name] = max(self._allowed(max(relative[name], usual)), self._least) * scale
            if self.alone:
                allowed[name] = FLOAT64_TOLERANCE * largest
            elif name in zero or not scale:
                allowed[name] = max(allowed[name], roundings)
            if allowed[name] > self.resolution * scale and scale and name not in zero:
                phase = "gradient" if kind == "gradients" else "update"
                self.verdict.blind.append(Blind(k, phase, name, allowed[name] / scale, values[name].numel() / count))
        return allowed

    def _measure(
        self, kind: str, values: Values, own: dict[str, float], samples: list[_Sample], excused: Values, roundings: float
    ) -> tuple[set[str], dict[str, float]]:
        """Which tensors are truly zero; and for each tensor how far the references lie apart, relative to its largest value."""
        known, zero, relative = self.roundings.setdefault(kind, {}), set(), {}
        for name, value in values.items():
            others = [(s.values[kind][name], s.wide) for s in samples if name in s.values[kind]]
            error = max((_error(other, value, excused.get(name)) for other, _ in others), default=0.0)
            seen = error / own[name] if own[name] else 0.0
            sizes = [(_largest(other), wide) for other, wide in others]
            is_small = max([own[name], *(size for size, _ in sizes)]) <= roundings
            if (is_small and (seen > DIGITS or self.alone)) or any(wide and size <= DIGITS * error for size, wide in sizes):
                zero.add(name)
            else:
                known[name] = max(seen, known.get(name, 0.0))
            relative[name] = max(seen, known.get(name, 0.0), self.epsilon, _rounding_of(value))
        return zero, relative

    def _gradients(self, k: int, values: Values, right: Values, samples: list[_Sample]) -> None:
        tolerances = self._tolerances(k, "gradients", right, samples, {})
        for name, value in right.items():
            allowed, scale = tolerances[name], _largest(value) or 1.0
            noise = value.abs() <= allowed
            for sample in samples:
                if name in sample.values["gradients"]:
                    noise &= sample.values["gradients"][name].abs() <= allowed
            known = self.undetermined.get(name)
            self.undetermined[name] = noise if known is None else known | noise
            if name not in values:
                if _largest(value) > allowed:
                    self._differs(k, "gradient", name, 1.0, 0.0)
                continue
            difference = _largest(values[name] - value)
            if not bool(noise.all()):
                self.verdict.gradient = larger(self.verdict.gradient, difference / scale)
            self._check(k, "gradient", name, difference, allowed, scale)
        largest = max(map(_largest, right.values()), default=0.0)
        for name in values.keys() - right.keys():
            self._check(k, "gradient", name, _largest(values[name]), self.factor * self.epsilon * largest, largest or 1.0)

    def _parameters(self, k: int, own_values: Values, right: dict[str, Any], samples: list[_Sample], before: Values) -> None:
        values, gradients = right["parameters"], right["gradients"]
        tolerances = self._tolerances(k, "parameters", values, samples, self.undetermined)
        moved = sum(
            float((gradients[n].double() * (values[n] - before[n]).double()).abs().sum()) for n in gradients if n in before
        )
        harmless = max(self.factor * self.epsilon * self.loss, self.loss_allowed, HARMLESS * moved)
        excused = 0
        for name, value in values.items():
            if name not in own_values:
                continue  # reported at the initialisation
            if not torch.equal(own_values[name], value):
                self.verdict.bit_equal = False
            difference, scale = (own_values[name] - value).abs(), _largest(value) or 1.0
            if name in self.undetermined:
                loose = self.undetermined[name] & (difference > tolerances[name])
                if bool(loose.any()) and self._effect(name, difference, loose, gradients, samples) <= harmless:
                    self.verdict.undetermined[name] = int(loose.sum())
                    excused += int(loose.sum())
                    difference = difference.masked_fill(loose, 0.0)
            self.verdict.parameter = larger(self.verdict.parameter, _largest(difference) / scale)
            self._check(k, "update", name, _largest(difference), tolerances[name], scale)
        trained = sum(values[n].numel() for n in gradients if n in values)
        self.verdict.excused = max(self.verdict.excused, excused / trained if trained else 0.0)

    def _effect(
        self, name: str, difference: torch.Tensor, loose: torch.Tensor, gradients: Values, samples: list[_Sample]
    ) -> float:
        """The effect of these elements' differences on the loss, to first order: the largest by any reference's gradients."""
        of_all = [gradients, *(s.values["gradients"] for s in samples)]
        return max(float((g[name].double().abs() * difference.double())[loose].sum()) for g in of_all if name in g)

    def _check(self, k: int, phase: str, tensor: str, difference: float, allowed: float, scale: float) -> None:
        self.verdict.exact = self.verdict.exact and difference == 0
        self.verdict.used = larger(self.verdict.used, difference / allowed if allowed else float(difference > 0))
        if not difference <= allowed:  # nan differs
            self._differs(k, phase, tensor, difference / scale, allowed / scale)

    def _differs(self, k: int, phase: str, tensor: str, relative: float, tolerance: float) -> None:
        column = {"gradient": "gradient", "update": "parameter"}.get(phase)
        if column is not None and tensor != "gradient norm":  # also for truly zero tensors, and those of one side alone
            setattr(self.verdict, column, larger(getattr(self.verdict, column), relative))
        if self.verdict.first is None:
            self.verdict.first = Difference(k, phase, tensor, relative, tolerance)


def _error(other: torch.Tensor, value: torch.Tensor, excused: torch.Tensor | None) -> float:
    error = (other.double() - value.double()).abs()
    return _largest(error if excused is None else error.masked_fill(excused, 0.0))


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; nan if there is one."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
