"""The state of an optimizer over modules in the older FullyShardedDataParallel, by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.parallel.names import plain_name
from echelon.parallel.state import keys as state_keys
from echelon.parallel.state.further import FURTHER, further_state, given_back
from echelon.parallel.state.keys import Saved
from echelon.world import agree

__all__ = ["FSDP1OptimizerState"]


class FSDP1OptimizerState:
    """As OptimizerState, of an optimizer over modules in the older FullyShardedDataParallel. Its methods are collective.

    Its parameters are pieces of a flat one; torch alone knows which, and translates, one parameter at a time.
    """

    keyed_by_name = True

    def __init__(self, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._module = next(iter(modules.values())) if len(modules) == 1 else nn.ModuleDict(modules)
        self._owner = f"{next(iter(modules))}." if len(modules) == 1 else ""
        self._optimizer = optimizer

    def _translated(self, state: dict[str, Any]) -> dict[str, Any]:
        """torch's own form of an optimizer's state, by name."""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

        sharded = StateDictType.SHARDED_STATE_DICT
        with FSDP.state_dict_type(self._module, sharded, ShardedStateDictConfig(), ShardedOptimStateDictConfig()):
            return FSDP.optim_state_dict(self._module, self._optimizer, state)

    def _of_parameters(self) -> dict[str, Any]:
        """The optimizer's state without what belongs to no parameter."""
        told = self._optimizer.state_dict()
        return {
            "state": {number: each for number, each in told["state"].items() if isinstance(number, int)},
            "param_groups": told["param_groups"],
        }

    @functools.cached_property
    def _names(self) -> list[list[str]]:
        """Of each group's parameters."""
        stateless = {**self._of_parameters(), "state": {}}
        return [[plain_name(n) for n in group["params"]] for group in self._translated(stateless)["param_groups"]]

    def full_names(self) -> dict[str, str]:
        return {name: f"{self._owner}{name}" for group in self._names for name in group}

    def state_dict(self) -> dict[str, Any]:
        state = self._of_parameters()
        absent = self._complete(state)
        translated = self._translated(state)
        own: dict[str, Any] = {}
        for name, each in translated["state"].items():
            own |= state_keys.leaves(f"state.{plain_name(name)}", each)
        for group in translated["param_groups"]:
            own |= {f"param_groups.{plain_name(n)}.{k}": v for n in group["params"] for k, v in group.items() if k != "params"}
        if further := further_state(self._optimizer):
            own[FURTHER] = further
        return {key: value for key, value in own.items() if key not in absent}

    def _complete(self, state: dict[str, Any]) -> set[str]:
        """Add zeros where only some parameters have a state, which torch 2.13 takes for a broken one. Returns what was added."""
        names = {parameter: plain_name(name) for name, parameter in self._module.named_parameters()}
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        kinds = {n: {k: _kind(v) for k, v in each.items() if v is not None} for n, each in state["state"].items()}
        everyones = agree.gather({str(number): each for number, each in kinds.items()})
        found = {(int(number), key) for each in everyones for number, keys in each.items() for key in keys}
        wanted = {key: kind for each in everyones for keys in each.values() for key, kind in keys.items()}
        absent = set()
        for number, parameter in enumerate(parameters):
            if not parameter.requires_grad:
                continue
            for key, kind in wanted.items():
                if (number, key) not in found:
                    absent.add(f"state.{names[parameter]}.{key}")
                    if parameter.numel():
                        state["state"].setdefault(number, {})[key] = _zeros(kind, parameter)
        return absent

    def targets(self, me: str, saved: Saved, values: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, empty

        names = [n for group in self._names for n in group]
        device = next(self._module.parameters()).device
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
        found: dict[str, torch.Tensor] = {}
        for key in (k for keys in state_keys.by_parameter(state_keys.mine(me, saved), names).values() for k in keys):
            dtype, shape = saved[f"{me}.{key}"]
            if shape:
                found[key] = empty(*shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
            else:
                found[key] = torch.empty((), dtype=dtype)
        found |= state_keys.tensor_options(me, saved)
        known = state_keys.known((*values, *found))
        return found, [f"param_groups.{n}" for n in names if n not in known]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        known = state_keys.known(state_dict)
        by_parameter = state_keys.by_parameter(state_dict, [n for group in self._names for n in group])
        state = {n: state_keys.nested(f"state.{n}", {k: state_dict[k] for k in keys}) for n, keys in by_parameter.items()}
        groups = [
            {**state_keys.options(group, [n for n in names if n in known], state_dict), "params": names}
            for group, names in zip(self._optimizer.param_groups, self._names, strict=True)
        ]
        local = FSDP.optim_state_dict_to_load(self._module, self._optimizer, {"state": state, "param_groups": groups})
        further = given_back(self._optimizer, state_dict.get(FURTHER))
        state = {**further["state"], **local["state"]}
        self._optimizer.load_state_dict({**further["dict"], "state": state, "param_groups": local["param_groups"]})


def _kind(value: Any) -> list[Any]:
    """[type, whether it has dimensions] of a tensor; empty for a number."""
    return [str(value.dtype).removeprefix("torch."), value.dim() > 0] if isinstance(value, torch.Tensor) else []


def _zeros(kind: list[Any], like: torch.Tensor) -> Any:
    if not kind:
        return 0
    dtype = getattr(torch, kind[0])
    return torch.zeros_like(like, dtype=dtype, requires_grad=False) if kind[1] else torch.zeros((), dtype=dtype)
