"""The order of forward and backward passes: torch's own schedules, one for each number and kind of micro-batches.

It also finds out which stages can split their backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from echelon.common.errors import PipelineError
from echelon.parallel.pipeline.values import Leaf

__all__ = ["SCHEDULES", "Kind", "can_be_split", "kind_named", "parts", "torch_schedule"]


@dataclass(frozen=True)
class Kind:
    """A schedule.

    Args:
        torch: its class in torch.distributed.pipelining.
        per_rank: stages of each rank; None for any number that the user's cut gives, `default` if the user gives none.
        splits_backward: gradients of inputs and of weights are computed separately, which `fully_shard` does not support.
        folded: stages go down the ranks and up again, so that the first rank also has the last stage.
        any_number: takes any number of micro-batches; else only a multiple of the number of rounds (see `parts`).
    """

    name: str
    torch: str
    per_rank: int | None = 1
    default: int = 1
    splits_backward: bool = False
    folded: bool = False
    any_number: bool = True


SCHEDULES = {
    kind.name: kind
    for kind in (
        Kind("gpipe", "ScheduleGPipe"),
        Kind("1f1b", "Schedule1F1B"),
        Kind("interleaved", "ScheduleInterleaved1F1B", None, 2, any_number=False),
        Kind("zero_bubble", "ScheduleInterleavedZeroBubble", None, 1, splits_backward=True, any_number=False),
        Kind("zbv", "ScheduleZBVZeroBubble", 2, 2, splits_backward=True, folded=True),
    )
}


def kind_named(name: Any) -> Kind:
    """The schedule of this name.

    Raises:
        UsageError: an unknown name.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise PipelineError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, got {name!r}.")
    return SCHEDULES[name]


def stage_ranks(kind: Kind, count: int, pp: int) -> list[int]:
    """By stage, the rank along the pipeline that has it."""
    if not kind.folded:
        return [stage % pp for stage in range(count)]
    return [stage if stage < pp else 2 * pp - 1 - stage for stage in range(count)]


def parts(kind: Kind, number: int, pp: int) -> list[int]:
    """How many micro-batches each call of the schedule takes, for `number` micro-batches of one kind."""
    rounds = max(1, number // pp)
    if kind.any_number or number % rounds == 0:
        return [number]
    return [number - number % pp, number % pp]


class StageModule(nn.Module):
    """The module that torch's schedule calls for a stage, with the received tensors.

    Attributes:
        number: the number of the micro-batch, which torch's stage object sets before the call.
    """

    number = 0

    def __init__(self, compute: Callable[[int, tuple[torch.Tensor, ...]], Any], weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._compute, self._held = compute, list(weights)
        self._not_split: Callable[[], None] | None = None

    def forward(self, *received: torch.Tensor) -> Any:
        for t in received if self._held else ():
            if t.requires_grad:
                t.register_hook(torch.Tensor.contiguous)  # torch sends an input's gradient without making it contiguous
        made = self._compute(self.number, received)
        if self._not_split is not None and torch.is_grad_enabled():
            if not can_be_split(received, made if isinstance(made, tuple) else (made,), self._held):
                self._not_split()
            self._not_split = None
        return made

    def runs_in(self, stage: Any) -> None:
        """Take torch's stage object, so that a stage whose backward pass cannot be split takes a whole one from the start."""
        if self._held and not stage.is_first:
            self._not_split = lambda: setattr(stage, "dw_builder", _nothing_is_left)

    def parameters(self, recurse: bool = True) -> Any:
        """The parameters whose gradients are computed separately from the inputs'."""
        return iter(self._held)


def torch_schedule(
    kind: Kind,
    number: int,
    modules: dict[int, StageModule],
    count: int,
    kinds: Sequence[Sequence[Leaf]],
    loss: Leaf,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Any:
    """torch's schedule for `number` micro-batches of one kind.

    Args:
        modules: by stage, the modules of this rank.
        kinds: by stage, the tensors that it sends on.
        loss: the kind of the last stage's loss.
    """
    from torch.distributed import pipelining

    class Stage(pipelining.PipelineStage):
        """Sets the number of the micro-batch. As an argument it would be a tensor, and fake tensors have no values."""

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
            modules[self.stage_index].number = fwd_chunk_id
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    stages = [
        Stage(
            module,
            stage,
            count,
            device,
            input_args=_examples(kinds[stage - 1]) if stage else (),
            output_args=_examples(kinds[stage]) if stage < count - 1 else _examples([loss]),
            group=group,
        )
        for stage, module in sorted(modules.items())
    ]
    for stage in stages:
        modules[stage.stage_index].runs_in(stage)
    name = "ScheduleGPipe" if kind.name == "1f1b" and number < count else kind.torch
    make = getattr(pipelining, name)
    single = name in ("ScheduleGPipe", "Schedule1F1B")
    return make(stages[0] if single else stages, number, loss_fn=lambda loss, target: loss, scale_grads=False)


def _nothing_is_left() -> Callable[[], None]:
    """A `dw_builder` without work for the second half of a backward pass. With it torch's first half is a whole pass."""
    return lambda: None


def _examples(leaves: Sequence[Leaf]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.grad) for leaf in leaves)


# Whether torch can compute the gradients of a stage's weights separately from those of its inputs, as zero-bubble schedules do.
#
# torch 2.13 begins the second half at the operations at which a weight meets values computed from the stage's inputs. It silently
# leaves out paths from weights to outputs without the inputs, as those of the token embedding of a decoder behind its encoder.
# For weights that meet the inputs several times, as a bias of all layers or a block that is called twice, it needs parts of the
# graph that are freed already. Such a stage computes its whole backward pass where torch computes the first half.


def can_be_split(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], weights: Iterable[torch.Tensor]) -> bool:
    """Whether in a stage's graph each weight meets the inputs exactly once and reaches no output on another path."""
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
    """By node of the graph, the nodes that use its output."""
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
    """These nodes and all that use them, up to and including the first node of `until` on each path."""
    reached, waiting = set(nodes), list(nodes)
    while waiting:
        node = waiting.pop()
        if node in until:
            continue
        for user in users.get(node, ()):
            if user not in reached:
                reached.add(user)
                waiting.append(user)
    return reached
