"""Modules that users made parallel by hand in ways that no layout offers: the older FSDP, split layers.

Modules in torch's other wrappers are recognised in the files of the layouts that use these wrappers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.common.errors import CheckpointError, LayoutError
from echelon.parallel.axes import Axis, DataAxes, axes_of, declared, split_axes
from echelon.parallel.fsdp.move_and_sync import Buffers
from echelon.parallel.names import Kind, imported, plain_name, register, wrapper_of
from echelon.parallel.prepared import Form, Prepared, WrapperPrepared
from echelon.parallel.shards import is_split
from echelon.parallel.state import keys as state_keys
from echelon.parallel.state.inner import inner_of, state_of
from echelon.parallel.state.keys import Saved
from echelon.parallel.state.optimizer_state import FURTHER, further_state, given_back
from echelon.world import agree
from echelon.world.init import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = ["DTensorPrepared", "FSDP1Prepared"]


# The state of an optimizer over modules in the older FullyShardedDataParallel, by name.


class FSDP1OptimizerState:
    """As OptimizerState, for modules in the older FullyShardedDataParallel. Its methods are collective.

    Parameters are pieces of a flat parameter. Only torch knows which pieces, so torch translates, one parameter at a time.
    """

    keyed_by_name = True

    def __init__(self, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._module = next(iter(modules.values())) if len(modules) == 1 else nn.ModuleDict(modules)
        self._owner = f"{next(iter(modules))}." if len(modules) == 1 else ""
        self._optimizer = optimizer

    def _translated(self, state: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state by name, in torch's own form."""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

        sharded = StateDictType.SHARDED_STATE_DICT
        with FSDP.state_dict_type(self._module, sharded, ShardedStateDictConfig(), ShardedOptimStateDictConfig()):
            return FSDP.optim_state_dict(self._module, self._optimizer, state)

    def _of_parameters(self) -> dict[str, Any]:
        """The optimizer's state, without entries that belong to no parameter.

        Raises:
            CheckpointError: `state_dict()` lacks state of an inner optimizer.
        """
        state, inner = self._optimizer.state_dict(), inner_of(self._optimizer)
        for number, parameter in enumerate(p for group in self._optimizer.param_groups for p in group["params"]):
            if inner is not None and not set(state_of(inner, parameter)) <= set(state["state"].get(number, ())):
                raise CheckpointError(
                    f"{type(self._optimizer).__name__}.state_dict() must include the state of the {type(inner).__name__} that "
                    "makes its steps, got only its own: with the older FullyShardedDataParallel nothing else can be saved, since "
                    "only torch knows the parameters. Use fully_shard or layout='fsdp', or let state_dict() return both."
                )
        return {
            "state": {number: each for number, each in state["state"].items() if isinstance(number, int)},
            "param_groups": state["param_groups"],
        }

    @functools.cached_property
    def _names(self) -> list[list[str]]:
        """Names of each group's parameters."""
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
        """Add zeros for parameters without state if others have it: torch 2.13 takes that for broken. Returns the added keys."""
        names = {parameter: plain_name(name) for name, parameter in self._module.named_parameters()}
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        kinds = {n: {k: _kind(v) for k, v in each.items() if v is not None} for n, each in state["state"].items()}
        everyones = agree.gather({str(number): each for number, each in kinds.items()})
        keys_anywhere = {(int(number), key) for each in everyones for number, keys in each.items() for key in keys}
        wanted = {key: kind for each in everyones for keys in each.values() for key, kind in keys.items()}
        absent = set()
        for number, parameter in enumerate(parameters):
            if not parameter.requires_grad:
                continue
            for key, kind in wanted.items():
                if (number, key) not in keys_anywhere:
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
        room: dict[str, torch.Tensor] = {}
        for key in (k for keys in state_keys.by_parameter(state_keys.mine(me, saved), names).values() for k in keys):
            dtype, shape = saved[f"{me}.{key}"]
            if shape:
                room[key] = empty(*shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
            else:
                room[key] = torch.empty((), dtype=dtype)
        room |= state_keys.tensor_options(me, saved)
        known = state_keys.known((*values, *room))
        return room, [f"param_groups.{n}" for n in names if n not in known]

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
    """[dtype, whether it has dimensions] of a tensor; empty for a number."""
    return [str(value.dtype).removeprefix("torch."), value.dim() > 0] if isinstance(value, torch.Tensor) else []


def _zeros(kind: list[Any], like: torch.Tensor) -> Any:
    if not kind:
        return 0
    dtype = getattr(torch, kind[0])
    return torch.zeros_like(like, dtype=dtype, requires_grad=False) if kind[1] else torch.zeros((), dtype=dtype)


class FSDP1Prepared(WrapperPrepared["FullyShardedDataParallel"]):
    """A module that the user wrapped in the older FullyShardedDataParallel. No layout of echelon uses it."""

    forward_is_collective = True
    form = Form("flat")

    def __init__(self, module: FullyShardedDataParallel, world: World) -> None:
        # Hybrid sharding: `process_group` has the ranks of one copy only, and the group over copies has no public name.
        copies = module.sharding_strategy.name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        super().__init__(module, [Axis.of(None if copies else module.process_group)])

    def _adopt(self) -> None:
        Buffers.keep_equal(self.module, self.data.groups, begin=True)

    def end_training(self) -> None:
        super().end_training()
        Buffers.settle(self.module)

    def parameters_written(self) -> None:
        raise LayoutError(
            "the older FullyShardedDataParallel keeps copies of its parameters that would not follow a change, so its weights "
            "cannot be averaged. Pass the plain module with layout='fsdp'."
        )

    def gathered(self) -> AbstractContextManager[Any]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        context: AbstractContextManager[Any] = FullyShardedDataParallel.summon_full_params(self.module, writeback=False)
        return context

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return self.module.clip_grad_norm_(max_norm, norm_type)


def is_fsdp1(module: nn.Module) -> bool:
    return isinstance(module, imported("torch.distributed.fsdp", "FullyShardedDataParallel"))


register(Kind("fsdp1", is_fsdp1, FSDP1Prepared, inner="_fsdp_wrapped_module", optimizer_state=FSDP1OptimizerState))


# Layers that were split with `parallelize_module` or `distribute_module`. The ranks that split a layer work on the same samples.
# Nothing averages gradients over further ranks.


class DTensorPrepared(Prepared[nn.Module]):
    """A module whose parameters are DTensors, without a wrapper."""

    forward_is_collective = True

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module)
        split = split_axes(module)
        copies = world.size // max(1, math.prod(axis.size for axis in split))
        if copies > 1 and declared(module) is None:
            names = " and ".join(repr(axis.name) for axis in split) or "no axis"
            self.data = DataAxes(
                share=f"parameters of {type(module).__name__} are split over {names}, but {world.size} ranks run, and nothing "
                f"averages gradients over the {copies} that hold the same parts. Call fully_shard(module, mesh=mesh[...]) with "
                "the axis whose ranks have different samples. In a TrainUnit that averages by itself, call "
                "echelon.layouts.data_axes(module, mesh[...]).",
                is_divided=True,
            )

    def add_extra_params(self, others: list[nn.Parameter]) -> None:
        if self.data.size > 1:
            axes = " and ".join(repr(axis.name) for axis in axes_of(declared(self.module)))  # type: ignore[arg-type]
            raise LayoutError(
                f"nothing averages gradients of {type(self.module).__name__} over {axes}. "
                "Call fully_shard(module, mesh=mesh[...]) with that axis."
            )
        super().add_extra_params(others)


def _is_split_by_hand(module: nn.Module) -> bool:
    return any(is_split(p) for p in module.parameters()) and not any(wrapper_of(m) for m in module.modules())


register(Kind("dtensors", _is_split_by_hand, DTensorPrepared, by_parameters=True))
