"""How a module's steps are called: through the wrapper that a strategy put around it, and with the arguments that they take."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from echelon.common.errors import UsageError
from echelon.parallel.patching import replace
from echelon.parallel.shards import is_split

__all__ = ["arguments", "gather_when_alone", "places", "through"]


def through(wrapper: nn.Module, module: Any, step: Callable[..., Any], *args: Any) -> Any:
    """`step(*args)` as the forward pass of `wrapper`, which is around `module` or is it.

    A DistributedDataParallel then reduces what the step's backward pass makes, whichever layers the step has called; a sharded
    module is gathered. The batch does not go through the wrapper: it would be cast as activations are.
    """
    if wrapper is module and not isinstance(module, FSDPModule):
        return step(*args)
    undo: list[Callable[[], None]] = []
    undo.append(replace(module, "forward", "lightning", partial(_forward_is_a_step, undo, module, step, args)))
    try:
        return wrapper()
    finally:
        undo[0]()


def _forward_is_a_step(undo: list[Callable[[], None]], module: Any, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    undo[0]()
    vars(module)["_within_step"] = isinstance(module, FSDPModule)
    try:
        return step(*args)
    finally:
        vars(module)["_within_step"] = False


def places(step: Callable[..., Any]) -> int:
    """How many of (batch, batch_idx, dataloader_idx) a step takes by position."""
    parameters = inspect.signature(step).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return 3
    return sum(p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters)


def arguments(name: str, taken: int, batch: Any, batch_idx: int, dataloader_idx: int | None) -> tuple[Any, ...]:
    """What a step takes of (batch, batch_idx, dataloader_idx); the last only where there are several loaders."""
    if dataloader_idx is None:
        return (batch, batch_idx) if taken > 1 else (batch,)
    if taken < 3:
        raise UsageError(f"there are several dataloaders: {name} must take (batch, batch_idx, dataloader_idx=0).")
    return batch, batch_idx, dataloader_idx


def gather_when_alone(module: nn.Module) -> list[Any]:
    """Let scripts call a part of a sharded module by itself, such as `module.encoder(x)` after `fit`. Such calls are collective.

    Returns:
        handles that take it back.
    """
    return [
        part.register_forward_pre_hook(partial(_gather, weakref.ref(owner)))
        for owner in module.modules()
        if isinstance(owner, FSDPModule)
        for part in _parts_of(owner)
    ]


def _parts_of(owner: nn.Module) -> Iterator[nn.Module]:
    """What is gathered with a module, and has parameters of its own."""
    for child in owner.children():
        if not isinstance(child, FSDPModule):
            if next(child.parameters(recurse=False), None) is not None:
                yield child
            yield from _parts_of(child)


def _gather(owner: weakref.ref[Any], part: nn.Module, *_: Any) -> None:
    if any(is_split(p) for p in part.parameters(recurse=False)) and (found := owner()) is not None:
        found.unshard()
