"""The state of modules and optimizers, keyed by parameter name whatever the strategy: what one wrote, any other can read.

Names are those of the module as its author wrote it: without the prefixes of DistributedDataParallel, FSDP or compile.
Built on torch.distributed.checkpoint.state_dict, which knows all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from echelon.parallel.partition import Partition
from echelon.world import agree

__all__ = ["ModuleState", "OptimizerState", "PartitionedState", "states_by_name"]


class ModuleState:
    """Parameters and buffers of a module, by name; sharded ones as DTensors."""

    keyed_by_name = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module.module if isinstance(module, DataParallel) else module

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
        plain = {n: m.module if isinstance(m, DataParallel) else m for n, m in modules.items()}
        self._module = next(iter(plain.values())) if len(plain) == 1 else nn.ModuleDict(plain)
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return dict(get_optimizer_state_dict(self._module, self._optimizer, options=options))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(self._module, self._optimizer, state_dict, options=options)


class PartitionedState:
    """As OptimizerState, of an optimizer that is divided over the ranks: each has the tensors of what it owns. Collective."""

    keyed_by_name = True

    def __init__(self, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, partition: Partition) -> None:
        self._optimizer, self._partition = optimizer, partition
        self._names: dict[torch.Tensor, str] = {}
        for owner, module in modules.items():
            inner = module.module if isinstance(module, (DataParallel, DistributedDataParallel)) else module
            for name, parameter in inner.named_parameters():
                plain = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
                self._names[parameter] = plain if len(modules) == 1 else f"{owner}.{plain}"

    def state_dict(self) -> dict[str, Any]:
        with self._partition.alone():
            _make_state(self._optimizer)
        own = {
            f"state.{self._names[parameter]}.{key}": value
            for parameter, state in self._optimizer.state.items()
            for key, value in state.items()
        }
        # Numbers are written by rank 0 alone, which does not own all of them.
        numbers = agree.gather({k: v for k, v in own.items() if not isinstance(v, torch.Tensor)})
        options = {
            f"param_groups.{self._names[parameter]}.{key}": value
            for group, parameters in zip(self._optimizer.param_groups, self._partition.groups, strict=True)
            for parameter in parameters
            for key, value in group.items()
            if key != "params"
        }
        return {k: v for each in (*numbers, own, options) for k, v in each.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for group, everyones in zip(self._optimizer.param_groups, self._partition.groups, strict=True):
            first = self._names[everyones[0]] if everyones else None
            options = {k: state_dict.get(f"param_groups.{first}.{k}", v) for k, v in group.items() if k != "params"}
            groups.append({**options, "params": list(range(number, number + len(group["params"])))})
            for parameter in group["params"]:
                prefix = f"state.{self._names[parameter]}."
                state[number] = {k: state_dict[prefix + k] for k in self._optimizer.state.get(parameter, {})}
                number += 1
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """What an optimizer will remember, before its first step: a step of zeros that changes nothing, as torch does it."""
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or not owned or any(p.grad is not None for p in owned):
        return
    before = [p.detach().clone() for p in owned]
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for parameter in owned:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate
    with torch.no_grad():
        for parameter, value in zip(owned, before, strict=True):
            parameter.copy_(value)
            parameter.grad = None


def states_by_name(app_state: Mapping[str, Any]) -> dict[str, Any]:
    """A unit's app state with its modules and optimizers behind their names; everything else as it is."""
    modules = {name: m for name, m in app_state.items() if isinstance(m, nn.Module)}
    for module in modules.values():
        _reshard(module)
    states: dict[str, Any] = {}
    for name, value in app_state.items():
        if isinstance(value, nn.Module):
            states[name] = ModuleState(value)
        elif isinstance(value, torch.optim.Optimizer):
            states[name] = _optimizer_state(value, modules)
        else:
            states[name] = value
    return states


def _optimizer_state(optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> Any:
    partition = Partition.of(optimizer)
    if partition is not None:
        return PartitionedState(_owners(partition.parameters, modules), optimizer, partition)
    owners = _owners([p for group in optimizer.param_groups for p in group["params"]], modules)
    return OptimizerState(owners, optimizer) if owners else optimizer


def _reshard(module: nn.Module) -> None:
    """After an evaluation `fully_shard` may leave whole parameters in the place of the shards that the optimizer knows."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # never imported, so nothing is sharded
        return
    for part in module.modules():
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def _owners(parameters: list[nn.Parameter], modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that hold the parameters. By identity: shards have no address of their own to compare."""
    mine = {id(p) for p in parameters}
    return {name: m for name, m in modules.items() if any(id(p) in mine for p in m.parameters())}
