"""Combine the parts of a batch, or of an update: as is right, to compare with the whole, and as likely mistakes would.

Batches that are padded to the longest sample, or are lists of samples, cannot be joined over the ranks; but one of them can be
taken apart. With the unit's own weights w, losses l and gradients must satisfy

    l(whole) = sum_i w_i l(part_i) / sum_i w_i

for any parts. A mean over tokens without weights does not, nor does a batch norm, a contrast between samples, or a choice of the
hardest samples: under a layout such a program trains another model than one process does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from echelon.prover.micro import Micro, NotDivisible, Samples, digest, on_host, plain, widths_of
from echelon.prover.reading import first_samples, reads_alike
from echelon.prover.records import by_index
from echelon.prover.reference import Pass, Reference
from echelon.prover.references import AutoReference, OwnReference
from echelon.prover.values import UnitKind, Values

__all__ = ["best_shares", "mistakes_of", "split"]

_TOLERANCE = {"wide": 1e-6, "right": 1e-4}  # in float64 as well, a script may compute something in float32
_ROUNDINGS = 8  # of a type with few digits
_MOST_BATCHES = 4


@dataclass
class _Part:
    """One micro-batch; or all of a rank's, for a unit with a step of its own; or some samples of a batch.

    Args:
        recorded: the loss that the rank recorded.
    """

    weight: float
    loss: float
    gradients: Values
    rank: int = 0
    recorded: float | None = None


def mistakes_of(reference: Reference, k: int) -> dict[str, dict[str, Any]]:
    """`loss` and `gradients` of update k for each way of combining its parts, after training on all updates before it."""
    reference.run_until(k)
    if isinstance(reference, AutoReference):
        parts, right = _of_auto(reference, k)
    else:
        assert isinstance(reference, OwnReference)
        parts, right = _of_own(reference, k)
    if reference.records[0].is_of_several:  # nothing steps here: later losses would meet parameters of before the first step
        first = reference.records[0].held_first
        right = {n: g for n, g in right.items() if n in first}
        for part in parts:
            part.gradients = {n: g for n, g in part.gradients.items() if n in first}
    total = sum(p.weight for p in parts)
    ways = {"weighted": [p.weight / total for p in parts], "unweighted": [1 / len(parts)] * len(parts)}
    ranks = sorted({p.rank for p in parts})
    for rank in ranks if len(ranks) > 1 else ():
        own = sum(p.weight for p in parts if p.rank == rank)
        ways[f"rank {rank} alone"] = [p.weight / own if p.rank == rank else 0.0 for p in parts]
    best = best_shares([p.gradients for p in parts], right)
    if best is not None:
        ways["best weights"] = best
    limit = reference.records[0].limits[k]
    mistakes: dict[str, dict[str, Any]] = {}
    for way, shares in ways.items():
        mistakes[way] = {**_combined(parts, shares, limit), "shares": shares, "misses": _misses(parts, shares, right)}
    mistakes["weighted"]["losses"] = [(p.rank, p.loss, p.recorded) for p in parts]
    mistakes["weighted"]["norms"] = [_norm(p.gradients) for p in parts]
    mistakes["weighted"]["is_linear"] = not isinstance(reference, AutoReference) or all(
        _is_linear(reference, micro, part)
        for micro, part in zip((m for r in reference.records for m in r.updates[k] if m.weight > 0), parts, strict=True)
    )
    return mistakes


def _of_auto(reference: AutoReference, k: int) -> tuple[list[_Part], Values]:
    """The parts, and the right gradients before clipping."""
    reference.enter_epoch(reference.updates[k][0].epoch)
    parts = []
    for record in reference.records:
        for micro in record.updates[k]:
            if micro.weight > 0:
                loss, gradients = reference.tried(Pass.of(micro))
                parts.append(_Part(micro.weight, loss, gradients, record.rank, micro.loss))
    with reference.taken_back():
        reference.backward_of_all(k)
        return parts, reference.gradients()


def _is_linear(reference: AutoReference, micro: Micro, part: _Part) -> bool:
    """Whether half of a loss has half of its gradient, as it has if autograd alone computes it."""

    def is_off(times: float) -> bool:
        made = reference.tried(Pass.of(micro, 1 / times))[1]
        apart = {n: times * made[n].double() - g.double() for n, g in part.gradients.items() if n in made}
        return _norm(apart) > 1e-3 * _norm(part.gradients)

    return not is_off(2.0) or is_off(1.0)  # if the same pass has another gradient each time, this cannot tell


def _of_own(reference: OwnReference, k: int) -> tuple[list[_Part], Values]:
    """As `_of_auto`, for whole steps of the user's own."""
    parts = []
    for record in reference.records:
        micros = record.updates[k]
        loss, gradients = reference.tried(*(Pass(m.data) for m in micros))
        parts.append(_Part(sum(m.weight for m in micros), loss, gradients, record.rank))
    whole = [Pass(reference.whole_batch(same)) for same in by_index(reference.records, k)]
    return parts, reference.tried(*whole)[1]


def best_shares(parts: list[Values], right: Values) -> list[float] | None:
    """The shares with which the parts come nearest to the right gradient, by least squares; None if that has no solution."""
    if any(p.keys() != right.keys() for p in parts) or not right:
        return None
    each = torch.stack([torch.cat([p[n].double().flatten() for n in right]) for p in parts])
    goal = torch.cat([right[n].double().flatten() for n in right])
    if not bool(each.isfinite().all() and goal.isfinite().all()):
        return None
    shares: list[float] = torch.linalg.lstsq(each @ each.T, each @ goal).solution.tolist()
    return shares


def _misses(parts: list[_Part], shares: list[float], right: Values) -> float:
    """The distance of the parts, combined with these shares, from the right gradient, before clipping."""
    made = _combined(parts, shares, None)["gradients"]
    return _norm({n: made[n].double() - right[n].double() for n in right if n in made})


def _norm(gradients: Values) -> float:
    return float(torch.linalg.vector_norm(torch.stack([g.double().norm() for g in gradients.values()]))) if gradients else 0.0


def _combined(parts: list[_Part], shares: list[float], limit: float | None) -> dict[str, Any]:
    names = {n: None for p in parts for n in p.gradients}
    gradients = {
        n: torch.stack([p.gradients[n] * share for p, share in zip(parts, shares, strict=True) if n in p.gradients]).sum(0)
        for n in names
    }
    if limit is not None and gradients:
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()]))
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        gradients = {n: g * factor for n, g in gradients.items()}
    return {"loss": sum(p.loss * share for p, share in zip(parts, shares, strict=True) if share), "gradients": gradients}


def split(reference: Reference) -> dict[str, Any]:
    """Take some of the recorded batches apart, before training and after all updates but the last.

    Returns:
        `why_not`: why nothing could be tested, else None; `error`: the relative distance of the whole's loss or gradient from
        that of its parts; `allowed`: what rounding may cause; `best`: whether other weights of the parts give the gradient;
        `padded`: whether parts were also tried with padding of their own, as ranks have them.
    """
    if not isinstance(reference, AutoReference):
        return {"why_not": "its train_step takes its own steps"}
    reference.begin(write=False)
    reference.enter_epoch(reference.updates[0][0].epoch)
    result: dict[str, Any] = {"why_not": "no batch has two samples", "error": 0.0, "best": False, "allowed": 0.0, "padded": False}
    for divisible in _divisible(reference, reference.updates, result):
        _take_apart(reference, *divisible, result)
        result["why_not"], result["allowed"] = None, _TOLERANCE["wide" if reference.how == "wide" else "right"]
        if reference.how != "wide" and reference.computes.dtype is not None:
            result["allowed"] = _ROUNDINGS * torch.finfo(reference.computes.dtype).eps
    if result["why_not"] is None and result["error"] <= result["allowed"]:
        with contextlib.suppress(Exception):  # cutting rows was tested; a user's samples can be anything
            result["padded"] = _take_apart_padded(reference, result)
    if result["why_not"] is None and result["error"] <= result["allowed"]:
        for k in range(len(reference.updates) - 1):
            reference.update(k)
        for divisible in _divisible(reference, reference.updates[-1:], {}):  # for what begins later, such as after a warm-up
            _take_apart(reference, *divisible, result)
    return result


def _take_apart(
    reference: AutoReference, count: int, part: Callable[[int, int], Any], micro: Micro, result: dict[str, Any]
) -> None:
    whole = _tried(reference, part(0, count), count, micro)
    for cut in sorted({1, count // 2}):
        parts = [_tried(reference, part(*ends), ends[1] - ends[0], micro) for ends in ((0, cut), (cut, count))]
        error = _error(whole, parts)
        if error > result["error"]:
            result["error"], result["best"] = error, _has_better_weights(whole, parts)


def _take_apart_padded(reference: AutoReference, result: dict[str, Any]) -> bool:
    """Take a batch apart with parts that are padded by themselves: rows cut from a padded batch keep its width, but the loader
    pads a rank's part to a width of its own.

    Returns:
        whether it could be tried: collating twice gives the same batch, widths differ, and nothing but dropout is drawn, for
        which all samples and places then have the same row.
    """
    loader, draws = reference.loader, reference.by_sample
    if draws is not None and any("dropout" not in name for name, *_ in draws.kinds):
        return False
    # Narrow samples first, so that the first part is narrower than the whole.
    values = sorted(first_samples(loader), key=lambda each: [size.numel() for size in _widths(loader, [each])])
    count = len(values)
    if count < 2 or _widths(loader, values[:1]) == _widths(loader, values):
        return False
    if digest(plain(loader.collate_fn(values))) != digest(plain(loader.collate_fn(values))):
        return False
    if draws is not None:
        draws.end()
        reference.by_sample = None
    _take_apart(reference, count, lambda begin, end: loader.collate_fn(values[begin:end]), reference.updates[0][0], result)
    return True


def _widths(loader: Any, samples: list[Any]) -> list[torch.Size]:
    return list(widths_of(plain(loader.collate_fn(samples))))


def _divisible(
    reference: Reference, updates: Sequence[Sequence[Micro]], result: dict[str, Any]
) -> Iterator[tuple[int, Callable[[int, int], Any], Micro]]:
    """Batches to take apart: the number of samples, a function that cuts from one sample to before another, and a micro-batch.

    These are the batches with the largest weights; or, if none has the loader's samples in its rows, a batch that the loader's
    collate function makes of its first samples.
    """
    loader = reference.loader
    micros = sorted((m for update in updates for m in update), key=lambda m: -m.weight)
    every: list[tuple[Samples, Micro]] = []
    for micro in micros[:_MOST_BATCHES]:
        try:
            every.append((Samples(micro.data, micro.samples), micro))
        except NotDivisible as why:
            result["why_not"] = str(why)
    # Rows that are not the loader's samples, such as nodes of graphs, may belong together.
    counted = [(samples, micro) for samples, micro in every if micro.given in (None, samples.count)]
    if not counted and reads_alike(loader):
        values = first_samples(loader)
        yield len(values), lambda begin, end: loader.collate_fn(values[begin:end]), micros[0]
        return
    for samples, micro in counted or every:
        if samples.count > 1:
            yield samples.count, samples.part, micro


def _tried(reference: AutoReference, data: Any, samples: int, micro: Micro) -> _Part:
    reference.unit.samples_given = samples  # set as a loader does, for the weight
    # A copy: state that is put back may overwrite a loop's variable for an earlier batch, of which this one may be a view.
    loss, made = reference.tried(Pass(on_host(data), 1.0, micro.streams, micro.state))
    unit: Any = reference.unit
    weight = unit.reference.plain.weight if UnitKind.of(unit).is_loop else unit.weight(reference.as_given(data))
    return _Part(float(weight), loss, {n: g.double() for n, g in made.items()})


def _error(whole: _Part, parts: list[_Part]) -> float:
    """The error of the loss or of the gradient, relative to the whole's, whichever is larger."""
    known = [part for part in parts if part.weight > 0]
    total = sum(part.weight for part in known)
    if not total:
        return 0.0
    made = _combined(known, [part.weight / total for part in known], None)
    gradients, right = made["gradients"], whole.gradients
    size, apart = _norm(right), _norm({n: right.get(n, 0.0) - gradients.get(n, 0.0) for n in right.keys() | gradients.keys()})
    of_loss: float = abs(whole.loss - made["loss"]) / (abs(whole.loss) or 1.0)
    return max(of_loss, apart / size if size else float("inf") if apart else 0.0)


def _has_better_weights(whole: _Part, parts: list[_Part]) -> bool:
    shares = best_shares([part.gradients for part in parts], whole.gradients)
    if shares is None:
        return False
    weighed = [replace(part, weight=share) for part, share in zip(parts, shares, strict=True)]
    return abs(sum(shares) - 1) < 0.1 and min(shares) > 0 and _error(whole, weighed) * 10 < _error(whole, parts)
