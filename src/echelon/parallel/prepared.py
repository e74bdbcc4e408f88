"""The loop's interface to a parallel module: every operation that depends on the layout.

The loop never asks which layout it has; it calls `Prepared` only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.axes import Axis, DataAxes, mesh_of
from echelon.parallel.experts.loads import Routers
from echelon.parallel.gradients import clip
from echelon.parallel.gradients.fixed_order import clip_in_order_
from echelon.parallel.gradients.unreduced_params import Joined, average_, check_equal
from echelon.parallel.guards.guard import Guard
from echelon.parallel.names import kind_of, plain_names, unwrapped, without_compile, wrapper_of
from echelon.parallel.over_ranks import knows_its_data
from echelon.parallel.shards import is_split, reshard
from echelon.parallel.state.state import ModuleState, module_state
from echelon.world.init import World

__all__ = [
    "NO_CONTEXT",
    "Batches",
    "Extras",
    "Form",
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


# Not frozen: each step makes one, and a frozen dataclass takes four times as long to construct.
@dataclass(slots=True)
class MicroBatch(Generic[T]):
    """The input of one forward and one backward pass.

    Args:
        data: a batch as the loader gave it, on the device; or a piece of one.
        weight: its weight in the mean over the global batch: a number, or a 0-dim tensor on the device.
        is_last: it is the last of its window; the update follows.
        is_padding: it stands in for a batch without samples.
        samples: how many samples the loader put into it; None if the loader does not say.
    """

    data: T
    weight: Any
    is_last: bool
    is_padding: bool = False
    samples: int | None = None


NO_CONTEXT: AbstractContextManager[Any] = contextlib.nullcontext()  # shared: making one takes longer than entering it


def combined(*contexts: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """A context that enters the given ones in order; `NO_CONTEXT` if all of them are `NO_CONTEXT`."""
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
    """How the layout changed the module's parameters.

    Args:
        kind: "own": the parameters that the module had before. "others": the layout has replaced them. "flat": the new ones are
            parts of flat tensors, so no gradient of a single parameter can be seen whole.
        gathered_in: dtype in which parameters are all-gathered, if it differs from theirs.
    """

    kind: Literal["own", "others", "flat"] = "own"
    gathered_in: torch.dtype | None = None


@dataclass(frozen=True)
class Place:
    """A rank's place among the ranks that have the same samples.

    Args:
        part, stage: (index, count) of the part of each sample that it computes, and of the pipeline stage that it holds.
        stages: groups of ranks that hold entirely different parameters, such as pipeline stages. Norms are summed over them.
        rng_differs: a forward pass on this rank draws other random numbers than one process would.
    """

    part: tuple[int, int] = (0, 1)
    stage: tuple[int, int] = (0, 1)
    stages: Sequence[dist.ProcessGroup | None] = ()
    rng_differs: bool = False


class Batches:
    """How a layout splits the batches of a rank. This base leaves them whole.

    Attributes:
        share: fraction of the batch's weight that its latest part has. Used when weights count rows, since every part holds all
            rows.
        doubts: weights and losses of parts have not been compared with those of the whole batch yet.
        dry_run: the results of the current pass are thrown away: a pipeline finds out what its stages send, or parts are checked.
        look: called with the first batch.
    """

    share: float | torch.Tensor = 1.0
    doubts = False
    dry_run = False
    look: Callable[[Any], None] | None = None

    def part_of(self, batch: Any) -> Any:
        """This rank's part of a batch whose samples other ranks share, such as its part of each sequence."""
        if self.look is not None:
            look, self.look = self.look, None
            look(batch)
        return batch

    def whole_of(self, outputs: Any) -> Any:
        """The outputs for the whole latest batch given to `part_of`, gathered from those for its parts. Collective."""
        return outputs

    def check_parts(
        self, batch: Any, weigh: Callable[[Any], Any], compute: Callable[[Any], Any], dtype: torch.dtype | None
    ) -> None:
        """While `doubts`: check on the first batch that weights and losses of its parts add up to those of the whole. Collective.

        Args:
            weigh, compute: weight and loss of a batch or of its part.
            dtype: in which the loss is computed, if it differs from the parameters' dtype.
        Raises:
            UsageError: they do not add up.
        """

    def check_loss(self, loss: torch.Tensor, *, by_share: bool) -> None:
        """As `check_parts`, for code that cannot be called again: checks its first loss, before the backward pass.

        Args:
            by_share: the parts weigh their `share` of the batch, not what the code has said.
        """


class Extras:
    """What a bit-equal resume on the same number of ranks needs besides the state. Per rank. This base needs nothing."""

    def keep(self) -> None:
        """Start to record what `state_dict` returns. Called once, in a run that saves."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, perhaps under another layout; absent entries stay as they are. Collective."""


class Prepared(Generic[M]):
    """A parallel module and the operations that depend on its layout. This base is for one process.

    Attributes:
        module: the module that the user calls; may be a wrapper.
        forward_is_collective: every rank must call the module equally often.
        form: how the layout changed the parameters.
        data: which share of every global batch this rank works on, and over which ranks gradients are averaged.
        trains: "together": all ranks, micro-batch by micro-batch. "scheduled": `forward_backward_window` runs an update's
            micro-batches in an order of its own. "alone": each rank trains by itself, and the ranks synchronize now and then.
        place: this rank's place among the ranks that have the same samples.
        batches: how the layout splits the rank's batches.
        extras: what a checkpoint keeps besides `state`.
        guards: check that all ranks do the same with the module, and explain torch's errors.
        listeners: the routers of the module, if it has experts: they hear of each update, also on a single rank.
    """

    forward_is_collective = False
    form = Form()
    trains: Literal["together", "scheduled", "alone"] = "together"
    place = Place()
    _order_is_fixed = False  # `fix_order` was called
    _divides_optimizer = False  # `optimizer` partitions the optimizer over the ranks, so it must be called

    def __init__(self, module: M, averaged: Sequence[Axis] = ()) -> None:
        self.module = module
        self.data = DataAxes.of(module, averaged, is_divided=bool(averaged) or self.forward_is_collective)
        self.batches, self.extras = Batches(), Extras()
        self.guards: list[Guard] = []
        self.listeners: list[Routers] = []
        self._others: list[nn.Parameter] = []  # parameters of the optimizer outside the module, such as a learned loss weight
        self._loose: list[nn.Parameter] = []  # parameters whose gradients nothing else reduces
        self._frozen: list[nn.Parameter] = []  # frozen now; nothing else reduces their gradients once they are unfrozen
        self._joined, self._reduces = Joined(module.parameters() if averaged else ()), True
        self._after_step: list[Callable[[], None]] = []
        knows_its_data(self)

    @staticmethod
    def of(module: nn.Module, world: World) -> Prepared[Any]:
        """Recognise how the user made a module parallel: not at all, by a wrapper, or by `fully_shard`. `names` has the kinds."""
        module = without_compile(module)
        kind = kind_of(module)
        if kind is not None:
            made: Prepared[Any] = kind.prepared(module, world)
            return made
        for inner in module.modules():  # networks of an nn.ModuleDict: recognising a wrapper also arranges for its teardown
            if (wrapper := wrapper_of(inner)) is not None:
                wrapper.prepared(inner, world)
        return Prepared(module)

    def _adopt(self) -> None:
        """Adopt a module that the user has made parallel by hand, before it trains. Collective."""

    @property
    def unwrapped(self) -> nn.Module:
        """The module as its author wrote it, without the wrapper."""
        return unwrapped(self.module)

    # --- names and state

    def named_parameters(self, *, every_name: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by the names that the module's author gave; a tied parameter by its first name, or by every name."""
        return plain_names(self.module, every_name=every_name)

    def state(self) -> ModuleState:
        """The module's parameters and buffers by name, sharded as in the module: `state_dict()` and `load_state_dict(...)`."""
        reshard(self.module)
        return module_state(self.module)

    def describe(self) -> dict[str, Any]:
        """The module's class, layout and mesh, as a checkpoint records them for a later run to compare."""
        kind = kind_of(self.module)
        name = kind.name if kind is not None else None
        return {"module": type(self.unwrapped).__name__, "layout": name, "mesh": mesh_of(self.module)}

    def gathered(self) -> AbstractContextManager[Any]:
        """Context in which `named_parameters` gives all parameters in their original shapes. Collective."""
        return NO_CONTEXT

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient that the optimizer would use, on every rank. Collective."""
        return parameter.grad

    # --- batches

    def forward(self, batch: B, forward: Callable[[B], R]) -> R:
        """`forward(batch)` for evaluation or prediction. All ranks that have the batch get the results."""
        return forward(batch)

    # --- training

    def optimizer(self, make: Callable[[M], O]) -> O:
        """Call `make(module)`, now that the parameters have their final form."""
        return make(self.module)

    def add_extra_params(self, others: list[nn.Parameter]) -> None:
        """Tell, before training, which parameters the optimizer has besides the module's, to average their gradients. Collective.
        Raises UsageError if they, or parameters that the module got since it was wrapped, are not the same on all ranks; or if
        ranks train by themselves, or stage by stage, so that nothing would average them.
        """
        if others and self.trains != "together":
            raise LayoutError(
                f"the optimizer must hold only the module's parameters under {self.describe()['layout']!r}, got {len(others)} "
                "others, whose gradients would not be averaged. Make them part of the module."
            )
        self._others = others
        if groups := self.data.groups:
            check_equal(others, groups, "the optimizer has parameters outside the module")
            check_equal(joined := self._joined.trained(self.module), groups, "the module has got parameters")
            self._loose = [*joined, *others]

    def _check_gradients(self) -> None:
        """Check the first update's reduced gradients, once. Collective. Raises UsageError if the model would train wrongly."""

    def _reduce_unfrozen(self) -> None:
        """Note the frozen parameters, which are in none of the layout's buckets: if unfrozen, they are averaged separately."""
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch's forward and backward pass. Gradients are reduced only in the window's last."""
        self._reduces = last
        return NO_CONTEXT

    def discard_window(self) -> None:
        """Drop the micro-batches since the last update. The caller clears the optimizer's gradients."""
        for listener in self.listeners:
            listener.discard()

    def before_backward(self, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> torch.Tensor:
        """Return the loss to call `backward` on. Called before it, within `accumulate`'s context."""
        return loss

    def after_backward(self, loss: torch.Tensor) -> None:
        """Called after `backward` of the loss that `before_backward` returned."""
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
        """Run all micro-batches of an update under a pipeline schedule. Calls `forward` and `backward` once per micro-batch, in
        the schedule's order; gradients are reduced when it returns. A loss computed on another rank requires no gradient, but
        `backward` gets it, to count it. Returns losses and outputs in micro-batch order; `outputs=False` if outputs are not used.
        """
        raise NotImplementedError(f'{type(self).__name__}.trains is "scheduled", but it has no forward_backward_window.')

    def after_step(self, wants_stop: bool) -> bool:
        """Called on every rank after the optimizer's step; not after a skipped update.

        Args:
            wants_stop: this rank has been asked to stop.
        Returns:
            whether any rank has, if workers of local SGD have just synchronized. Other layouts exchange it during the update and
            return False.
        """
        for follow in self._after_step:
            follow()
        return False

    def end_training(self) -> None:
        """Finish training (not on an interruption): all ranks then have one model, its buffers included. Collective."""

    def _follow_step(self, follow: Callable[[], None]) -> None:
        """Call `follow` after each update."""
        self._after_step.append(follow)

    def _average_loose(self) -> None:
        """Average gradients that nothing else reduces, after a window's last backward pass. Collective then."""
        if self._reduces and (alone := [*self._loose, *(p for p in self._frozen if p.requires_grad)]):
            average_(alone, self.data.groups, in_order=self._order_is_fixed)

    def fix_order(self) -> None:
        """From now on, sum gradients and norms over the ranks in one order (`fixed_order`). UsageError if the layout cannot."""
        meshes = [p.device_mesh for p in self.module.parameters() if is_split(p)]  # type: ignore[attr-defined]
        has_one_axis = len(self.data.axes) <= 1 and all(mesh.ndim == 1 and self.data.axes for mesh in meshes)
        if self.trains != "together" or self.form.kind == "flat" or self.place.part[1] > 1 or not has_one_axis:
            raise LayoutError(
                "bit-equal training must have a layout with one axis, whose ranks train together on samples of their own: 'ddp', "
                f"'fsdp', 'zero1' or 'zero2', got {self.describe()['layout']!r} over {[axis.name for axis in self.data.axes]}."
            )
        self._order_is_fixed = True

    def parameters_written(self) -> None:
        """Forget gathered copies, after parameters were written other than by a step. UsageError if the layout cannot."""

    def before_evaluation(self) -> bool:
        """Give all ranks the same buffers, before an evaluation. Collective.

        Returns:
            whether `forward_is_collective` also in eval mode without gradients.
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
