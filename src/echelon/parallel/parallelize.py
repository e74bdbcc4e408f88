"""The one order in which a module is changed: recompute, then compile, then shard.

Recompute comes first so that the compiler sees it; sharding comes last so that what is gathered is the whole compiled
block. A strategy receives the first two as a `Recipe` and applies it where its own work allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from echelon.contracts.errors import UsageError
from echelon.contracts.overrides import overrides
from echelon.parallel.ddp import DDPStrategy
from echelon.parallel.fsdp import FSDPStrategy, blocks_to_shard
from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy, resolve
from echelon.world.init import World

__all__ = [
    "ActivationCheckpointParams",
    "Recipe",
    "TorchCompileParams",
    "parallelize",
    "prepare_ddp",
    "prepare_fsdp",
    "prepare_module",
]


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
class ActivationCheckpointParams:
    """Recompute activations in the backward pass instead of keeping them.

    Args:
        check_fn: which submodules to recompute; by default the repeated blocks of the model.
        context_fn: as in `torch.utils.checkpoint.checkpoint`, to keep what chosen operators computed.
        checkpoint_impl: accepted from TorchTNT scripts; recomputation is always the non-reentrant kind.
    """

    check_fn: Callable[[nn.Module], bool] | None = None
    context_fn: Callable[[], tuple[Any, Any]] | None = None
    checkpoint_impl: object | None = None


@dataclass(frozen=True)
class Recipe:
    """What happens to a module besides being made parallel."""

    activation_checkpoint: ActivationCheckpointParams | None = None
    torch_compile: TorchCompileParams | None = None

    def recompute(self, module: nn.Module) -> nn.Module:
        """Replace the `forward` of chosen blocks by one that recomputes. Names and classes stay, unlike with a wrapper."""
        params = self.activation_checkpoint
        if params is None:
            return module
        if params.check_fn is not None:
            chosen = [m for _, m in module.named_modules() if params.check_fn(m)]
        else:
            chosen = [m for _, m in blocks_to_shard(module)]
        if not chosen:
            raise UsageError(
                f"activation_checkpoint_params chose no submodule of {type(module).__name__}. Give a check_fn that returns "
                "True for its blocks."
            )
        options: dict[str, Any] = {"context_fn": params.context_fn} if params.context_fn is not None else {}
        for block in chosen:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
        return module

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
    overridden: Strategy | str | None = None,
) -> Prepared[Any]:
    """Make a module parallel over the ranks of the default group.

    Args:
        module: as built, or as the user wrapped it; with strategy None a wrapped module is taken as it is.
        strategy: a Strategy, its name, or None.
        device: where this rank computes.
        overridden: takes the place of `strategy` for a module that is not wrapped already.
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
        return (resolve(overridden) or chosen or NOOPStrategy()).prepare(module, world, recipe)
    if chosen is not None and not isinstance(chosen, NOOPStrategy):
        raise UsageError(
            f"strategy {chosen.name!r} for a {type(module).__name__} that is made parallel already. "
            "Pass the plain module, or no strategy."
        )
    recipe.compile(recipe.recompute(given.plain))
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
    prepared: nn.Module = parallelize(module, strategy, device, recipe, overridden=decided.strategy).module
    return prepared


def prepare_ddp(module: nn.Module, device: torch.device, strategy: DDPStrategy | None = None) -> DistributedDataParallel:
    """The module on `device` in DistributedDataParallel."""
    prepared = parallelize(module, strategy or DDPStrategy(), device).module
    assert isinstance(prepared, DistributedDataParallel)
    return prepared


def prepare_fsdp(module: nn.Module, device: torch.device, strategy: FSDPStrategy | None = None) -> nn.Module:
    """The module on `device`, sharded in place by `fully_shard`; its parameters are DTensors."""
    prepared: nn.Module = parallelize(module, strategy or FSDPStrategy(), device).module
    return prepared
