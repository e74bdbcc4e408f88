"""The state of modules and optimizers, keyed by parameter name under any layout: a state saved under one loads under another.

Names are those of the module as its author wrote it. An optimizer's state has a tied parameter under its first name, a module's
state under all of its names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.common.errors import CheckpointError
from echelon.parallel.names import (
    class_name,
    plain_buffers,
    plain_modules,
    plain_names,
    plainly,
    tied_names,
    unwrapped,
    wrapper_of,
)
from echelon.parallel.patching import own_taken_out
from echelon.parallel.shards import is_split, ranks_apart, reshard
from echelon.parallel.state.keys import Saved, mine
from echelon.parallel.state.optimizer_state import OptimizerState, ZeroRedundancyState
from echelon.parallel.state.partition import Partition, is_zero_redundancy, parameters_of

__all__ = ["ModuleState", "states_by_name"]


class ModuleState:
    """A module's parameters and buffers by name; sharded ones as DTensors.

    It has all of them, also if a script has set a `state_dict` of its own on the module, as for PEFT to choose what a library
    writes.
    """

    keyed_by_name = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._renamed: list[str] = []  # tensors that the module's own hooks renamed in the latest state_dict()

    @property
    def _has_fsdp1(self) -> bool:
        kinds = (wrapper_of(part) for part in self._module.modules())
        return any(kind is not None and kind.name == "fsdp1" for kind in kinds)

    def state_dict(self) -> dict[str, Any]:
        with own_taken_out(self._module.modules(), "state_dict"):
            if self._has_fsdp1:
                return self._by_torch()
            inner = unwrapped(self._module)
            state = dict(plainly(inner, inner.state_dict().items()))
        known = self._living()
        self._renamed = [n for n, v in state.items() if n not in known and isinstance(v, torch.Tensor) and not is_split(v)]
        return state

    def _by_torch(self) -> dict[str, Any]:
        """The state of a module in the older FullyShardedDataParallel, whose pieces only torch knows."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        try:
            return dict(get_model_state_dict(self._module))
        except (AttributeError, AssertionError) as error:
            name, why = class_name(unwrapped(self._module)), str(error).partition(" but ")[0]
            raise CheckpointError(
                f"the state_dict() of the {name} must have the names of its parameters and buffers in a "
                f"FullyShardedDataParallel, got others, which its own hooks give: {why}. Rename in the code that reads the "
                "weights, not in the module; or give the plain module to layout='fsdp'."
            ) from error

    def room(self, me: str, saved: Saved) -> dict[str, torch.Tensor]:
        """Empty tensors to read from a checkpoint, for buffers with another shape there or without a value yet.

        Args:
            me: this state's name in the checkpoint.
        """
        saved_kinds = mine(me, saved)
        tensors = {}
        for key, _, _, buffer in self._reshaped({key: shape for key, (_, shape) in saved_kinds.items()}):
            like = next(self._module.parameters(), torch.empty(0, dtype=saved_kinds[key][0])) if buffer is None else buffer
            dtype = saved_kinds[key][0] if buffer is None else buffer.dtype
            tensors[key] = torch.empty(saved_kinds[key][1], dtype=dtype, device=like.device)
        return tensors

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state. If the module does not itself load a buffer that was saved with another shape, it gets that shape."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        with contextlib.ExitStack() as stack:
            stack.enter_context(own_taken_out(self._module.modules(), "state_dict"))
            shapes = {key: list(value.shape) for key, value in state_dict.items() if isinstance(value, torch.Tensor)}
            for key, owner, name, buffer in self._reshaped(shapes):
                if buffer is None:
                    setattr(owner, name, torch.empty_like(state_dict[key]))
                else:  # registered last, so it runs after the module's own hooks
                    stack.callback(owner.register_load_state_dict_pre_hook(partial(_reshape, name)).remove)
            if self._has_fsdp1:
                set_model_state_dict(self._module, state_dict)
                return
            inner = unwrapped(self._module)
            names = dict(plainly(inner, ((name, name) for name in inner.state_dict())))
            inner.load_state_dict({names.get(name, name): value for name, value in state_dict.items()})

    def _living(self) -> dict[str, list[int]]:
        """Shapes of parameters and buffers, by name."""
        living = (*plain_names(self._module, every_name=True), *plain_buffers(self._module, every_name=True))
        return {name: list(tensor.shape) for name, tensor in living}

    def _reshaped(self, shapes: Mapping[str, list[int]]) -> Iterator[tuple[str, nn.Module, str, torch.Tensor | None]]:
        """Whole buffers that have another shape or no value, as (key, owner, name in the owner, buffer)."""
        now = self._living()
        if not (odd := [key for key, shape in shapes.items() if now.get(key) != shape]):
            return
        owners = plain_modules(self._module)
        for key in odd:
            path, _, name = key.rpartition(".")
            try:
                buffer: torch.Tensor | None = owners[path].get_buffer(name)
            except (KeyError, AttributeError):  # a parameter, or unknown
                continue
            if not is_split(buffer):
                yield key, owners[path], name, buffer

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold entirely different parameters, as stages of a pipeline do."""
        return ranks_apart(self._module) is not None

    @property
    def of_first_rank(self) -> list[str]:
        """Whole buffers, saved as rank 0 has them: a forward pass changes them on each rank until the next one equalizes them."""
        return [*(name for name, buffer in plain_buffers(self._module) if not is_split(buffer)), *self._renamed]

    def tied(self) -> list[list[str]]:
        """The names of each tied parameter."""
        return tied_names(plain_names(self._module, every_name=True))


def _reshape(name: str, owner: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    given, buffer = state.get(prefix + name), owner.get_buffer(name)
    if isinstance(given, torch.Tensor) and given.shape != buffer.shape:
        # Keep the object: DDP broadcasts it.
        buffer.data = torch.empty(given.shape, dtype=buffer.dtype, device=buffer.device)


def states_by_name(app_state: Mapping[str, Any]) -> dict[str, Any]:
    """A unit's app state with a state by name for each module and optimizer; everything else as it is."""
    modules = {name: m for name, m in app_state.items() if isinstance(m, nn.Module)}
    for module in modules.values():
        reshard(module)
    states: dict[str, Any] = {}
    for name, value in app_state.items():
        if isinstance(value, nn.Module):
            states[name] = module_state(value)
        elif isinstance(value, torch.optim.Optimizer):
            states[name] = _optimizer_state(value, modules)
        else:
            states[name] = value
    return states


def module_state(module: nn.Module) -> ModuleState:
    kind = wrapper_of(module)
    make = ModuleState if kind is None or kind.module_state is None else kind.module_state
    made: ModuleState = make(module)
    return made


def _optimizer_state(optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> Any:
    owners = _owners(parameters_of(optimizer), modules)
    if is_zero_redundancy(optimizer):
        return ZeroRedundancyState(owners, optimizer)
    kinds = (wrapper_of(part) for module in owners.values() for part in module.modules())
    own = next((kind.optimizer_state for kind in kinds if kind is not None and kind.optimizer_state is not None), OptimizerState)
    return own(owners, Partition.behind(optimizer))


def _owners(parameters: list[nn.Parameter], modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that hold the parameters, found by identity: shards have no address to compare."""
    ids = {id(p) for p in parameters}
    return {name: m for name, m in modules.items() if any(id(p) in ids for p in m.parameters())}
