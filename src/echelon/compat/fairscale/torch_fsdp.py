"""What torch's FullyShardedDataParallel keeps to itself, and programs of FairScale's class ask for.

torch has no public way to learn which elements of its parameters a rank holds without a collective, or to forget whole
parameters that are still in memory; and its class runs one forward for each backward. Tried with torch 2.13;
`test_torchs_private_names` in tests/compat/test_fairscale_local.py notices when a name goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp._runtime_utils import _post_backward_hook

__all__ = [
    "Piece",
    "around_conversion",
    "claim",
    "claimed",
    "forget_whole",
    "forwards_may_precede_backwards",
    "is_summoned",
    "length",
    "pieces",
    "plain",
    "shared_names",
    "without_messages",
    "wrappers",
]

_PREFIX = "_fsdp_wrapped_module"
_alive: weakref.WeakSet[TorchFSDP] = weakref.WeakSet()  # wrappers that shard parameters


@dataclass(frozen=True)
class Piece:
    """A range of a parameter's elements, which this rank holds; it may be empty.

    Args:
        name: of the parameter, from the wrapped module.
        shape: of the whole parameter.
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
    """The module, if it is one, and those within it."""
    return [each for each in module.modules() if isinstance(each, TorchFSDP)]


def claim(wrapper: TorchFSDP) -> None:
    """The wrapper has just been built: what it shards is no other's to shard (`claimed`), and is named plainly."""
    _alive.add(wrapper)
    _name_plainly(wrapper)


def claimed(parameters: dict[str, nn.Parameter]) -> list[str]:
    """Names of those that a wrapper shards already."""
    held = {id(piece.parameter) for each in _alive for piece in pieces(each)}
    return [name for name, parameter in parameters.items() if id(parameter) in held]


def plain(name: str) -> str:
    """A module's or parameter's name as in the unwrapped module."""
    return ".".join(part for part in name.split(".") if part != _PREFIX)


def pieces(wrapper: TorchFSDP) -> list[Piece]:
    """Of the parameters that this wrapper itself holds, in its order; not those of wrappers in it."""
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


def length(wrapper: TorchFSDP) -> int:
    """Elements of a rank's part of this wrapper's parameters, with padding; the same on all ranks."""
    handle: Any = wrapper._handle
    sharded = handle.uses_sharded_strategy
    return int(handle.flat_param._sharded_size.numel()) if sharded else sum(p.parameter.numel() for p in pieces(wrapper))


def shared_names(wrapper: TorchFSDP) -> list[tuple[str, str]]:
    """(name, other name of the same parameter) within the wrapper."""
    handle: Any = wrapper._handle
    infos = handle.flat_param._shared_param_infos if handle is not None else ()
    return [
        (plain(f"{i.prim_module_name}.{i.prim_param_name}".lstrip(".")), plain(f"{i.module_name}.{i.param_name}".lstrip(".")))
        for i in infos
    ]


def forget_whole(wrapper: TorchFSDP) -> None:
    """Whole parameters that a forward left in memory are gathered again before the next one."""
    handle: Any = wrapper._handle
    if handle is not None and handle.uses_sharded_strategy:
        handle.reshard(True)


@contextmanager
def around_conversion(wrapper: TorchFSDP) -> Iterator[None]:
    """Parameters are cast or moved inside; what they are gathered into later has their type and device."""
    handle: Any = wrapper._handle
    has_run = handle is not None and hasattr(handle.flat_param, "_local_shard")
    if has_run:
        forget_whole(wrapper)
    yield
    if has_run:
        handle.init_flat_param_attributes()


def without_messages(wrapper: TorchFSDP) -> None:
    """A stand-in for a group of one rank: gradients are whole already."""
    if wrapper.world_size == 1:
        vars(wrapper)["_comm_hook"] = lambda state, gradient: None


@contextmanager
def forwards_may_precede_backwards(wrapper: TorchFSDP) -> Iterator[None]:
    """Around a forward: after the first of several backwards, torch's class forgets that there are others.

    It neither gathers the parameters again, which is an error, nor reduces the gradients.
    """
    reference = weakref.ref(wrapper)

    def before_backward(accumulates: Any, views: list[Any], gradient: torch.Tensor) -> None:
        wrapper = reference()
        handle: Any = wrapper._handle if wrapper is not None else None
        if handle is None or handle._ran_pre_backward_hook or hasattr(handle.flat_param, "_post_backward_hook_state"):
            return
        handle._needs_pre_backward_unshard = True
        handle.flat_param._tensors = views
        if accumulates is not None:
            reduce = accumulates.register_hook(partial(_post_backward_hook, wrapper, handle))
            handle.flat_param._post_backward_hook_state = (accumulates, reduce)

    def after_forward(module: nn.Module, inputs: Any, outputs: Any) -> None:
        handle: Any = wrapper._handle if (wrapper := reference()) is not None else None
        if handle is None or not torch.is_grad_enabled():
            return
        # This forward's: another one has its own in low precision, and a frozen parameter none.
        flat = handle.flat_param
        node = torch.autograd.graph.get_gradient_edge(flat).node if flat.requires_grad else None
        for tensor in _tensors(outputs):  # before torch puts its own hook on the same ones
            if tensor.requires_grad:
                tensor.register_hook(partial(before_backward, node, list(flat._tensors)))

    hook = wrapper.module.register_forward_hook(after_forward)
    try:
        yield
    finally:
        hook.remove()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(list(vars(value).values()))


def _name_plainly(wrapper: TorchFSDP) -> None:
    """Parameters of modules within other wrappers are found in the state dict, whose names are the unwrapped module's."""
    handle: Any = wrapper._handle
    if handle is not None:
        flat = handle.flat_param
        flat._param_infos = tuple(i._replace(module_name=plain(i.module_name)) for i in flat._param_infos)
        flat._shared_param_infos = tuple(
            i._replace(module_name=plain(i.module_name), prim_module_name=plain(i.prim_module_name))
            for i in flat._shared_param_infos
        )
