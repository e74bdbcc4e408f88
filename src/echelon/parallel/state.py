"""The state of modules and optimizers, keyed by parameter name whatever the strategy: what one wrote, any other can read.

Names are those of the module as its author wrote it: without the prefixes of DistributedDataParallel, FSDP or compile.
Built on torch.distributed.checkpoint.state_dict, which knows all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["ModuleState", "OptimizerState", "states_by_name"]


class ModuleState:
    """Parameters and buffers of a module, by name; sharded ones as DTensors."""

    keyed_by_name = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(self._module))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(self._module, state_dict)


class OptimizerState:
    """An optimizer's state, keyed "state.<parameter>.<what>" and "param_groups.<parameter>.<option>"."""

    keyed_by_name = True

    def __init__(self, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
        # torch takes one module that holds all parameters; a unit may have several, each under its attribute's name.
        self._module = next(iter(modules.values())) if len(modules) == 1 else nn.ModuleDict(dict(modules))
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return dict(get_optimizer_state_dict(self._module, self._optimizer, options=options))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(self._module, self._optimizer, state_dict, options=options)


def states_by_name(app_state: Mapping[str, Any]) -> dict[str, Any]:
    """A unit's app state with its modules and optimizers behind their names; everything else as it is."""
    modules = {name: m for name, m in app_state.items() if isinstance(m, nn.Module)}
    states: dict[str, Any] = {}
    for name, value in app_state.items():
        if isinstance(value, nn.Module):
            states[name] = ModuleState(value)
        elif isinstance(value, torch.optim.Optimizer):
            owners = _owners(value, modules)
            states[name] = OptimizerState(owners, value) if owners else value
        else:
            states[name] = value
    return states


def _owners(optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that hold the optimizer's parameters. By identity: shards have no address of their own to compare."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: m for name, m in modules.items() if any(id(p) in mine for p in m.parameters())}
