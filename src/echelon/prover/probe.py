"""Facts about the forward pass, from trying it: how precise it is, whether it can be repeated, how it draws.

A process of its own tries, since a unit may count its calls; a reference must call it as often as training does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from echelon.prover.micro import Micro, NotJoinable, digest, join
from echelon.prover.reference import AutoReference, Reference, by_index
from echelon.prover.values import named_values

__all__ = ["probe"]


def probe(reference: Reference) -> dict[str, Any]:
    """Facts about the first forward pass.

    Returns:
        `narrowest`: the floating-point type with the fewest digits in which anything was kept for the backward pass, None if
        that cannot be known; `repeatable`: whether the same random numbers give the same loss again; `per_sample`: of the
        streams that are in the same state on two ranks, those from which more samples draw more.
    """
    reference.begin(write=False)
    reference.enter_epoch(reference.updates[0][0].epoch)
    facts: dict[str, Any] = {"narrowest": None, "repeatable": True, "per_sample": _per_sample(reference)}
    if isinstance(reference, AutoReference):
        micro = reference.updates[0][0]
        seen: list[torch.dtype] = []

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point():
                seen.append(tensor.dtype)
            return tensor

        with contextlib.suppress(RuntimeError), torch.autograd.graph.saved_tensors_hooks(kept, lambda t: t):
            facts["narrowest"] = _narrowest(reference.loss_of(micro.data), seen)
        now = reference.sources.states()
        first, second = (_pass(reference, micro.data, now) for _ in range(2))
        facts["repeatable"] = abs(first - second) <= 1e-4 * abs(first) or first != first
    return facts


def _narrowest(loss: torch.Tensor, kept: list[torch.dtype]) -> torch.dtype | None:
    """Of the leaves of the loss's graph; and of what the graph keeps, if it changes types on the way.

    If it does not, a narrower tensor is something like a mask, exact in any type, and no computation is narrow.
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


def _pass(reference: Reference, data: Any, streams: Mapping[str, Any]) -> float:
    """The loss of a forward pass; buffers stay as they were."""
    buffers = named_values(reference.unit)
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    reference.sources.restore(streams)
    value = reference.try_loss(data)
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(before[name])
    return value


def _per_sample(reference: Reference) -> set[str]:
    for same in by_index(reference.records, 0):
        drawing = [m for m in same if m.weight > 0 and m.streams]
        if len(drawing) > 1:
            return _drawn_more(reference, *drawing[:2])
    return set()


def _drawn_more(reference: Reference, one: Micro, other: Micro) -> set[str]:
    """Streams that are alike in front of both, and come to another end if their samples go through together."""
    alike = {n for n in one.streams.keys() & other.streams.keys() if digest(one.streams[n]) == digest(other.streams[n])}
    ends = []
    try:
        for data in (one.data, join([one.data, other.data])):
            _pass(reference, data, one.streams)
            after = reference.sources.states()
            ends.append({name: digest(after[name]) for name in alike if name in after})
    except (NotJoinable, RuntimeError, ValueError):
        return alike
    return {name for name in alike if ends[0].get(name) != ends[1].get(name)}
