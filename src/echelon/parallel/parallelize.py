"""The one order in which a module is changed: recompute, then compile, then shard.

Recompute comes first so that the compiler sees it; sharding comes last so that what is gathered is the whole compiled
block. A strategy receives the first two as a `Recipe` and applies it where its own work allows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.contracts.errors import UsageError
from echelon.contracts.overrides import overrides
from echelon.parallel.activation import ActivationCheckpointParams, recompute
from echelon.parallel.buffers import Buffers
from echelon.parallel.ddp import DDPStrategy
from echelon.parallel.fsdp import FSDPStrategy
from echelon.parallel.fsdp1 import FSDP1Prepared
from echelon.parallel.fsdp2 import FSDP2Strategy
from echelon.parallel.replaced import note
from echelon.parallel.sharding import FSDPPrepared
from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy, resolve
from echelon.parallel.sync_batchnorm import on_host
from echelon.parallel.zero import ZeROPrepared
from echelon.world.init import World

__all__ = [
    "Recipe",
    "TorchCompileParams",
    "parallelize",
    "prepare_ddp",
    "prepare_fsdp",
    "prepare_fsdp2",
    "prepare_module",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TorchCompileParams:
    """`torch.compile`'s options. The module is compiled in place, so its parameter names stay.

    Args:
        recursive_module_types: compile the submodules of these classes, or class names, one by one instead of the whole;
            faster to compile when a block is repeated.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    recursive_module_types: Collection[str | type[nn.Module]] = field(default_factory=tuple)


@dataclass(frozen=True)
class Recipe:
    """What happens to a module besides being made parallel."""

    activation_checkpoint: ActivationCheckpointParams | None = None
    torch_compile: TorchCompileParams | None = None

    def recompute(self, module: nn.Module) -> nn.Module:
        compiled = self.torch_compile
        if self.activation_checkpoint is not None and compiled is not None and compiled.backend == "eager":
            raise UsageError(
                "torch.compile's backend 'eager' draws other dropout masks when it recomputes activations (torch 2.13), and the "
                "gradients are wrong. Use backend='aot_eager' or 'inductor', or no activation_checkpoint_params."
            )
        return recompute(module, self.activation_checkpoint)

    def compile(self, module: nn.Module) -> nn.Module:
        params = self.torch_compile
        if params is None or params.disable:
            return module
        kinds = params.recursive_module_types
        names = {k for k in kinds if isinstance(k, str)}
        classes = tuple(k for k in kinds if isinstance(k, type))
        targets = [m for m in module.modules() if type(m).__name__ in names or isinstance(m, classes)] if kinds else [module]
        for target in targets:
            target.compile(
                fullgraph=params.fullgraph,
                dynamic=params.dynamic,
                backend=params.backend,
                mode=params.mode,
                options=params.options,
            )
        return module


def parallelize(
    module: nn.Module,
    strategy: Strategy | str | None,
    device: torch.device,
    recipe: Recipe | None = None,
    *,
    overridden: Strategy | str | Callable[[Strategy | None], Strategy] | None = None,
) -> Prepared[Any]:
    """Make a module parallel over the ranks of the default group.

    Args:
        module: as built, or as the user wrapped it; with strategy None a wrapped module is taken as it is.
        strategy: a Strategy, its name, or None.
        device: where this rank computes.
        overridden: takes the place of `strategy` for a module that is not wrapped already; a function makes it from `strategy`.
    Raises:
        UsageError: an unknown strategy; a strategy for a module that is wrapped already.
    """
    chosen, world, recipe = resolve(strategy), World.current(device), recipe or Recipe()
    given = Prepared.of(module, world)
    if type(given) is Prepared:
        for name, inner in module.named_modules():
            if type(Prepared.of(inner, world)) is not Prepared:
                raise UsageError(
                    f"{type(module).__name__}.{name} is a {type(inner).__name__}, but the whole module is not: gradients of the "
                    "rest would not be reduced. Wrap the whole module, or pass it plain with a strategy."
                )
        if overridden is not None:
            chosen = overridden(chosen) if callable(overridden) else resolve(overridden)
        if device.type == "cpu":
            on_host(module)
        before = list(module.named_parameters(remove_duplicate=False))
        prepared = (chosen or NOOPStrategy()).prepare(module, world, recipe)
        note(before, dict(prepared.plain.named_parameters(remove_duplicate=False)))
        return prepared
    if chosen is not None and not isinstance(chosen, NOOPStrategy):
        raise UsageError(
            f"strategy {chosen.name!r} for a {type(module).__name__} that is made parallel already. "
            "Pass the plain module, or no strategy."
        )
    recipe.compile(recipe.recompute(given.plain))
    if isinstance(given, (FSDPPrepared, FSDP1Prepared)):
        Buffers.keep_equal(given.module, given.data_groups, begin=True)
    return given


def prepare_module(
    module: nn.Module,
    device: torch.device,
    *,
    strategy: Strategy | str | None = None,
    torch_compile_params: TorchCompileParams | None = None,
    activation_checkpoint_params: ActivationCheckpointParams | None = None,
) -> nn.Module:
    """The module moved to `device` and made parallel, for those who write their own unit."""
    decided = overrides()
    recipe = Recipe(activation_checkpoint_params, torch_compile_params if decided.compile is not False else None)
    prepared = parallelize(module, strategy, device, recipe, overridden=decided.strategy)
    if isinstance(prepared, ZeROPrepared):
        logger.warning(
            "prepare_module never sees the optimizer that strategy 'zero1' divides: call echelon.parallel.partition.Partition("
            "optimizer) once you have built it, or this is strategy 'ddp'"
        )
    made: nn.Module = prepared.module
    return made


def prepare_ddp(module: nn.Module, device: torch.device, strategy: DDPStrategy | None = None) -> DistributedDataParallel:
    """The module on `device` in DistributedDataParallel.

    Raises:
        UsageError: nothing in it is to be trained, so there is nothing to wrap.
    """
    prepared = parallelize(module, strategy or DDPStrategy(), device).module
    if not isinstance(prepared, DistributedDataParallel):
        raise UsageError(
            f"prepare_ddp: no parameter of {type(module).__name__} requires a gradient, so there is nothing to reduce. "
            "Use the module as it is, or unfreeze something first."
        )
    return prepared


def prepare_fsdp(module: nn.Module, device: torch.device, strategy: FSDPStrategy | None = None) -> nn.Module:
    """The module on `device`, sharded in place by `fully_shard`; its parameters are DTensors."""
    prepared: nn.Module = parallelize(module, strategy or FSDPStrategy(), device).module
    return prepared


def prepare_fsdp2(module: nn.Module, device: torch.device, strategy: FSDP2Strategy | None = None) -> nn.Module:
    """As `prepare_fsdp`, with `fully_shard`'s own options."""
    prepared: nn.Module = parallelize(module, strategy or FSDP2Strategy(), device).module
    return prepared
