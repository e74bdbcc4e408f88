"""Training over slow networks: each rank is a worker that trains by itself. Every N updates the workers meet (synchronize).

    LocalSGDStrategy(every=16)     workers average their parameters (Stich 2018, arXiv 1805.09767)
    DiLoCoStrategy(every=500)      an outer optimizer uses the change from the last meeting to that average as its gradient
                                   (Douillard et al. 2023, arXiv 2311.08105)

Between meetings ranks send nothing, not even messages of the loop: if one rank is asked to stop, the ranks agree on it at the
next meeting. The numbers differ from those of "ddp", except for plain SGD with `every=1`.

The average weighs each worker by the rows or tokens (see `unit.weight`) that it has trained on since the last meeting. So a
worker with fewer samples at the end of the data counts less, and a worker with only padding does not count; with equal shares it
is the papers' plain mean. Floating-point buffers are averaged likewise.

Evaluation, prediction, export and the saved model parameters use the values that a meeting at that moment would give, equal on
all ranks. They are computed separately and do not affect training. A checkpoint also has each worker's own state, so a run that
is killed and resumed at any step with the same number of ranks ends with the same bits. With another number of ranks, or under
another layout, training continues from that average, with rank 0's optimizer state.

Communication of a meeting: an all-reduce of one number, then one of the trained parameters and buffers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import CheckpointCorruptError, LayoutError, OptimizerError, require
from echelon.common.numbers import whole
from echelon.parallel.axes import DataAxes
from echelon.parallel.fsdp.move_and_sync import equalize
from echelon.parallel.gradients.unreduced_params import in_buckets
from echelon.parallel.meta.materialize import materialize
from echelon.parallel.names import Kind, plain_buffers, plain_names, register
from echelon.parallel.prepared import NO_CONTEXT, Extras, MicroBatch, Prepared
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.state.optimizer_state import OptimizerState
from echelon.parallel.state.state import ModuleState
from echelon.parallel.strategy import Strategy
from echelon.world import agree
from echelon.world.init import World, ensure_group

__all__ = ["DiLoCoStrategy", "LocalSGDStrategy", "WorkerPrepared"]

O = TypeVar("O")  # noqa: E741


# A worker that trains by itself, and the meeting of workers.

OuterOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Worker(nn.Module):
    """A wrapper whose forward is its module's.

    Args:
        module: the module, with the same values on all ranks.
        layout: the layout's name, for messages.
        every: updates between two meetings.
        outer: makes the outer optimizer; None uses the plain average.
    Attributes:
        optimizer: the worker's own.
        have_met: whether the workers have met after the latest update.
    """

    def __init__(self, module: nn.Module, layout: str, every: int, outer: OuterOptimizer | None) -> None:
        super().__init__()
        self.module, self.layout, self.every = module, layout, every
        self.optimizer: torch.optim.Optimizer | None = None
        self.have_met = False
        self._since = 0  # updates since the last meeting
        self._weight: Any = 0.0  # weight of the samples trained on since then
        self._weight_of_window: Any = 0.0
        self._own: dict[str, torch.Tensor] | None = None  # the worker's own values, while the module has the common ones
        self._make_outer, self._anchor, self._outer = outer, dict[str, nn.Parameter](), None
        if outer is not None:
            trained = {n: p for n, p in plain_names(module) if p.requires_grad}
            self._anchor = {n: nn.Parameter(p.detach().clone()) for n, p in trained.items()}
            self._outer = outer(list(self._anchor.values()))
            if not isinstance(self._outer, torch.optim.Optimizer):
                raise LayoutError(f"outer_optimizer must return a torch optimizer, got {type(self._outer).__name__}.")

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)

    # --- training

    def count(self, weight: Any) -> None:
        """Count a micro-batch of this weight."""
        self._weight_of_window = self._weight_of_window + weight

    def discard(self) -> None:
        self._weight_of_window = 0.0

    def stepped(self) -> None:
        """Called after each update. Collective when a meeting is due."""
        self._since += 1
        self._weight, self._weight_of_window = self._weight + self._weight_of_window, 0.0
        self.have_met = self._since >= self.every
        if self.have_met:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        """Give all workers the common parameters. Collective. Does nothing if there was no update since the last meeting."""
        self.show_own()
        if not self._since:
            return
        common = self._common(commits=True)
        for name, tensor in self._exchanged():
            tensor.copy_(common[name])
        self._since, self._weight = 0, 0.0

    def _exchanged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Trained parameters and floating-point or complex buffers, by name."""
        for name, parameter in plain_names(self.module):
            if parameter.requires_grad or name in self._anchor:
                yield name, parameter
        for name, buffer in plain_buffers(self.module):
            if buffer.is_floating_point() or buffer.is_complex():
                yield name, buffer

    @torch.no_grad()
    def _common(self, *, commits: bool) -> dict[str, torch.Tensor]:
        """The values that a meeting gives. Collective.

        Args:
            commits: this is a meeting; else the outer optimizer and the anchor stay as they are.
        """
        averages = _averages(dict(self._exchanged()), self._weight)
        if self._outer is None or self._make_outer is None:
            return averages
        anchor, outer = self._anchor, self._outer
        if not commits:
            anchor = {n: nn.Parameter(p.detach().clone()) for n, p in anchor.items()}
            outer = self._make_outer(list(anchor.values()))
            outer.load_state_dict(copy.deepcopy(self._outer.state_dict()))
        for name, parameter in anchor.items():
            parameter.grad = parameter.detach() - averages[name]
        outer.step()
        outer.zero_grad()
        return averages | {n: p.detach() for n, p in anchor.items()}

    # --- values for evaluation and saving

    @torch.no_grad()
    def show_common(self) -> None:
        """Give the module the values that a meeting would give, until training continues. Collective."""
        if self._own is None and self._since:
            common = self._common(commits=False)
            self._own = {}
            for name, tensor in self._exchanged():
                self._own[name] = tensor.data
                tensor.data = common[name]

    @torch.no_grad()
    def show_own(self) -> None:
        """Give the module the worker's own values again."""
        own, self._own = self._own, None
        if own is not None:
            named = self._named()
            for name, tensor in own.items():
                if name in named and named[name].shape == tensor.shape:  # else an evaluation enlarged a buffer
                    named[name].data = tensor

    def _named(self) -> dict[str, torch.Tensor]:
        return dict(plain_names(self.module)) | dict(plain_buffers(self.module))

    # --- state

    @torch.no_grad()
    def begin_here(self) -> None:
        """Treat the module's values, which were loaded, as the result of a meeting."""
        self._own, self._since, self._weight, self._weight_of_window = None, 0, 0.0, 0.0
        if self._make_outer is not None:
            named = self._named()
            for name, parameter in self._anchor.items():
                parameter.copy_(named[name])
            self._outer = self._make_outer(list(self._anchor.values()))

    def own_state(self) -> dict[str, Any]:
        """This worker's own state, as plain values and tensors."""
        values = self._own if self._own is not None else dict(self._exchanged()) if self._since else {}
        optimizer = {} if self.optimizer is None else OptimizerState({"module": self}, self.optimizer).state_dict()
        return {
            "since": self._since,
            "weight": float(self._weight),
            "values": {name: tensor.detach() for name, tensor in values.items()},
            "optimizer": optimizer,
            "anchor": {name: p.detach() for name, p in self._anchor.items()} if self._since else {},
            "outer": {} if self._outer is None else self._outer.state_dict(),
        }

    @torch.no_grad()
    def load_own_state(self, saved: Any) -> None:
        """
        Raises:
            CheckpointCorruptError: `saved` is not a state that `own_state` gives for this module.
        """
        named = self._named()
        since, weight, values, anchor = _checked(saved, named)
        for name, tensor in values.items():
            if name in named and named[name].shape != tensor.shape:
                named[name].data = tensor.to(named[name])
            elif name in named:  # else a forward pass creates this buffer
                named[name].copy_(tensor)
        for name, tensor in anchor.items():
            if name in self._anchor:
                self._anchor[name].copy_(tensor)
        self._since, self._weight = since, weight
        try:
            if self.optimizer is not None and saved["optimizer"]:
                OptimizerState({"module": self}, self.optimizer).load_state_dict(saved["optimizer"])
            if self._outer is not None and saved["outer"]:
                self._outer.load_state_dict(saved["outer"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise CheckpointCorruptError(f"the checkpoint holds an invalid state of a worker's optimizer: {error!r}.") from None


class WorkerState(ModuleState):
    """The workers' common parameters and buffers, by name. Its methods are collective."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.module)
        self._worker = worker

    def state_dict(self) -> dict[str, Any]:
        self._worker.show_common()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._worker.begin_here()


class WorkerOptimizerState(OptimizerState):
    """An optimizer's state, saved as rank 0 has it. Each worker's own state is in `Worker.own_state`."""

    @property
    def of_first_rank(self) -> list[str]:
        return [name for name, value in self.state_dict().items() if isinstance(value, torch.Tensor)]


Tensors = dict[str, torch.Tensor]


def _checked(saved: Any, named: Mapping[str, torch.Tensor]) -> tuple[int, float, Tensors, Tensors]:
    wanted = {"since": int, "weight": float, "values": dict, "optimizer": dict, "anchor": dict, "outer": dict}
    if not isinstance(saved, dict) or any(not isinstance(saved.get(name), kind) for name, kind in wanted.items()):
        raise CheckpointCorruptError("the checkpoint holds an invalid state of a worker.")
    since, weight = saved["since"], saved["weight"]
    if isinstance(since, bool) or since < 0 or not 0 <= weight < math.inf:
        raise CheckpointCorruptError(f"the checkpoint holds a worker with {weight} samples in {since} updates, which is invalid.")
    for part in ("values", "anchor"):
        for name, tensor in saved[part].items():
            living = named.get(name)
            is_buffer = part == "values" and not isinstance(living, nn.Parameter)  # passes create and enlarge buffers
            is_tensor = isinstance(tensor, torch.Tensor)
            if not is_tensor or not (is_buffer or (living is not None and tensor.shape == living.shape)):
                raise CheckpointCorruptError(f"the checkpoint holds {name!r} of a worker, which does not fit this module.")
    return since, weight, saved["values"], saved["anchor"]


def _averages(tensors: Mapping[str, torch.Tensor], weight: Any) -> dict[str, torch.Tensor]:
    """The mean over all ranks, weighted, or plain if the weights are all zero. Collective."""
    if not agree.is_joined():
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    own_weight = torch.tensor([float(weight)], dtype=torch.float64)
    total = own_weight.clone()
    dist.all_reduce(total, group=agree.control_group())
    share = float(own_weight / total) if float(total) > 0 else 1 / dist.get_world_size()
    averages: dict[str, torch.Tensor] = {}
    for names in in_buckets(tensors):
        first = tensors[names[0]]
        precise = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
        flat = torch.cat([tensors[name].detach().reshape(-1).to(precise) for name in names]).mul_(share)
        dist.all_reduce(flat)
        parts = flat.split([tensors[name].numel() for name in names])
        averages |= {n: part.view(tensors[n].shape).to(first.dtype, copy=True) for n, part in zip(names, parts, strict=True)}
    return averages


class _Own(Extras):
    """Each worker's own state."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def state_dict(self) -> dict[str, Any]:
        return {"worker": self._worker.own_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if "worker" in state_dict:
            self._worker.load_own_state(state_dict["worker"])


class WorkerPrepared(Prepared[Worker]):
    """A module that each rank trains by itself between meetings."""

    trains = "alone"

    def __init__(self, module: Worker, world: World) -> None:
        super().__init__(module)
        self.data = DataAxes(share=(world.rank, world.size), is_divided=True)
        self.data.is_replica = False
        self.extras = _Own(module)

    def optimizer(self, make: Callable[[Worker], O]) -> O:
        made = make(self.module)
        self.module.optimizer = made[0] if isinstance(made, tuple) and made else made  # type: ignore[assignment]
        return made

    def accumulate(self, last: bool) -> Any:
        self.module.show_own()
        return NO_CONTEXT

    def before_backward(self, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> torch.Tensor:
        self.module.count(micro_batch.weight)
        return super().before_backward(loss, micro_batch)

    def discard_window(self) -> None:
        super().discard_window()
        self.module.discard()

    def after_step(self, wants_stop: bool) -> bool:
        super().after_step(wants_stop)
        self.module.stepped()
        return self.module.have_met and agree.any_rank(wants_stop)

    def end_training(self) -> None:
        self.module.meet()

    def before_evaluation(self) -> bool:
        self.module.show_common()
        return False

    def parameters_written(self) -> None:
        raise OptimizerError(
            f"ema must be None under {self.module.layout!r}: each worker would average its own weights. The workers' average is "
            "evaluated and saved anyway."
        )

    def describe(self) -> dict[str, Any]:
        return {"module": type(self.unwrapped).__name__, "layout": self.module.layout, "mesh": {}}


register(
    Kind(
        "local_sgd",
        lambda module: isinstance(module, Worker),
        WorkerPrepared,
        inner="module",
        module_state=WorkerState,
        optimizer_state=WorkerOptimizerState,
    )
)


@dataclass(frozen=True, repr=False)
class LocalSGDStrategy(Strategy):
    """Each rank trains by itself; every N updates all ranks average their parameters. For slow networks.

    Args:
        every: updates between two averages. With 16, Lin et al. 2018 (arXiv 1808.07217) still see the accuracy of averaging in
            every update; 1 with plain SGD gives the numbers of "ddp".

    Each worker clips its own gradients and has its own optimizer state. The loss and throughput in metrics.jsonl are those of
    rank 0's worker. The workers average once more when training ends.
    """

    name = "local_sgd"

    every: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "every", whole("every", self.every, at_least=1, kind=LayoutError))

    @property
    def _outer(self) -> OuterOptimizer | None:
        return None

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        if recipe.precision is not None and recipe.precision.dtype is torch.float16:
            raise OptimizerError(
                f"precision must not be 'fp16' under {self.name!r}, whose workers would each skip different updates. Use 'bf16'."
            )
        if world.size > 1:
            ensure_group(world.device)
        module = materialize(module, world.device).to(world.device)
        equalize((*module.parameters(), *module.buffers()), world.device, [None] if world.size > 1 else [])
        return WorkerPrepared(Worker(recipe.applied(module), self.name, self.every, self._outer), world)


def _nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True, repr=False)
class DiLoCoStrategy(LocalSGDStrategy):
    """As LocalSGDStrategy, but an outer optimizer steps on the averages. For hundreds of updates without communication.

    Args:
        every: updates between two steps of the outer optimizer; 500 as in the paper.
        outer_optimizer: makes the outer optimizer from a list of parameters, the same on all ranks; by default SGD with
            lr 0.7 and Nesterov momentum of 0.9, as in the paper. `lambda p: torch.optim.SGD(p, lr=1.0)` is local SGD.

    Each rank also holds the parameters of the last outer step and the outer optimizer's state. The rest is as in
    LocalSGDStrategy.
    """

    name = "diloco"

    every: int = 500
    outer_optimizer: OuterOptimizer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        made = self.outer_optimizer
        require(
            made is None or callable(made),
            "outer_optimizer",
            "a function of a list of parameters, or None",
            made,
            kind=LayoutError,
        )

    @property
    def _outer(self) -> OuterOptimizer:
        return self.outer_optimizer or _nesterov
