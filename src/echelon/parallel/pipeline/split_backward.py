"""Whether torch can compute the gradients of a stage's weights apart from those of its inputs, as zero-bubble schedules do.

torch 2.13 begins the second half at the operations at which weights meet what comes from the stage's inputs. So it leaves out,
in silence, what weights give to the outputs past the inputs, as the words of a decoder do that stands behind its encoder. For
weights that meet the inputs several times, as a bias of all layers or a block that is called twice, it needs parts of the graph
that are freed already. Such a stage takes one whole backward pass, where torch computes the first half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import Node, get_gradient_edge

__all__ = ["can_be_split"]


def can_be_split(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], weights: Iterable[torch.Tensor]) -> bool:
    """Of a stage's graph: whether each weight meets the inputs once, and reaches no output otherwise."""
    ends = {get_gradient_edge(t).node for t in outputs if t.requires_grad}
    users = _users(ends)
    fed = _upwards({get_gradient_edge(t).node for t in inputs if t.requires_grad}, users, set())
    for weight in weights:
        node = get_gradient_edge(weight).node
        if node not in users:
            continue
        alone = _upwards({node}, users, fed)
        if len(alone & fed) != 1 or (alone - fed) & ends:
            return False
    return True


def _users(ends: set[Node]) -> dict[Node, set[Node]]:
    """By node of the graph, the nodes that take what it gives."""
    users: dict[Node, set[Node]] = defaultdict(set)
    waiting, seen = list(ends), set(ends)
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is not None:
                users[below].add(node)
                if below not in seen:
                    seen.add(below)
                    waiting.append(below)
    return users


def _upwards(nodes: set[Node], users: dict[Node, set[Node]], until: set[Node]) -> set[Node]:
    """These nodes, and those that use them, to the first of `until` on each way."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        node = waiting.pop()
        if node in until:
            continue
        for user in users.get(node, ()):
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found
