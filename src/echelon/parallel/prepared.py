"""What the loop knows of a module that was made parallel: the operations whose meaning depends on how.

The loop never asks which layout it has; it speaks to a `Prepared` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from echelon.parallel.axes import Axis, DataAxes, mesh_of
from echelon.parallel.gradients import clip
from echelon.parallel.gradients.fixed_order import clip_in_order_
from echelon.parallel.gradients.unreduced_params import Joined, average_, check_equal
from echelon.parallel.guards.guard import Guard
from echelon.parallel.names import kind_of, plain_names, unwrapped, without_compile, wrapper_of
from echelon.parallel.over_ranks import knows_its_data
from echelon.parallel.shards import reshard
from echelon.parallel.state.state import ModuleState, module_state
from echelon.world.init import World

__all__ = [
    "NO_CONTEXT",
    "Batches",
    "Extras",
    "Form",
    "Listener",
    "MicroBatch",
    "Place",
    "Prepared",
    "WrapperPrepared",
    "combined",
]

T = TypeVar("T")
O = TypeVar("O")  # noqa: E741
M = TypeVar("M", bound=nn.Module)
B = TypeVar("B")
R = TypeVar("R")


# Not frozen: that would take four times as long to make, in every step.
@dataclass(slots=True)
class MicroBatch(Generic[T]):
    """One forward and one backward pass.

    Args:
        data: a batch as the loader gave it, on the device; or a piece of one.
        weight: what it counts in the mean over the global batch: a number, or a 0-dim tensor on the device.
        is_last: of its window; the update follows.
        is_padding: it stands in for a batch without samples.
        samples: that the loader put into it, where it says so.
    """

    data: T
    weight: Any
    is_last: bool
    is_padding: bool = False
    samples: int | None = None


NO_CONTEXT: AbstractContextManager[Any] = contextlib.nullcontext()  # one for all: making one takes longer than entering it


def combined(*contexts: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """One context for several, which are entered in their order, and only when it is; `NO_CONTEXT` for none but such."""
    real = [each for each in contexts if each is not NO_CONTEXT]
    return NO_CONTEXT if not real else real[0] if len(real) == 1 else _entered(real)


@contextlib.contextmanager
def _entered(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


@dataclass(frozen=True)
class Form:
    """What became of a module's parameters.

    Args:
        kind: "own", those that it had before it was made parallel; "others" in their place; or "flat": others that are parts of
            flat tensors, so that single gradients cannot be seen whole.
        gathered_in: the type in which they are gathered to compute, where that is another than theirs.
    """

    kind: Literal["own", "others", "flat"] = "own"
    gathered_in: torch.dtype | None = None


@dataclass(frozen=True)
class Place:
    """Where a rank stands among those that have the same samples.

    Args:
        part, stage: which part of each sample it computes, and which part of the layers, each of how many.
        stages: groups of ranks that hold other parameters altogether, over which norms are summed up; as a pipeline's stages.
        rng_differs: a forward pass draws other random numbers there than one process would.
    """

    part: tuple[int, int] = (0, 1)
    stage: tuple[int, int] = (0, 1)
    stages: Sequence[dist.ProcessGroup | None] = ()
    rng_differs: bool = False


class Batches:
    """What a layout makes of the batches that a rank is given. This base leaves them whole.

    Attributes:
        share: what the latest part of a batch counts of what the batch counts, where rows are counted, which all parts have.
        doubts: parts of samples are weighed, which nothing has compared yet with the whole.
        dry_run: what is computed now is thrown away: a pipeline learns what its stages pass on.
        look: is called with the first batch.
    """

    share: float | torch.Tensor = 1.0
    doubts = False
    dry_run = False
    look: Callable[[Any], None] | None = None

    def part_of(self, batch: Any) -> Any:
        """This rank's part of a batch whose samples other ranks have, too, such as its part of each sequence."""
        if self.look is not None:
            look, self.look = self.look, None
            look(batch)
        return batch

    def whole_of(self, outputs: Any) -> Any:
        """Outputs for the latest batch that `part_of` was asked for, from those for its parts. Collective."""
        return outputs

    def check_parts(
        self, batch: Any, weigh: Callable[[Any], Any], compute: Callable[[Any], Any], dtype: torch.dtype | None
    ) -> None:
        """Where it doubts, of the first batch: do weights and losses of its parts add up to those of the whole? Collective.

        Args:
            weigh, compute: weight and loss of a batch or of its part.
            dtype: in which the loss is computed, if not in that of the parameters.
        Raises:
            UsageError: they do not.
        """

    def check_loss(self, loss: torch.Tensor) -> None:
        """As `check_parts`, of code that cannot be called again: of its first loss, before the backward pass."""


class Extras:
    """What a bit-equal resume with as many ranks needs besides the state. Per rank. This base needs nothing."""

    def keep(self) -> None:
        """From now on, remember what `state_dict` gives. Once in a run that saves."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, under whatever layout; what is not there stays. Collective."""


class Listener(Protocol):
    """One of `Prepared.listeners`: what parts of a module want told of each update, on one rank too."""

    def begin_forward(self, weight: Any) -> None:
        """The forward pass of a micro-batch of this weight follows."""

    def end_window(self, *, updated: bool) -> None:
        """After the optimizer's step, or in its place, if it was left out. Collective."""

    def discard(self) -> None:
        """The micro-batches since the latest update are given up."""

    def measures(self) -> Mapping[str, Any]:
        """Of the latest update, for its record: 0-dim tensors, by the names of metrics.jsonl."""


class Prepared(Generic[M]):
    """A module made parallel, and the operations whose meaning depends on how. This base is one process.

    Attributes:
        module: what the user calls; may be a wrapper.
        forward_is_collective: every rank must call the module equally often.
        form: of its parameters.
        data: which share of every global batch this rank works on, and over which ranks gradients are averaged.
        trains: "together", micro-batch by micro-batch; "scheduled": `forward_backward_window` takes those of an update at once,
            in an order of its own; "alone": each rank by itself, and they meet now and then.
        place: of this rank among those that have the same samples.
        batches: what becomes of those that the ranks are given.
        extras: what a checkpoint keeps besides `state`.
        guards: watch that the ranks do the same with the module, and know what torch's errors mean.
        listeners: what parts of the module want told of each update.
    """

    forward_is_collective = False
    form = Form()
    trains: Literal["together", "scheduled", "alone"] = "together"
    place = Place()
    _order_is_fixed = False  # `fix_order` was called
    _divides_optimizer = False  # `optimizer` divides what it makes over the ranks, so it must be called

    def __init__(self, module: M, averaged: Sequence[Axis] = ()) -> None:
        self.module = module
        self.data = DataAxes.of(module, averaged, is_divided=bool(averaged) or self.forward_is_collective)
        self.batches, self.extras = Batches(), Extras()
        self.guards: list[Guard] = []
        self.listeners: list[Listener] = []
        self._others: list[nn.Parameter] = []  # what the optimizer trains besides the module, as a learned weight of a loss
        self._loose: list[nn.Parameter] = []  # whose gradients nothing else reduces
        self._frozen: list[nn.Parameter] = []  # nor theirs, if they are unfrozen
        self._joined, self._reduces = Joined(module.parameters() if averaged else ()), True
        self._after_step: list[Callable[[], None]] = []
        knows_its_data(self)

    @staticmethod
    def of(module: nn.Module, world: World) -> Prepared[Any]:
        """Recognise what the user did to a module by hand: nothing, a wrapper, or `fully_shard`. The kinds are in `names`."""
        module = without_compile(module)
        kind = kind_of(module)
        if kind is not None:
            made: Prepared[Any] = kind.prepared(module, world)
            return made
        for inner in module.modules():  # networks of an nn.ModuleDict: a wrapper's end is seen to when it is recognised
            if (wrapper := wrapper_of(inner)) is not None:
                wrapper.prepared(inner, world)
        return Prepared(module)

    def _adopt(self) -> None:
        """Take up a module that the user has made parallel by hand, before it trains. Collective."""

    @property
    def unwrapped(self) -> nn.Module:
        """The module as its author wrote it, without the wrapper."""
        return unwrapped(self.module)

    # --- names and state

    def named_parameters(self, *, every_name: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """By the names that the module's author gave them; of a tied one the first, or every one."""
        return plain_names(self.module, every_name=every_name)

    def state(self) -> ModuleState:
        """The module's parameters and buffers by name, sharded as they are: `state_dict()` and `load_state_dict(...)`."""
        reshard(self.module)
        return module_state(self.module)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint says of the module, and another run compares: its class, how it is parallel, over which ranks."""
        kind = kind_of(self.module)
        name = kind.name if kind is not None else None
        return {"module": type(self.unwrapped).__name__, "layout": name, "mesh": mesh_of(self.module)}

    def gathered(self) -> AbstractContextManager[Any]:
        """Context in which `named_parameters` gives all parameters in their own shape, split or not. Collective."""
        return NO_CONTEXT

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient that the optimizer would use, on every rank. Collective."""
        return parameter.grad

    # --- batches

    def forward(self, batch: B, forward: Callable[[B], R]) -> R:
        """`forward(batch)`, to evaluate or to predict; the results are given to all ranks that have the batch."""
        return forward(batch)

    # --- training

    def optimizer(self, make: Callable[[M], O]) -> O:
        """Call `make(module)`: only now do the parameters have the form that they keep."""
        return make(self.module)

    def add_extra_params(self, others: list[nn.Parameter]) -> None:
        """Before training: what the optimizer has besides the module. Its gradients are averaged over the ranks, too. Collective.
        Raises UsageError if these parameters, or those that the module has got since, are not the same on all ranks.
        """
        self._others = others
        if groups := self.data.groups:
            check_equal(others, groups, "the optimizer has parameters outside the module")
            check_equal(self._joined.trained(self.module), groups, "the module has got parameters")
        self._loose = [*self._left_alone(), *others] if groups else []

    def _left_alone(self) -> list[nn.Parameter]:
        """Trained parameters of the module whose gradients the layout does not reduce."""
        return self._joined.trained(self.module)

    def _check_gradients(self) -> None:
        """Once, when the gradients of a first update are reduced. Collective. Raises UsageError for what would train wrongly."""

    def _reduce_unfrozen(self) -> None:
        """What is frozen now is not in the layout's buckets: once it is unfrozen, its gradients are averaged apart."""
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """A micro-batch begins. Context of its forward and backward: no gradient traffic before the window's last."""
        self._reduces = last
        return NO_CONTEXT

    def discard_window(self) -> None:
        """The micro-batches since the last update are given up; the optimizer's gradients are cleared by the caller."""
        for listener in self.listeners:
            listener.discard()

    def before_backward(self, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> torch.Tensor:
        """Within `accumulate`'s context, before `backward` of the loss that this gives."""
        return loss

    def after_backward(self, loss: torch.Tensor) -> None:
        """After it, of the same loss."""
        if self._loose or self._frozen:
            self._average_loose()

    def forward_backward_window(
        self,
        micro_batches: Sequence[MicroBatch[Any]],
        forward: Callable[[MicroBatch[Any]], tuple[torch.Tensor, Any]],
        backward: Callable[[torch.Tensor, MicroBatch[Any]], None],
        *,
        outputs: bool = True,
    ) -> list[tuple[torch.Tensor, Any]]:
        """All micro-batches of an update, where they are scheduled: `forward` and `backward` are called once for each, in any
        order, and gradients are reduced when this returns. A loss that other ranks have computed requires no gradient: `backward`
        counts it. Gives losses and outputs in the order of the micro-batches; without `outputs`, nobody looks at those.
        """
        raise NotImplementedError(f'{type(self).__name__}.trains is "scheduled", but it has no forward_backward_window.')

    def after_step(self, wants_stop: bool) -> bool:
        """After an update of the parameters by the optimizer, on every rank; not after one that was skipped.

        Args:
            wants_stop: this rank has been asked to stop.
        Returns:
            whether a rank has, where ranks tell each other here: workers that have just met. Elsewhere they did in the update.
        """
        for follow in self._after_step:
            follow()
        return False

    def end_training(self) -> None:
        """Training is over, not only interrupted: from now on all ranks have one model, its buffers included. Collective."""

    def _follow_step(self, follow: Callable[[], None]) -> None:
        """Have something done after each update."""
        self._after_step.append(follow)

    def _average_loose(self) -> None:
        """After a backward pass. Collective after a window's last."""
        if self._reduces and (alone := [*self._loose, *(p for p in self._frozen if p.requires_grad)]):
            average_(alone, self.data.groups, in_order=self._order_is_fixed)

    def fix_order(self) -> None:
        """From now on, add gradients and norms over the ranks in one order (`fixed_order`); UsageError if there is none."""
        self._order_is_fixed = True

    def parameters_written(self) -> None:
        """After writing into parameters otherwise than by a step: forget what was gathered; UsageError if that cannot be."""

    def before_evaluation(self) -> bool:
        """The ranks are about to evaluate: they do so with the same buffers. Collective.

        Returns:
            whether `forward_is_collective` in eval mode and without gradients, too.
        """
        return self.forward_is_collective

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that the norm of the whole model's gradient is at most `max_norm`. Collective over the ranks
        that hold different parameters.

        Args:
            max_norm: > 0, in loss units per unit of weight, as gradients of the global batch's mean are.
            norm_type: 2 is the Euclidean norm; inf the largest absolute value.
        Returns:
            The norm before clipping, a 0-dim tensor, the same number on every rank.
        Source: Pascanu et al. 2013, section 3.2, as `torch.nn.utils.clip_grad_norm_` does it.
        """
        if self._order_is_fixed:
            return clip_in_order_(self.module.parameters(), max_norm, norm_type)
        return clip.clip_by_norm_(self.module.parameters(), max_norm, norm_type, beside=self.place.stages)


class WrapperPrepared(Prepared[M]):
    """A module inside a wrapper that has `module` and `no_sync`: DistributedDataParallel and the older FSDP."""

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        self._reduces = last
        return NO_CONTEXT if last else self.module.no_sync()  # type: ignore[operator]
