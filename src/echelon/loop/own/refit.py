"""What was made before its model was sharded: an optimizer is given the parameters of now; a copy is sharded alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from echelon.common.errors import OwnLoopError
from echelon.contracts.overrides import overrides
from echelon.loop.auto.optimizer_checks import are_alike
from echelon.parallel.names import plain_names
from echelon.parallel.parallelize import parallelize
from echelon.parallel.shards import is_split, reshard_after_looking
from echelon.parallel.state.partition import parameters_of
from echelon.parallel.state.sharded import part_like

__all__ = ["Names", "check_optimizer", "refit"]

Names = Mapping[nn.Parameter, str]


def check_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, names: Names, *, left: Sequence[Sequence[nn.Parameter]] | None
) -> str | None:
    """What is wrong with an optimizer for this module, before it is made parallel; None if nothing is.

    Args:
        left: where there are several optimizers, what none of them holds of each model.
    """
    held = parameters_of(optimizer)
    if any(p in names for p in held) or (left is not None and not any(are_alike(held, each) for each in left)):
        return None
    shape = f" (first: {tuple(held[0].shape)})" if held else ""
    return (
        f"the optimizer must hold parameters of the {type(module).__name__} that prepare() is given with it, got a "
        f"{type(optimizer).__name__} with {len(held)} others{shape}. Make it from that model's parameters(), before prepare()."
    )


def refit(prepared: Any, optimizer: torch.optim.Optimizer, names: Names) -> None:
    """Put the parameters that a module has now in the place of those that it had.

    Args:
        names: of those that it had.
    Raises:
        UsageError: the optimizer has a state of parameters that are no more, and it cannot be split as they are.
    """
    now = dict(prepared.named_parameters(every_name=True))
    replaced = {p: now[name] for p, name in names.items() if name in now and now[name] is not p}
    if not replaced:
        return
    begun = {p: optimizer.state[p] for p in replaced if optimizer.state.get(p)}
    if any(_is_of_parts(value, p, replaced[p]) for p, state in begun.items() for value in state.values()):
        raise OwnLoopError(
            f"the {type(optimizer).__name__} must be new when its model is sharded, got one that has stepped, and whose state "
            "does not have its parameters' shapes. Call prepare() before the first step; to go on from an earlier run, restore "
            "its checkpoint."
        )
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for parameter in replaced:
        optimizer.state.pop(parameter, None)
    for parameter, state in begun.items():  # loaded by the script; Adagrad makes its state as it is built
        optimizer.state[replaced[parameter]] = {key: _like(value, parameter, replaced[parameter]) for key, value in state.items()}


def divide_alike(copy: nn.Module, unit: Any, shapes: Mapping[str, torch.Size], layout: Any) -> None:
    """Split a copy of the unit's model, or the copy in a wrapper's `module`, if the model is split: averages meet parts of both.

    Args:
        shapes: of the model's parameters, by name, before it was split.
    """
    if not any(is_split(p) for p in unit.prepared.module.parameters()):
        return
    for inner in (copy, getattr(copy, "module", None)):
        if isinstance(inner, nn.Module) and {name: p.shape for name, p in plain_names(inner)} == shapes:
            made = parallelize(inner, layout, unit.device, overridden=overrides().layout)
            reshard_after_looking(made.module)  # its parameters are read and written between its passes
            return


def _is_of_parts(value: Any, before: nn.Parameter, now: nn.Parameter) -> bool:
    """Whether it is a state of which nobody knows what belongs to which shard, such as Adafactor's rows and columns."""
    if not is_split(now):
        return False
    other = isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != before.shape
    return other or (isinstance(value, list | tuple | dict) and bool(value))


def _like(value: Any, before: nn.Parameter, now: nn.Parameter) -> Any:
    """A value of an optimizer's state, split if the parameter is."""
    if isinstance(value, torch.Tensor) and value.shape == before.shape and is_split(now):
        return part_like(value, now, "the optimizer's state")
    return value
