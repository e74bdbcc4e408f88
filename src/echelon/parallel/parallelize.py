"""The order in which a module is changed: activation checkpointing, then compile, then shard.

Recompute comes first so that the compiler sees it. Sharding comes last so that a whole compiled block is gathered at once. A
layout receives the first two as a `Recipe` and applies them when its own changes allow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.common.errors import LayoutError, PrecisionError, RanksDisagreeError, require
from echelon.common.older_words import renames
from echelon.contracts.overrides import overrides
from echelon.parallel.ddp.ddp import DDPStrategy
from echelon.parallel.ddp.sync_batchnorm import on_host
from echelon.parallel.experts.loads import Routers, routers_of
from echelon.parallel.fsdp.fsdp import FSDPPrepared, FSDPStrategy
from echelon.parallel.gradients.clip import clip_by_norm_
from echelon.parallel.guards.trained_params import replaced
from echelon.parallel.layouts import resolve
from echelon.parallel.names import class_name, kind_of, without_compile, wrapper_of
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe.activation import ActivationCheckpointParams, Preset
from echelon.parallel.recipe.compilation import Compile, TorchCompileParams
from echelon.parallel.recipe.float8 import convert, scales_after_step
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.shards import ranks_apart
from echelon.parallel.strategy import NOOPStrategy, Strategy
from echelon.world import agree
from echelon.world.init import World

__all__ = [
    "check_module",
    "clip_grad_norm_",
    "for_own_steps",
    "parallelize",
    "prepare_ddp",
    "prepare_fsdp",
    "prepare_module",
    "tell_routers",
]

logger = logging.getLogger(__name__)


def check_module(module: Any) -> None:
    """
    Raises:
        UsageError: `module` is not an nn.Module, for example a class of modules.
    """
    kind = module.__name__ if isinstance(module, type) else ""
    remedy = f"Write {kind}(...)." if kind else ""
    require(isinstance(module, nn.Module), "module", "a torch.nn.Module", module, remedy, kind=LayoutError)


def parallelize(
    module: nn.Module,
    layout: Strategy | str | None,
    device: torch.device,
    recipe: Recipe | None = None,
    *,
    overridden: Strategy | str | Callable[[Strategy | None], Strategy] | None = None,
) -> Prepared[Any]:
    """Make a module parallel over the ranks of the default group.

    Args:
        module: as built, or as the user wrapped it.
        layout: a word, axes, a value, or None. A wrapped module keeps its own layout: pass None or the word for it.
        device: the device on which this rank computes.
        overridden: replaces `layout` for a module that is not wrapped yet; or a function that makes it from `layout`.
    Raises:
        UsageError: an unknown layout; a different layout for a module that is already wrapped.
    """
    check_module(module)
    require(
        isinstance(device, torch.device),
        "device",
        "a torch.device",
        device,
        "init_from_env() gives this rank's.",
        kind=LayoutError,
    )
    chosen, world, recipe = resolve(layout), World.current(device), recipe or Recipe()
    float8 = recipe.precision.float8 if recipe.precision is not None else None
    kind = kind_of(without_compile(module))
    is_plain = chosen is None or isinstance(chosen, NOOPStrategy)
    if kind is None or (kind.by_parameters and not is_plain):
        _refuse_wrapped_parts(module)
        if overridden is not None:
            chosen = overridden(chosen) if callable(overridden) else resolve(overridden)
        if device.type == "cpu":
            on_host(module)
        chosen = chosen or NOOPStrategy()
        convert(module, float8, chosen.name)
        _refuse_other_models(module, chosen)
        before = list(module.named_parameters(remove_duplicate=False))
        prepared = chosen.prepare(module, world, recipe)
        replaced(before, dict(prepared.named_parameters(every_name=True)), chosen.name)
        scales_after_step(prepared, float8)
    elif chosen is not None and not is_plain and layout != kind.name:
        raise LayoutError(
            f"layout {chosen.name!r} cannot be applied to a {type(module).__name__} that is already parallel. "
            "Pass the plain module, or layout=None."
        )
    elif float8 is not None:
        raise PrecisionError(
            f"precision 'float8' replaces layers, but {type(module).__name__} is already parallel. Pass the plain module with a "
            "layout, or call torchao's convert_to_float8_training before you wrap it, and use precision='bf16'."
        )
    else:
        prepared = Prepared.of(module, world)
        recipe.applied(prepared.unwrapped)
        prepared._adopt()
    several = prepared.data.averaged_over > 1 or (prepared.form.kind != "own" and world.size > 1)
    if several and prepared.trains != "alone":
        check_embeddings(prepared.unwrapped)
    prepared.data.find_replicas()
    tell_routers(prepared)
    return prepared


def tell_routers(prepared: Prepared[Any]) -> None:
    """Tell the module's expert layers, if there are any, of its updates."""
    if routers_of(prepared.unwrapped):
        prepared.listeners.append(Routers(prepared.unwrapped, [*prepared.data.groups, *prepared.place.stages]))


def _refuse_other_models(module: nn.Module, chosen: Strategy) -> None:
    """Check that all ranks have the same parameters, which are paired by order: another order with equal shapes would silently
    mix them, and different shapes or numbers would make ranks wait forever. Collective over all ranks."""
    of_some = any(getattr(chosen, name, None) is not None for name in ("process_group", "device_mesh", "mesh"))
    if isinstance(chosen, NOOPStrategy) or of_some or any(ranks_apart(part) is not None for part in module.modules()):
        return
    fills = getattr(chosen, "param_init_fn", None) is not None  # then other ranks' meta tensors get rank 0's values
    facts = [[n, list(p.shape), str(p.dtype), p.is_meta and not fills] for n, p in module.named_parameters()]
    facts_of_all = agree.kinds(facts)
    if len(facts_of_all) > 1:
        one, other = next(pair for pair in zip_longest(*facts_of_all[:2]) if pair[0] != pair[1])
        raise RanksDisagreeError(
            f"the model must be the same on all ranks, got two: where {class_name(module)} has {_shown(one)} on rank 0, it has "
            f"{_shown(other)} on another rank. Build it alike on all ranks, with its layers in one order (a set has none), and "
            "under echelon.on_meta() on all ranks or on none."
        )


def _shown(parameter: Any) -> str:
    if parameter is None:
        return "nothing more"
    name, shape, dtype, is_meta = parameter
    return f"{name} {tuple(shape)} of {dtype.removeprefix('torch.')}{' without values' if is_meta else ''}"


def _refuse_wrapped_parts(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if wrapper_of(inner) is not None:
            raise LayoutError(
                f"{type(module).__name__}.{name} is a {type(inner).__name__}, but the whole module is not: gradients of its "
                "other parameters would not be reduced. Wrap the whole module, or pass the plain module with a layout."
            )


@renames(strategy="layout", activation_checkpoint_params="recompute", torch_compile_params="compile")
def prepare_module(
    module: nn.Module,
    device: torch.device,
    *,
    layout: Strategy | str | None = None,
    compile: Compile = None,
    recompute: Preset = None,
    precision: str | torch.dtype | Precision | None = None,
) -> nn.Module:
    """The module moved to `device` and made parallel, for users who write their own unit.

    Args:
        precision: dtype in which a sharded layout gathers parameters. You call the forward passes, so use autocast around
            them yourself: `with echelon.layouts.Precision.of("bf16").autocast(device):`.
    """
    decided = overrides()
    chosen = decided.precision or precision
    compiled = TorchCompileParams.of(compile, "compile") if decided.compile is not False else None
    recomputed = ActivationCheckpointParams.of(recompute, "recompute")
    recipe = Recipe(recomputed, compiled, Precision.of(chosen) if chosen is not None else None)
    prepared = parallelize(module, layout, device, recipe, overridden=decided.layout)
    if prepared.place.part[1] > 1 or prepared.trains != "together":
        raise LayoutError(
            "prepare_module must have a layout without cp, pp and local SGD: in a step of your own nothing splits the sequences, "
            "runs micro-batches through stages, or sees the updates after which workers synchronize. Write an AutoUnit; for cp "
            "and local SGD, echelon.prepare with a loop of your own works too."
        )
    if prepared._divides_optimizer:
        logger.warning(
            "prepare_module never sees the optimizer, which layout 'zero1' partitions, so this trains as layout 'ddp'. Give "
            "module and optimizer to echelon.prepare"
        )
    return for_own_steps(prepared)


def for_own_steps(prepared: Prepared[Any]) -> nn.Module:
    """The module, for training steps that the user writes."""
    if isinstance(prepared, FSDPPrepared):
        prepared.passes.trains = True  # nothing tells where training begins and ends
    module: nn.Module = prepared.module
    return module


@renames(strategy="layout")
def prepare_ddp(module: nn.Module, device: torch.device, layout: DDPStrategy | None = None) -> DistributedDataParallel:
    """The module on `device` in DistributedDataParallel.

    Raises:
        UsageError: no parameter requires a gradient, so there is nothing to wrap.
    """
    prepared = parallelize(module, layout or DDPStrategy(), device).module
    if not isinstance(prepared, DistributedDataParallel):
        raise LayoutError(
            f"prepare_ddp: no parameter of {type(module).__name__} requires a gradient, so there is nothing to reduce. "
            "Use the module as it is, or unfreeze parameters first."
        )
    return prepared


@renames(strategy="layout")
def prepare_fsdp(module: nn.Module, device: torch.device, layout: FSDPStrategy | None = None) -> nn.Module:
    """The module on `device`, sharded in place by `fully_shard`; its parameters are DTensors."""
    return for_own_steps(parallelize(module, layout or FSDPStrategy(), device))


def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_(module.parameters(), ...)` of a module of `prepare_module`, for users who write their own
    unit. torch's takes no parameters of several meshes together, as tp and ep make them. Collective.

    Args:
        max_norm: > 0; the gradients are scaled so that the norm of all of them, over all ranks, is at most this.
        norm_type: 2 is the Euclidean norm; inf the largest absolute value.
    Returns:
        The norm before clipping, a 0-dim tensor, the same number on every rank.
    """
    return clip_by_norm_(module.parameters(), max_norm, norm_type)


# Embeddings whose result changes if a rank sees only a part of the batch.


def check_embeddings(module: nn.Module) -> None:
    """Check a module's embeddings before data-parallel ranks train it.

    Raises:
        UsageError: an embedding has max_norm, which writes into the rows that a rank looks up: different rows on each rank.
    """
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or not part.weight.requires_grad:
            continue
        if part.max_norm is not None:
            raise LayoutError(
                f"{name or type(part).__name__}: max_norm must be None on several ranks, got {part.max_norm:g}. torch rescales "
                "the rows that are looked up, which differ by rank, so the ranks would train different models. Rescale the "
                "looked-up rows in forward instead: "
                "rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1); or train on one rank."
            )
        if part.scale_grad_by_freq:
            logger.warning(
                "%s: scale_grad_by_freq counts how often a row occurs on each rank, not in the global batch: the gradient "
                "differs from that of one rank",
                name or type(part).__name__,
            )
