"""What likely mistakes would give: loss and gradients of one update, with the shares of the ranks put together in other ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from echelon.prover.kept_state import agreeing
from echelon.prover.micro import Micro, NotJoinable, joined
from echelon.prover.reference import AutoReference, OwnReference, Pass, Reference, Values, by_index

__all__ = ["best_shares", "mistakes_of"]


@dataclass
class _Part:
    """A micro-batch by itself, or all of a rank's for a unit that steps by itself."""

    rank: int
    weight: float
    loss: float
    gradients: Values
    recorded: float | None = None  # the loss that the rank itself had


def mistakes_of(reference: Reference, k: int) -> dict[str, dict[str, Any]]:
    """`loss` and `gradients` of update k by the way they were put together, after all updates before it."""
    reference.run_until(k)
    if isinstance(reference, AutoReference):
        parts, right = _of_auto(reference, k)
    else:
        assert isinstance(reference, OwnReference)
        parts, right = _of_own(reference, k)
    if reference.records[0]["kind"].is_of_several:  # at the parameters of before the first step, as nothing steps here
        first = reference.records[0]["held_first"]
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
    limit = reference.records[0]["limits"][k]
    mistakes: dict[str, dict[str, Any]] = {}
    for way, shares in ways.items():
        mistakes[way] = {**_combined(parts, shares, limit), "shares": shares, "misses": _misses(parts, shares, right)}
    if isinstance(reference, AutoReference):
        mistakes.update(_micro_batch_of_all_ranks(reference, k, limit))
    mistakes["weighted"]["losses"] = [(p.rank, p.loss, p.recorded) for p in parts]
    mistakes["weighted"]["norms"] = [_norm(p.gradients) for p in parts]
    mistakes["weighted"]["is_linear"] = not isinstance(reference, AutoReference) or all(
        _is_linear(reference, micro, part)
        for micro, part in zip((m for r in reference.records for m in r["updates"][k] if m.weight > 0), parts, strict=True)
    )
    return mistakes


def _of_auto(reference: AutoReference, k: int) -> tuple[list[_Part], Values]:
    """The parts, and the right gradients before clipping."""
    reference.enter_epoch(reference.updates[k][0].epoch)
    parts = []
    for record in reference.records:
        for micro in record["updates"][k]:
            if micro.weight > 0:
                loss, gradients = reference.tried(Pass.of(micro))
                parts.append(_Part(record["rank"], micro.weight, loss, gradients, micro.loss))
    with reference.taken_back():
        reference.backward_of_all(k)
        return parts, reference.gradients()


def _is_linear(reference: AutoReference, micro: Micro, part: _Part) -> bool:
    """Whether half of a loss has half of its gradient, as it has where nothing but autograd makes it."""

    def is_off(times: float) -> bool:
        made = reference.tried(Pass.of(micro, 1 / times))[1]
        apart = {n: times * made[n].double() - g.double() for n, g in part.gradients.items() if n in made}
        return _norm(apart) > 1e-3 * _norm(part.gradients)

    return not is_off(2.0) or is_off(1.0)  # where the same pass has another gradient each time, nothing can be told


def _of_own(reference: OwnReference, k: int) -> tuple[list[_Part], Values]:
    """The same, of whole steps."""
    parts = []
    for record in reference.records:
        micros = record["updates"][k]
        loss, gradients = reference.tried(*(Pass(m.data) for m in micros))
        parts.append(_Part(record["rank"], sum(m.weight for m in micros), loss, gradients))
    whole = [Pass(reference.whole_batch(same)) for same in by_index(reference.records, k)]
    return parts, reference.tried(*whole)[1]


def _micro_batch_of_all_ranks(reference: AutoReference, k: int, limit: float | None) -> dict[str, dict[str, Any]]:
    """What it would be if every micro-batch saw all ranks, and nothing saw all micro-batches."""
    parts = []
    for same in by_index(reference.records, k):
        try:
            batch = joined([m for m in same if m.weight > 0])
        except (NotJoinable, IndexError):
            return {}
        loss, gradients = reference.tried(Pass(batch, state=agreeing(m.state for m in same)))
        parts.append(_Part(0, sum(m.weight for m in same), loss, gradients))
    total = sum(p.weight for p in parts)
    return {"over ranks": _combined(parts, [p.weight / total for p in parts], limit)} if len(parts) > 1 else {}


def best_shares(parts: list[Values], right: Values) -> list[float] | None:
    """By least squares, the shares with which the parts come nearest to the right gradient; None if they are no numbers."""
    if any(p.keys() != right.keys() for p in parts) or not right:
        return None
    each = torch.stack([torch.cat([p[n].double().flatten() for n in right]) for p in parts])
    goal = torch.cat([right[n].double().flatten() for n in right])
    if not bool(each.isfinite().all() and goal.isfinite().all()):
        return None
    shares: list[float] = torch.linalg.lstsq(each @ each.T, each @ goal).solution.tolist()
    return shares


def _misses(parts: list[_Part], shares: list[float], right: Values) -> float:
    """How far the parts, put together so, are from the right gradient, before either is clipped."""
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
