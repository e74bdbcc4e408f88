"""The state of modules and optimizers, keyed by parameter name whatever the strategy: what one wrote, any other can read.

Names are those of the module as its author wrote it: without the prefixes of DistributedDataParallel, FSDP or compile. A tied
parameter has its first name in an optimizer's state, and all of them in the module's.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from echelon.contracts.errors import CheckpointMismatchError
from echelon.parallel.partition import Partition
from echelon.parallel.registry import unwrapped
from echelon.world import agree

__all__ = ["ModuleState", "OptimizerState", "states_by_name"]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=torch.Tensor)

# What a checkpoint holds: (type, shape) of tensors by their name in it.
Saved = Mapping[str, tuple[torch.dtype, list[int]]]

# How an optimizer computes, not what: the script's choice, which suits this machine and strategy.
_HOW = {"foreach", "fused", "capturable", "differentiable"}
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class ModuleState:
    """Parameters and buffers of a module, by name; sharded ones as DTensors."""

    keyed_by_name = True

    def __init__(self, module: nn.Module) -> None:
        self._module = unwrapped(module)

    @property
    def _is_bare(self) -> bool:
        """Without parameters and buffers, as a loss: torch's functions take that for an error."""
        return not any(True for tensors in (self._module.parameters(), self._module.buffers()) for _ in tensors)

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(self._module.state_dict() if self._is_bare else get_model_state_dict(self._module))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        if self._is_bare:
            self._module.load_state_dict(state_dict)
            return
        set_model_state_dict(self._module, state_dict)

    @property
    def of_first_rank(self) -> list[str]:
        """Buffers, which a forward pass changes on every rank by itself before the next one makes them equal: rank 0's count."""
        return [
            name for name, buffer in _plainly(self._module, self._module.named_buffers()) if not hasattr(buffer, "device_mesh")
        ]

    def tied(self) -> list[list[str]]:
        """Names of one and the same parameter, for each that has several."""
        names: dict[int, list[str]] = {}
        for name, parameter in plain_names(self._module, every_name=True):
            names.setdefault(id(parameter), []).append(name)
        return [each for each in names.values() if len(each) > 1]


class OptimizerState:
    """An optimizer's state, keyed "state.<parameter>.<what>" and "param_groups.<parameter>.<option>".

    Of an optimizer that is divided over the ranks each has the tensors of what it owns; the methods are collective then.
    """

    keyed_by_name = True

    def __init__(self, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        partition = Partition.of(optimizer)
        self._is_divided = partition is not None
        self._groups = list(partition.groups) if partition is not None else []
        self._groups += [list(group["params"]) for group in optimizer.param_groups[len(self._groups) :]]
        # A parameter's name here, and the name of its value in the checkpoint.
        self._names: dict[torch.Tensor, str] = {}
        self._values: dict[torch.Tensor, str] = {}
        for owner, module in modules.items():
            for name, parameter in plain_names(module):
                self._names[parameter] = name if len(modules) == 1 else f"{owner}.{name}"
                self._values[parameter] = f"{owner}.{name}"
        loose = [p for group in self._groups for p in group if p not in self._names]
        self._names |= {p: f"~{i}" for i, p in enumerate(loose)}
        if loose:
            logger.warning(
                "%s of a %s belong to no module among the unit's attributes: their values are not in its checkpoints. Make the "
                "module an attribute, several an nn.ModuleList.",
                "a parameter" if len(loose) == 1 else f"{len(loose)} parameters",
                type(optimizer).__name__,
            )

    def state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            own |= _leaves(f"state.{self._names[parameter]}", self._optimizer.state.get(parameter, {}))
        options = {
            f"param_groups.{self._names[parameter]}.{key}": value
            for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True)
            for parameter in parameters
            for key, value in group.items()
            if key != "params"
        }
        if not self._is_divided:
            return {**own, **options}
        # Numbers are written by rank 0 alone, which does not own all of them.
        numbers = agree.gather({k: v for k, v in own.items() if not isinstance(v, torch.Tensor)})
        return {k: v for each in (*numbers, own, options) for k, v in each.items()}

    def full_names(self) -> dict[str, str]:
        """By a parameter's name here, its name in the checkpoint."""
        return {name: self._values[parameter] for parameter, name in self._names.items() if parameter in self._values}

    def targets(self, me: str, saved: Saved, values: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Tensors to be filled from a checkpoint, and parameters of which it knows nothing. Changes nothing yet.

        What an optimizer has not computed with yet has no state, and is given what the checkpoint has, whatever that is: no
        step is made to see what a state would be.

        Args:
            me: this state's name in the checkpoint.
            values: what else it holds of this state.
        """
        by_parameter = _by_parameter((k.removeprefix(f"{me}.") for k in saved if k.startswith(f"{me}.")), self._names.values())
        found: dict[str, torch.Tensor] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names[parameter]
                living = _leaves(f"state.{name}", self._optimizer.state.get(parameter, {}))
                weight = saved.get(self._values.get(parameter, ""))
                for key in by_parameter.get(name, ()):
                    dtype, shape = saved[f"{me}.{key}"]
                    _check_fused(group, parameter, f"{me}.{key}", shape)
                    now = living.get(key)
                    if isinstance(now, torch.Tensor) and list(now.shape) == shape:
                        found[key] = now
                        continue
                    if weight is not None and dtype == weight[0]:
                        dtype = parameter.dtype  # a state of its parameter's type, as torch's optimizers have it
                    found[key] = _room(parameter, dtype, shape)
        found |= _tensor_options(me, saved)
        known = _known((*values, *found))
        everyones = [self._names[parameter] for group in self._groups for parameter in group]
        return found, [f"param_groups.{name}" for name in everyones if name not in known]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of what `state_dict` knows; what it knows without a state has none then."""
        known = _known(state_dict)
        state: dict[int, dict[str, Any]] = {}
        parameters: list[torch.Tensor] = []
        groups: list[dict[str, Any]] = []
        by_parameter = _by_parameter(state_dict, self._names.values())
        for group, everyones in zip(self._optimizer.param_groups, self._groups, strict=True):
            options = _options(group, [name for p in everyones if (name := self._names[p]) in known], state_dict)
            numbers = range(len(parameters), len(parameters) + len(group["params"]))
            groups.append({**options, "params": list(numbers)})
            for parameter in group["params"]:
                name, number = self._names[parameter], len(parameters)
                parameters.append(parameter)
                living = self._optimizer.state.get(parameter, {})
                if name not in known and living:
                    state[number] = living
                elif keys := by_parameter.get(name):
                    state[number] = _nested(f"state.{name}", {k: state_dict[k] for k in keys})
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        for number, given in state.items():
            _keep_types(self._optimizer.state[parameters[number]], given)


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

    @functools.cached_property
    def _names(self) -> list[list[str]]:
        """Of each group's parameters."""
        stateless = {**self._optimizer.state_dict(), "state": {}}
        return [[_plain(n) for n in group["params"]] for group in self._translated(stateless)["param_groups"]]

    def full_names(self) -> dict[str, str]:
        return {name: f"{self._owner}{name}" for group in self._names for name in group}

    def state_dict(self) -> dict[str, Any]:
        state = self._optimizer.state_dict()
        absent = self._complete(state)
        translated = self._translated(state)
        own: dict[str, Any] = {}
        for name, each in translated["state"].items():
            own |= _leaves(f"state.{_plain(name)}", each)
        for group in translated["param_groups"]:
            own |= {f"param_groups.{_plain(n)}.{k}": v for n in group["params"] for k, v in group.items() if k != "params"}
        return {key: value for key, value in own.items() if key not in absent}

    def _complete(self, state: dict[str, Any]) -> set[str]:
        """Add zeros where only some parameters have a state, which torch 2.13 takes for a broken one. Returns what was added."""
        names = {parameter: _plain(name) for name, parameter in self._module.named_parameters()}
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
        mine = (k.removeprefix(f"{me}.") for k in saved if k.startswith(f"{me}."))
        for key in (k for keys in _by_parameter(mine, names).values() for k in keys):
            dtype, shape = saved[f"{me}.{key}"]
            if shape:
                found[key] = empty(*shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
            else:
                found[key] = torch.empty((), dtype=dtype)
        found |= _tensor_options(me, saved)
        known = _known((*values, *found))
        return found, [f"param_groups.{n}" for n in names if n not in known]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        known = _known(state_dict)
        by_parameter = _by_parameter(state_dict, [n for group in self._names for n in group])
        state = {n: _nested(f"state.{n}", {k: state_dict[k] for k in keys}) for n, keys in by_parameter.items()}
        groups = [
            {**_options(group, [n for n in names if n in known], state_dict), "params": names}
            for group, names in zip(self._optimizer.param_groups, self._names, strict=True)
        ]
        local = FSDP.optim_state_dict_to_load(self._module, self._optimizer, {"state": state, "param_groups": groups})
        self._optimizer.load_state_dict(local)


def _kind(value: Any) -> list[Any]:
    """[type, whether it has dimensions] of a tensor; empty for a number."""
    return [str(value.dtype).removeprefix("torch."), value.dim() > 0] if isinstance(value, torch.Tensor) else []


def _zeros(kind: list[Any], like: torch.Tensor) -> Any:
    if not kind:
        return 0
    dtype = getattr(torch, kind[0])
    return torch.zeros_like(like, dtype=dtype, requires_grad=False) if kind[1] else torch.zeros((), dtype=dtype)


def _keep_types(loaded: Any, given: Mapping[str, Any]) -> None:
    """Undo that torch gives every tensor of a state its parameter's type."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            _keep_types(loaded[key], value)
        elif isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype and key != "step":
            loaded[key] = value.to(loaded[key].device)


def plain_names(module: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that the module's author gave them; of a tied one the first, or every one."""
    yield from _plainly(module, module.named_parameters(remove_duplicate=not every_name))


def _plainly(module: nn.Module, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Without what wrappers put into the names."""
    wrappers = {name for name, m in module.named_modules() if unwrapped(m) is not m}
    for name, tensor in named:
        parts = name.split(".")
        kept = [p for i, p in enumerate(parts) if p not in _WRAPPED and not (p == "module" and ".".join(parts[:i]) in wrappers)]
        yield ".".join(kept), tensor


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def _leaves(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state without its nesting, keyed by path."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        found |= _leaves(f"{prefix}.{key}", value) if isinstance(value, Mapping) else {f"{prefix}.{key}": value}
    return found


def _nested(prefix: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, value in leaves.items():
        *outer, last = path.removeprefix(f"{prefix}.").split(".")
        inner = made
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return made


def _known(keys: Iterable[str]) -> set[str]:
    """The parameters whose options are among the keys: all that the saved optimizer had."""
    return {k.removeprefix("param_groups.").rpartition(".")[0] for k in keys if k.startswith("param_groups.")}


def _tensor_options(me: str, saved: Saved) -> dict[str, torch.Tensor]:
    """Room for options that are tensors, such as a learning rate on a GPU."""
    mine = {k.removeprefix(f"{me}."): kind for k, kind in saved.items() if k.startswith(f"{me}.param_groups.")}
    return {key: torch.empty(shape, dtype=dtype) for key, (dtype, shape) in mine.items()}


def _by_parameter(keys: Iterable[str], names: Collection[str]) -> dict[str, list[str]]:
    """The keys of a state by parameter: "state.<parameter>.<what>", where both may have dots in them."""
    every, found = set(names), dict[str, list[str]]()
    for key in keys:
        first, *parts = key.split(".")
        ends = range(len(parts) - 1, 0, -1) if first == "state" else ()
        name = next((n for end in ends if (n := ".".join(parts[:end])) in every), None)
        if name is not None:
            found.setdefault(name, []).append(key)
    return found


def _check_fused(group: Mapping[str, Any], parameter: torch.Tensor, key: str, shape: list[int]) -> None:
    """Fused kernels on CPUs believe in the shapes of a state: of another, they read and write beyond its memory (torch 2.13)."""
    wanted = [] if key.endswith(".step") else list(parameter.shape)
    if group.get("fused") and shape != wanted:
        raise CheckpointMismatchError(
            f"{key} has the shape {shape}, and a fused optimizer wants {wanted}. Use fused=False, if it is meant."
        )


def _room(parameter: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """An empty tensor for a state: cut as its parameter is, if it has its shape."""
    if list(parameter.shape) == shape and shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)


def _options(group: Mapping[str, Any], names: list[str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as its parameters had them; the group's own for what the checkpoint does not know.

    Raises:
        CheckpointMismatchError: they were in groups with different options.
    """
    options = {k: v for k, v in group.items() if k != "params"}
    prefixes = [f"param_groups.{name}." for name in names]
    if not prefixes:
        return options
    had = {k.removeprefix(prefixes[0]) for k in saved if k.startswith(prefixes[0])}
    for key in sorted(had - _HOW):
        value = saved[prefixes[0] + key]
        for name, prefix in zip(names, prefixes, strict=True):
            if saved.get(prefix + key) != value:
                raise CheckpointMismatchError(
                    f"{names[0]} and {name} are in one parameter group, but were saved with different {key}: {value} and "
                    f"{saved.get(prefix + key)}. Group the parameters as the saved run did, or leave the optimizer out: "
                    "RestoreOptions(restore_optimizers=False)."
                )
        options[key] = value
    return options


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
    optimizer = Partition.behind(optimizer)
    parameters = partition.parameters if partition is not None else [p for g in optimizer.param_groups for p in g["params"]]
    owners = _owners(parameters, modules)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for m in owners.values() for part in m.modules()):
        return FSDP1OptimizerState(owners, optimizer)
    return OptimizerState(owners, optimizer)


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
