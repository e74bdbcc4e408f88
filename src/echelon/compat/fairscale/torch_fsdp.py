"""Private parts of torch's FullyShardedDataParallel that programs for FairScale's class need.

torch has no public way to learn, without a collective, which elements of its parameters a rank holds, or to free whole
parameters that are still in memory. Tried with torch 2.13; `test_torchs_private_names` in tests/compat/test_fairscale_local.py
fails when a name is gone.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

__all__ = [
    "Piece",
    "claim",
    "claimed",
    "forget_whole",
    "is_summoned",
    "pieces",
    "plain",
    "shared_names",
    "wrappers",
]

_PREFIX = "_fsdp_wrapped_module"
_alive: weakref.WeakSet[TorchFSDP] = weakref.WeakSet()  # wrappers that shard parameters


@dataclass(frozen=True)
class Piece:
    """The range of a parameter's elements that this rank holds; it may be empty.

    Args:
        name: the parameter's name within the wrapped module.
        shape: the whole parameter's shape.
        parameter: the elements.
        start: where the range begins.
    """

    name: str
    shape: torch.Size
    parameter: nn.Parameter
    start: int

    @property
    def values(self) -> torch.Tensor:
        return self.parameter.detach().view(-1)


def wrappers(module: nn.Module) -> list[TorchFSDP]:
    """All wrappers in a module, itself included."""
    return [each for each in module.modules() if isinstance(each, TorchFSDP)]


def claim(wrapper: TorchFSDP) -> None:
    """Record a new wrapper, so that `claimed` finds what it shards, and give its parameters plain names."""
    _alive.add(wrapper)
    _name_plainly(wrapper)


def claimed(parameters: dict[str, nn.Parameter]) -> list[str]:
    """Names of the parameters that a wrapper shards already."""
    held = {id(piece.parameter) for each in _alive for piece in pieces(each)}
    return [name for name, parameter in parameters.items() if id(parameter) in held]


def plain(name: str) -> str:
    """A module's or parameter's name as in the unwrapped module."""
    return ".".join(part for part in name.split(".") if part != _PREFIX)


def pieces(wrapper: TorchFSDP) -> list[Piece]:
    """Pieces of the parameters that this wrapper itself holds, in its order; not those of wrappers within it."""
    handle: Any = wrapper._handle
    if handle is None:
        return []
    flat, whole = handle.flat_param, not handle.uses_sharded_strategy
    rows = zip(flat._fqns, flat._shapes, flat._params, flat._shard_param_infos if not whole else flat._params, strict=True)
    return [
        Piece(plain(name), torch.Size(shape), parameter, 0 if whole else held.intra_param_start_idx or 0)
        for name, shape, parameter, held in rows
    ]


def is_summoned(wrapper: TorchFSDP) -> bool:
    """Whether its parameters are whole, in `summon_full_params`."""
    return bool(wrapper.training_state.name == "SUMMON_FULL_PARAMS")


def shared_names(wrapper: TorchFSDP) -> list[tuple[str, str]]:
    """(name, other name of the same parameter) within the wrapper."""
    handle: Any = wrapper._handle
    infos = handle.flat_param._shared_param_infos if handle is not None else ()
    return [
        (plain(f"{i.prim_module_name}.{i.prim_param_name}".lstrip(".")), plain(f"{i.module_name}.{i.param_name}".lstrip(".")))
        for i in infos
    ]


def forget_whole(wrapper: TorchFSDP) -> None:
    """Free whole parameters that a forward pass left in memory; the next one gathers them again."""
    handle: Any = wrapper._handle
    if handle is not None and handle.uses_sharded_strategy:
        handle.reshard(True)


def _name_plainly(wrapper: TorchFSDP) -> None:
    """Use the unwrapped module's names, so that parameters within other wrappers are found in the state dict."""
    handle: Any = wrapper._handle
    if handle is not None:
        flat = handle.flat_param
        flat._param_infos = tuple(i._replace(module_name=plain(i.module_name)) for i in flat._param_infos)
        flat._shared_param_infos = tuple(
            i._replace(module_name=plain(i.module_name), prim_module_name=plain(i.prim_module_name))
            for i in flat._shared_param_infos
        )
