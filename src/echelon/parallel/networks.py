"""Networks trained by several optimizers: each is made parallel by itself, and gradients are reduced per optimizer.

A backward pass may reach networks that another optimizer trains, or only some of the networks; a step may have several passes.
So DistributedDataParallel reduces nothing here. An optimizer's gradients are averaged when it steps, so gradients cleared earlier
are never sent. `fully_shard` reduces each network's gradients in every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.ddp.ddp import DDPPrepared
from echelon.parallel.fsdp.move_and_sync import equalize
from echelon.parallel.fsdp.units import hear_of_loss
from echelon.parallel.gradients.unreduced_params import average_, check_equal
from echelon.parallel.parallelize import check_module, parallelize, tell_routers
from echelon.parallel.prepared import MicroBatch, Prepared, combined
from echelon.parallel.shards import is_split, local, reshard
from echelon.parallel.state.partition import Partition
from echelon.world import agree

__all__ = ["Networks", "has_forward", "networks_of", "prepare_networks"]

O = TypeVar("O")  # noqa: E741


def has_forward(module: nn.Module) -> bool:
    """False for a module that only holds networks, such as an nn.ModuleDict."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def networks_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module's networks by name: children with parameters; of a child without a forward (list, dict) the networks in it."""
    for name, child in module.named_children():
        if not any(True for _ in child.parameters()) or isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            continue
        if has_forward(child):
            yield f"{prefix}{name}", child
        else:
            yield from networks_of(child, f"{prefix}{name}.")


class Networks(Prepared[nn.Module]):
    """One or several networks, each made parallel by itself.

    Args:
        module: the only network, or the module that holds them.
        parts: the `Prepared` of each network.
    """

    def __init__(self, module: nn.Module, parts: Sequence[Prepared[Any]]) -> None:
        first = parts[0]
        self.parts = list(parts)
        super().__init__(module, first.data.axes)
        self.data = first.data
        self._unchecked = list(parts)
        for part in parts:
            self.guards += part.guards
            part.guards = self.guards
        self.form = next((part.form for part in parts if part.form.kind != "own"), first.form)
        self._divides_optimizer = any(part._divides_optimizer for part in parts)
        tell_routers(self)

    @property
    def forward_is_collective(self) -> bool:  # type: ignore[override]
        return any(part.forward_is_collective for part in self.parts)

    def describe(self) -> dict[str, Any]:
        return {**self.parts[0].describe(), "module": type(self.unwrapped).__name__}

    def optimizer(self, make: Callable[[nn.Module], O]) -> O:
        self.parameters_written()
        return make(self.unwrapped)

    def divide(self, optimizer: torch.optim.Optimizer) -> None:
        """Partition the optimizer over the ranks, if the strategy does so. Collective."""
        if self._divides_optimizer:
            Partition(optimizer, self.data.groups[0], {p: name for name, p in self.named_parameters()})

    def add_extra_params(self, others: list[nn.Parameter]) -> None:
        for part in self.parts:
            part.add_extra_params([])
        self._others = others
        if self.data.axes:
            check_equal(others, self.data.groups, "the optimizers have parameters outside the modules")

    # --- passes

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Ignores `last`: `average_` averages an optimizer's gradients, and shards reduce theirs in every pass."""
        for part in self.parts:
            if isinstance(part, DDPPrepared):
                part.parameters_written()  # the next forward pass broadcasts rank 0's buffers
        return combined(*(part.accumulate(part.form.kind != "own") for part in self.parts))

    def before_backward(self, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> torch.Tensor:
        for part in self.parts:
            hear_of_loss(part.module, loss)
        return local(loss)

    def after_backward(self, loss: torch.Tensor) -> None:
        """Nothing: `average_` averages an optimizer's gradients."""

    def average_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of an optimizer's parameters over the ranks, in place. Collective."""
        for part in [each for each in self._unchecked if not set(parameters).isdisjoint(each.module.parameters())]:
            self._unchecked.remove(part)
            part._check_gradients()
        if whole := [p for p in parameters if p.requires_grad and not is_split(p)] if self.data.averaged_over > 1 else []:
            average_(whole, self.data.groups)

    def after_step(self, wants_stop: bool) -> bool:
        reshard(self.module)  # a forward pass without a backward pass has left whole parameters from before the step
        for part in self.parts:
            part.after_step(wants_stop)
        return False

    def parameters_written(self) -> None:
        for part in self.parts:
            part.parameters_written()

    def before_evaluation(self) -> bool:
        in_step = [part.before_evaluation() for part in self.parts]
        return any(in_step)

    def end_training(self) -> None:
        for part in self.parts:
            part.end_training()

    def fix_order(self) -> None:
        raise LayoutError("bit-equal training on any number of ranks must have one optimizer, got several. Leave it out.")


def prepare_networks(
    module: nn.Module, strategy: Any, device: torch.device, *given: Any, apart: bool = False, **options: Any
) -> Networks:
    """As `parallelize`, for several optimizers: if the module has no forward, each of its networks is made parallel by itself.

    Args:
        apart: do so even if the module has a forward.
    Raises:
        UsageError: a module without networks; networks that share parameters, if the strategy splits these; or a strategy that
            does not train micro-batch by micro-batch.
    """
    check_module(module)
    parts, seen = [], dict[nn.Parameter, str]()
    for name, network in [("", module)] if has_forward(module) and not apart else list(networks_of(module)):
        before = list(network.parameters())
        shared = next((seen[p] for p in before if p in seen), None)
        part = parallelize(network, strategy, device, *given, **options)
        _check(part)
        if shared is not None and part.form.kind != "own":
            raise LayoutError(
                f"{type(module).__name__}.{shared} and .{name} share parameters, and each is split by itself. Put them into one "
                "module whose forward calls them, or train under 'ddp'."
            )
        seen |= dict.fromkeys(before, name)
        parts.append(part)
        if not name:
            return Networks(part.module, parts)
        module.set_submodule(name, part.module)
    if not parts:
        raise LayoutError(f"the module must have networks with parameters, got a {type(module).__name__} without.")
    inside = {t for part in parts for t in (*part.module.parameters(), *part.module.buffers())}
    outside = [t for t in (*module.parameters(), *module.buffers()) if t not in inside]
    equalize(outside, device, [None] if agree.is_joined() and any(part.data.axes for part in parts) else [])
    return Networks(module, parts)


def _check(part: Prepared[Any]) -> None:
    if part.trains != "together" or part.place.part[1] > 1:
        raise LayoutError(
            "several optimizers must have a layout whose ranks train on each batch together, such as 'ddp', 'fsdp', 'zero1' or "
            "'tp=2', got pp, cp or local SGD. Use one of these layouts, or one optimizer with parameter groups."
        )
