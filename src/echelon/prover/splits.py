"""Whether the mean over a batch is the weighted mean over its parts, in one process, where batches cannot be put together.

Batches that are padded to the longest sample, or are lists of samples, cannot be joined over the ranks; but one of them can be
taken apart. With the unit's own weights w, losses l and gradients must satisfy

    l(whole) = sum_i w_i l(part_i) / sum_i w_i

for any parts. A mean over tokens without weights does not, nor does a batch norm, a contrast between samples, or a choice of the
hardest ones: under a layout such a program trains another model than one process does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from echelon.prover.micro import Micro, NotDivisible, Samples, digest, on_host, plain, widths_of
from echelon.prover.mistakes import best_shares
from echelon.prover.reference import AutoReference, Pass, Reference, Values
from echelon.prover.samples import first_samples, reads_alike
from echelon.prover.unit_kind import UnitKind

__all__ = ["split"]

_TOLERANCE = {"wide": 1e-6, "right": 1e-4}  # in float64 as well, a script may compute something in float32
_ROUNDINGS = 8  # of a type with few digits
_MOST_BATCHES = 4


def split(reference: Reference) -> dict[str, Any]:
    """Take some of the recorded batches apart, before training and after all updates but the last.

    Returns:
        `why_not`: why nothing could be tested, else None; `error`: how far the loss or the gradient of the whole is from that of
        its parts, relative; `allowed`: what rounding may do; `best`: whether other weights of the parts give the gradient;
        `padded`: whether parts that are padded by themselves were tried, as ranks have them.
    """
    if not isinstance(reference, AutoReference):
        return {"why_not": "its train_step takes its own steps"}
    reference.begin(write=False)
    reference.enter_epoch(reference.updates[0][0].epoch)
    found: dict[str, Any] = {"why_not": "no batch has two samples", "error": 0.0, "best": False, "allowed": 0.0, "padded": False}
    for divisible in _divisible(reference, reference.updates, found):
        _take_apart(reference, *divisible, found)
        found["why_not"], found["allowed"] = None, _TOLERANCE["wide" if reference.how == "wide" else "right"]
        if reference.how != "wide" and reference.computes.dtype is not None:
            found["allowed"] = _ROUNDINGS * torch.finfo(reference.computes.dtype).eps
    if found["why_not"] is None and found["error"] <= found["allowed"]:
        with contextlib.suppress(Exception):  # what rows show is known; samples of a user's own can be anything
            found["padded"] = _take_apart_padded(reference, found)
    if found["why_not"] is None and found["error"] <= found["allowed"]:
        for k in range(len(reference.updates) - 1):
            reference.update(k)
        for divisible in _divisible(reference, reference.updates[-1:], {}):  # what begins later, as after a warm-up
            _take_apart(reference, *divisible, found)
    return found


def _take_apart(
    reference: AutoReference, count: int, part: Callable[[int, int], Any], micro: Micro, found: dict[str, Any]
) -> None:
    whole = _pass(reference, part(0, count), count, micro)
    for cut in sorted({1, count // 2}):
        parts = [_pass(reference, part(*ends), ends[1] - ends[0], micro) for ends in ((0, cut), (cut, count))]
        error = _error(whole, parts)
        if error > found["error"]:
            found["error"], found["best"] = error, _has_better_weights(whole, parts)


def _take_apart_padded(reference: AutoReference, found: dict[str, Any]) -> bool:
    """Rows of a padded batch are as wide as that one; on a rank the loader pads a part by itself, to another width.

    Returns:
        whether it could be tried: samples that are collated alike are padded to several widths, and what is drawn is dropout, of
        which all samples and places then have the same row.
    """
    loader, draws = reference.loader, reference.by_sample
    if draws is not None and any("dropout" not in name for name, *_ in draws.kinds):
        return False
    # The narrow ones first, so that they are narrower by themselves than the whole.
    values = sorted(first_samples(loader), key=lambda each: [size.numel() for size in _widths(loader, [each])])
    count = len(values)
    if count < 2 or _widths(loader, values[:1]) == _widths(loader, values):
        return False
    if digest(plain(loader.collate_fn(values))) != digest(plain(loader.collate_fn(values))):
        return False
    if draws is not None:
        draws.end()
        reference.by_sample = None
    _take_apart(reference, count, lambda begin, end: loader.collate_fn(values[begin:end]), reference.updates[0][0], found)
    return True


def _widths(loader: Any, samples: list[Any]) -> list[torch.Size]:
    return list(widths_of(plain(loader.collate_fn(samples))))


def _divisible(
    reference: Reference, updates: Sequence[Sequence[Micro]], found: dict[str, Any]
) -> Iterator[tuple[int, Callable[[int, int], Any], Micro]]:
    """How many samples a batch has, and what gives it from one sample to before another one: of those that weigh most; or, if
    none has the loader's samples in its rows, of a batch that the loader's collate function makes of its first samples.
    """
    loader = reference.loader
    micros = sorted((m for update in updates for m in update), key=lambda m: -m.weight)
    every: list[tuple[Samples, Micro]] = []
    for micro in micros[:_MOST_BATCHES]:
        try:
            every.append((Samples(micro.data, micro.samples), micro))
        except NotDivisible as why:
            found["why_not"] = str(why)
    # Rows that are not the loader's samples, such as nodes of graphs, may belong together.
    told = [(samples, micro) for samples, micro in every if micro.given in (None, samples.count)]
    if not told and reads_alike(loader):
        values = first_samples(loader)
        yield len(values), lambda begin, end: loader.collate_fn(values[begin:end]), micros[0]
        return
    for samples, micro in told or every:
        if samples.count > 1:
            yield samples.count, samples.part, micro


_Pass = tuple[float, Values, float]  # loss, gradients, weight


def _pass(reference: AutoReference, data: Any, samples: int, micro: Micro) -> _Pass:
    reference.unit.samples_given = samples  # as a loader says it, for the weight
    # A copy: state that is put back may be a loop's variable for the batch before, of which this one may be a view.
    loss, made = reference.tried(Pass(on_host(data), 1.0, micro.streams, micro.state))
    gradients = {n: g.double() for n, g in made.items()}
    unit: Any = reference.unit
    weight = unit.reference.plain.weight if UnitKind.of(unit).is_loop else unit.weight(reference.as_given(data))
    return loss, gradients, float(weight)


def _error(whole: _Pass, parts: list[_Pass]) -> float:
    """Of the loss or the gradient, the larger one, relative to the whole's."""
    known = [part for part in parts if part[2] > 0]
    total = sum(weight for _, _, weight in known)
    if not total:
        return 0.0
    loss = sum(value * weight for value, _, weight in known) / total
    names = set(whole[1]).union(*(part[1] for part in known))
    squares, size = 0.0, 0.0
    for name in names:
        of_parts = sum(part[1][name] * (part[2] / total) for part in known if name in part[1])
        of_whole = whole[1].get(name, torch.zeros(()))
        squares += float((of_whole - of_parts).square().sum())
        size += float(of_whole.square().sum())
    of_loss = abs(whole[0] - loss) / (abs(whole[0]) or 1.0)
    of_gradient = (squares / size) ** 0.5 if size else 0.0 if not squares else float("inf")
    return max(of_loss, of_gradient)


def _has_better_weights(whole: _Pass, parts: list[_Pass]) -> bool:
    shares = best_shares([part[1] for part in parts], whole[1])
    if shares is None:
        return False
    total = sum(shares)
    weighed = [(loss, gradients, share) for (loss, gradients, _), share in zip(parts, shares, strict=True)]
    return abs(total - 1) < 0.1 and min(shares) > 0 and _error(whole, weighed) * 10 < _error(whole, parts)
