"""Training over slow networks: each rank is a worker that trains by itself, and the workers meet every so many updates.

    LocalSGDStrategy(every=16)     they take the average of their parameters (Stich 2018, arXiv 1805.09767)
    DiLoCoStrategy(every=500)      an outer optimizer takes the way from where they last met to that average for a gradient
                                   (Douillard et al. 2023, arXiv 2311.08105)

Between two meetings nothing travels, no message of the loop's either: a stop that one rank asks for is agreed on when they next
meet. The numbers are others than under "ddp", except for plain SGD with `every=1`.

An average weighs each worker by what it has trained on since the last meeting (rows or tokens, as `unit.weight` says), so that a
worker with fewer samples in a short tail counts less, and one with padding alone counts nothing; with equal shares it is the
papers' plain mean. Buffers of floating-point numbers are averaged alike.

What is evaluated, predicted with, saved as the model's parameters and exported is what a meeting at that moment would give, the
same on all ranks: it is computed aside, and training goes on as if it had not been. A checkpoint also has what each worker has
of its own, so that a run which is killed and resumed at any step, with as many ranks, ends with the same bits. With another
number of ranks, or under another layout, training goes on from that average, with rank 0's optimizer state.

Communication: when workers meet, one all-reduce of the trained parameters and of the buffers, and before it one of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from echelon.common.errors import LayoutError, OptimizerError, require
from echelon.common.numbers import whole
from echelon.parallel.axes import Share
from echelon.parallel.ddp.worker import OuterOptimizer, Worker, WorkerOptimizerState, WorkerState
from echelon.parallel.meta.materialize import materialize
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.prepared import NO_CONTEXT, Extras, Prepared
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.registry import Kind, register
from echelon.parallel.strategy import Strategy
from echelon.parallel.tensor.tensor import equalize
from echelon.world import agree
from echelon.world.init import World, ensure_group

__all__ = ["DiLoCoStrategy", "LocalSGDStrategy", "WorkerPrepared"]

O = TypeVar("O")  # noqa: E741


class _Own(Extras):
    """What each worker has of its own."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def state_dict(self) -> dict[str, Any]:
        return {"worker": self._worker.own_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if "worker" in state_dict:
            self._worker.load_own_state(state_dict["worker"])


class WorkerPrepared(Prepared[Worker]):
    """A module that each rank trains by itself, between two meetings."""

    trains = "alone"

    def __init__(self, module: Worker, world: World) -> None:
        super().__init__(module)
        self._share, self.extras = Share(world.rank, world.size), _Own(module)

    @property
    def data_rank_and_size(self) -> tuple[int, int]:
        return self.dp_rank, self.dp_size

    def optimizer(self, make: Callable[[Worker], O]) -> O:
        made = make(self.module)
        self.module.optimizer = made[0] if isinstance(made, tuple) and made else made  # type: ignore[assignment]
        return made

    def trains_also(self, others: list[nn.Parameter]) -> None:
        if others:
            raise OptimizerError(
                f"the optimizer must hold the module's parameters only under {self.module.layout!r}, got {len(others)} others, "
                "which would not be averaged. Make them part of the module."
            )
        super().trains_also(others)

    def accumulate(self, last: bool) -> Any:
        self.module.show_own()
        return NO_CONTEXT

    def before_backward(self, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> torch.Tensor:
        self.module.count(micro_batch.weight)
        return super().before_backward(loss, micro_batch)

    def discard_window(self) -> None:
        self.module.discard()

    def after_step(self, wants_stop: bool) -> bool:
        super().after_step(wants_stop)
        self.module.stepped()
        return self.module.have_met and agree.any_rank(wants_stop)

    def end_training(self) -> None:
        self.module.meet()

    def before_evaluation(self) -> None:
        self.module.show_common()

    def fix_order(self) -> None:
        raise OptimizerError(
            f"bit-equal training is the same on any number of ranks, which {self.module.layout!r} is not. Use ddp."
        )

    def parameters_written(self) -> None:
        raise OptimizerError(
            f"ema must be None under {self.module.layout!r}: each worker would average weights of its own. The workers' "
            "average is what is evaluated and saved."
        )

    def describe(self) -> dict[str, Any]:
        return {"module": type(self.unwrapped).__name__, "layout": self.module.layout, "mesh": {}}


register(
    Kind(
        "local_sgd",
        lambda module: isinstance(module, Worker),
        WorkerPrepared,
        inner="module",
        unknown_to_torch=True,
        module_state=WorkerState,
        optimizer_state=WorkerOptimizerState,
    )
)


def _prepare(
    module: nn.Module, world: World, recipe: Recipe, layout: str, every: int, outer: OuterOptimizer | None
) -> Prepared[Any]:
    if recipe.precision is not None and recipe.precision.dtype is torch.float16:
        raise OptimizerError(
            f"precision must not be 'fp16' under {layout!r}, whose workers would leave out other updates each. Use 'bf16'."
        )
    if world.size > 1:
        ensure_group(world.device)
    module = materialize(module, world.device).to(world.device)
    equalize(module, world, from_rank0=True)
    return WorkerPrepared(Worker(recipe.compile(recipe.checkpoint_activations(module)), layout, every, outer), world)


@dataclass(frozen=True, repr=False)
class LocalSGDStrategy(Strategy):
    """Each rank trains by itself; every so many updates all take the average of their parameters. For slow networks.

    Args:
        every: updates between two averages. 16 is where Lin et al. 2018 (arXiv 1808.07217) still see the accuracy of every
            update's; 1 with plain SGD gives the numbers of "ddp".

    Gradients are clipped by each worker, and the loss and throughput in metrics.jsonl are those of rank 0's worker. The workers
    meet once more when training ends. Optimizer state is each worker's own.
    """

    name = "local_sgd"

    every: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "every", whole("every", self.every, at_least=1, kind=LayoutError))

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        return _prepare(module, world, recipe, self.name, self.every, None)


def _nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True, repr=False)
class DiLoCoStrategy(Strategy):
    """As LocalSGDStrategy, with an outer optimizer between the averages. For hundreds of updates without a message.

    Args:
        every: updates between two meetings; 500 as in the paper.
        outer_optimizer: makes the outer optimizer from a list of parameters, the same on all ranks; by default SGD with
            lr 0.7 and Nesterov momentum of 0.9, as in the paper. `lambda p: torch.optim.SGD(p, lr=1.0)` is local SGD.

    A rank holds the parameters of the last meeting and the outer optimizer's state besides. The rest is as in LocalSGDStrategy.
    """

    name = "diloco"

    every: int = 500
    outer_optimizer: OuterOptimizer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "every", whole("every", self.every, at_least=1, kind=LayoutError))
        made = self.outer_optimizer
        require(
            made is None or callable(made),
            "outer_optimizer",
            "a function of a list of parameters, or None",
            made,
            kind=LayoutError,
        )

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        return _prepare(module, world, recipe, self.name, self.every, self.outer_optimizer or _nesterov)
