"""Facts about the forward and the backward pass, from trying them: how precise they are, whether they repeat, how they draw.

They are tried in a process of its own, since a unit may count its calls: a reference must call it as often as training does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from echelon.common.errors import UsageError
from echelon.prover.micro import Micro, NotJoinable, digest, joined
from echelon.prover.pass_state import VARIABLE, unlike
from echelon.prover.records import by_index
from echelon.prover.reference import Pass, Reference
from echelon.prover.references import AutoReference
from echelon.prover.values import UnitKind, Values, near, parameters_of
from echelon.prover.workarounds import seeding_backward

__all__ = ["UNKNOWN", "backward_draws", "probe"]

_MOST_STATES = 50
_ROUNDINGS = 32


UNKNOWN: dict[str, Any] = {"narrowest": None, "repeatable": True, "per_sample": None, "state": {}, "writes": None, "kept": {}}
_ROUNDING = 1e-4  # of the largest element: what kernels that sum in another order may change
_TIMES_REPEATED = 100


def probe(reference: Reference) -> dict[str, Any]:
    """Facts about the first forward pass.

    Returns:
        `state`: the kept state on which the loss or the gradient depends: paths by name; `narrowest`: the floating-point type
        with the fewest digits in which anything was saved for the backward pass, None if that cannot be known; `repeatable`:
        whether the same random numbers give the same loss again; `per_sample`: among streams in the same state on two ranks,
        those from which more samples draw more; `writes`: a parameter that the pass itself sets from its samples; `kept`: the
        kept state after an update of all ranks' samples at once.
    """
    reference.begin(write=False)
    reference.enter_epoch(reference.updates[0][0].epoch)
    facts: dict[str, Any] = {**UNKNOWN, "writes": _written(reference)}
    facts["per_sample"], facts["state"] = _per_sample(reference), _state_that_matters(reference)
    if isinstance(reference, AutoReference):
        micro = reference.updates[0][0]
        if not UnitKind.of(reference.unit).is_loop:  # a loop computes its loss by itself
            facts["narrowest"] = _narrowest_kept(reference, micro)
        now = reference.sources.states()
        first, second = (reference.tried(Pass(micro.data, 1.0, now))[0] for _ in range(2))
        facts["repeatable"] = abs(first - second) <= 1e-4 * abs(first) or first != first
        variables = sorted({p for u in reference.updates for m in u for p in m.state if p.startswith(VARIABLE)})
        if variables and not facts["repeatable"]:
            names = VARIABLE + ", ".join(each.removeprefix(VARIABLE) for each in variables)
            facts["state"][names] = variables
    if facts["state"] and not reference.drew:
        with contextlib.suppress(Exception):  # a batch of all ranks can be too large
            reference.update(0)
            facts["kept"] = reference.kept.values() if reference.joined else {}
    return facts


def _written(reference: Reference) -> str | None:
    """A parameter that the pass sets, as a layer does that its first batch initialises. Noise on parameters is alike for both."""
    first = reference.updates[0]
    left: list[dict[str, torch.Tensor]] = []
    for micro in (first[0], first[-1]) if isinstance(reference, AutoReference) and len(first) > 1 else ():
        with reference.taken_back():
            before = {name: p.detach().clone() for name, p in parameters_of(reference.unit)}
            reference.try_pass([Pass(micro.data, 1.0, first[0].streams)])
            now = parameters_of(reference.unit)
            left.append({name: p.detach().clone() for name, p in now if _is_set(p, before[name])})
    one, other = left or ({}, {})
    return next((name for name in one if name in other and not torch.equal(one[name], other[name])), None)


def _is_set(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a parameter changed by more than the rounding of a step and its reversal, as in sharpness-aware minimisation."""
    return not near(now, before, _ROUNDINGS * torch.finfo(now.dtype).eps)


def _narrowest_kept(reference: AutoReference, micro: Micro) -> torch.dtype | None:
    seen: list[torch.dtype] = []

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            seen.append(tensor.dtype)
        return tensor

    with contextlib.suppress(RuntimeError, UsageError), torch.autograd.graph.saved_tensors_hooks(kept, lambda t: t):
        return _narrowest(reference.loss_of(micro.data), seen)
    return None


def _narrowest(loss: torch.Tensor, kept: list[torch.dtype]) -> torch.dtype | None:
    """The narrowest type of the leaves of the loss's graph; and of its saved tensors, if the graph has casts.

    Without casts, a narrower tensor is something like a mask, exact in any type, and no computation is narrow.
    """
    types, waiting, seen, casts = set(), [loss.grad_fn], set(), False
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        casts |= node.name().startswith("ToCopyBackward")
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            types.add(leaf.dtype)
        waiting.extend(inner for inner, _ in node.next_functions)
    types |= set(kept) if casts else set()
    return max(types, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _state_that_matters(reference: Reference) -> dict[str, list[str]]:
    """Kept state on which the loss or the gradient depends. Each part is tried alone, with its value from before another pass;
    the rest is as before the first pass, then as before the last: state behind a counter matters late.
    """
    micros = [m for update in reference.updates for m in update]
    one, begin = micros[0], reference.kept.values()
    groups: dict[str, list[str]] = {}
    for path in sorted(p for p in set().union(*(m.state for m in micros)) if not p.startswith(VARIABLE)):
        first, *rest = path.split(".")
        keeps = first.endswith("module") or not rest  # all state of another model, such as a teacher, is one group
        whole = first if hasattr(reference.unit, first) else f"{first}.{rest[0]}" if rest else path
        groups.setdefault(path if keeps else whole, []).append(path)
    as_it_was = {path: value for path, value in {**begin, **one.state}.items() if any(path in g for g in groups.values())}

    def tried(state: Mapping[str, Any], beside: Mapping[str, Any] = as_it_was) -> tuple[float, Values]:
        return reference.tried(Pass(one.data, 1.0, one.streams, {**beside, **state}))

    late = {**as_it_was, **micros[-1].state}
    usual, again, usual_late = tried({}), tried({}), tried({}, late)
    groups_that_matter: dict[str, list[str]] = {}
    every = [m.state for m in micros if unlike(as_it_was, m.state) or m.state.keys() - as_it_was.keys()]
    every = every[:: max(1, len(every) // 4)] if _are_close(usual, again) else []
    if all(_are_close(usual, tried(each)) for each in every):
        groups = {}  # together they do nothing: none of them is tried alone
    for name, paths in list(groups.items())[:_MOST_STATES]:
        others = [{p: m.state[p] for p in paths if p in m.state} for m in reversed(micros)]
        other = next((each for each in others if unlike(as_it_was, each) or each.keys() - as_it_was.keys()), None)
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):  # some parts only fit together
            if other is not None and not _are_close(usual, tried(other)):
                groups_that_matter[name] = paths
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):
            earlier = next((each for each in others if unlike(late, each)), None)
            if name not in groups_that_matter and earlier is not None and not _are_close(usual_late, tried(earlier, late)):
                groups_that_matter[name] = paths
    if groups and not groups_that_matter:  # they matter together, such as a teacher, and when it learns
        groups_that_matter = groups
    return groups_that_matter


def _are_close(one: tuple[float, Values], other: tuple[float, Values]) -> bool:
    same = abs(one[0] - other[0]) <= 1e-6 * abs(one[0]) or one[0] != one[0]
    return same and all(near(g, other[1][n], 1e-6) for n, g in one[1].items() if n in other[1])


def _per_sample(reference: Reference) -> set[str]:
    for same in by_index(reference.records, 0):
        drawing = [m for m in same if m.weight > 0 and m.streams]
        if len(drawing) > 1:
            return _drawn_more(reference, *drawing[:2])
    return set()


def _drawn_more(reference: Reference, one: Micro, other: Micro) -> set[str]:
    """Streams in the same state before both micro-batches, and in another state after both together than after one."""
    alike = {n for n in one.streams.keys() & other.streams.keys() if digest(one.streams[n]) == digest(other.streams[n])}
    ends = []
    try:
        for data in (one.data, joined([one, other])):
            with reference.taken_back():
                reference.try_pass([Pass(data, 1.0, one.streams)])
                after = reference.sources.states()
            ends.append({name: digest(after[name]) for name in alike if name in after})
    except (NotJoinable, RuntimeError, ValueError):
        return alike
    return {name for name in alike if ends[0].get(name) != ends[1].get(name)}


def backward_draws(reference: Reference) -> dict[str, Any]:
    """Try the first micro-batch with two RNG states between forward and backward pass.

    Returns:
        `depends`: the parameter whose gradient changes most, and by how much, relative; None if all stay the same, or if the
        pass cannot be repeated.
    """
    reference.keeps_dropout = True
    reference.begin(write=False)
    reference.enter_epoch(reference.updates[0][0].epoch)
    data, tries = reference.updates[0][0].data, []
    for seed in (1, 1, 2):
        with seeding_backward(seed):
            tries.append(reference.tried(Pass(data)))
    (loss, one), (again, same), (third, other) = tries
    if not loss == again == third:
        return {"depends": None}
    far = {name: _distance(one[name], other[name]) for name in one if name in other}
    near = max((_distance(one[name], same[name]) for name in one if name in same), default=0.0)
    name = max(far, key=far.__getitem__, default="")
    return {"depends": (name, far[name]) if name and far[name] > max(_ROUNDING, _TIMES_REPEATED * near) else None}


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    size = float(one.abs().max()) if one.numel() else 0.0
    return float((one - other).abs().max()) / size if size else 0.0
