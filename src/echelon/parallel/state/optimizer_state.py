"""The state of an optimizer, keyed by parameter name under any layout.

A tied parameter has its first name here; a module's state has all of its names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path

from echelon.common.errors import CheckpointError, CheckpointMismatchError
from echelon.parallel.names import plain_names
from echelon.parallel.shards import is_split, local, ranks_apart
from echelon.parallel.state import keys as state_keys
from echelon.parallel.state.inner import linked, put_inside, state_of, without_inner
from echelon.parallel.state.keys import Saved
from echelon.parallel.state.partition import Partition, parameter_groups
from echelon.world import agree

__all__ = ["FURTHER", "OptimizerState", "ZeroRedundancyState", "further_state", "given_back"]


class OptimizerState:
    """An optimizer's state, keyed "state.<parameter>.<what>" and "param_groups.<parameter>.<option>".

    Parameters that no module has, such as a learned loss weight, are in no other state, so their values are saved here:
    "values.<parameter>". Whatever else `state_dict()` has is saved as "further", once for all parameters.

    If the optimizer is partitioned over the ranks, each rank has the tensors of the parameters that it owns, and the methods are
    collective.

    Args:
        modules: the modules that hold its parameters, by name.
        optimizer: for a partitioned optimizer, the one with this rank's parameters.
        everyones: the parameters of each group, also those of other ranks, if there is no `Partition`.
    """

    keyed_by_name = True

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        everyones: list[list[nn.Parameter]] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._is_divided = everyones is not None or Partition.of(optimizer) is not None
        self._groups = parameter_groups(optimizer) if everyones is None else everyones
        self._apart = next((group for module in modules.values() if (group := ranks_apart(module)) is not None), None)
        # A parameter's name here, and the name of its value in the checkpoint.
        self._names: dict[torch.Tensor, str] = {}
        self._values: dict[torch.Tensor, str] = {}
        for owner, module in modules.items():
            for name, parameter in plain_names(module):
                self._names[parameter] = name if len(modules) == 1 else f"{owner}.{name}"
                self._values[parameter] = f"{owner}.{name}"
        self._loose: dict[torch.Tensor, str] = {
            p: f"~{i}" for i, p in enumerate(p for group in self._groups for p in group if p not in self._names)
        }
        self._names |= self._loose

    def state_dict(self) -> dict[str, Any]:
        owned = [p for group in self._optimizer.param_groups for p in group["params"] if self._owns(p)]
        own: dict[str, Any] = {f"values.{self._loose[p]}": p.detach() for p in owned if p in self._loose}
        for parameter in owned:
            held = state_keys.leaves(f"state.{self._names[parameter]}", state_of(self._optimizer, parameter))
            own |= {key: as_float(value) for key, value in held.items()}
        options = {
            f"param_groups.{self._names[parameter]}.{key}": value
            for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True)
            for parameter in parameters
            for key, value in group.items()
            if key != "params" and not callable(value)  # functions, such as a filter of LARS, are the script's
        }
        if further := further_state(self._optimizer, is_divided=self._is_divided or self._apart is not None):
            options[FURTHER] = further
        if self._apart is not None:
            return {**self._of_all_stages({**options, **own}), **options, **own}
        if not self._is_divided:
            return {**own, **options}
        # Only rank 0 writes numbers, and it does not own all of them.
        numbers = {k: v for k, v in own.items() if not isinstance(v, torch.Tensor)}
        listed = next((key for key, value in numbers.items() if _has_tensors(value)), None)
        kind = type(self._optimizer).__name__
        agree.raise_on_all(
            listed
            and f"{kind} must keep tensors by name where each rank has the state of its own parameters, got a list of tensors in "
            f"{listed}, which rank 0 cannot write. Train under 'ddp', or let it keep a dict of them.",
            CheckpointError,
        )
        return {k: v for each in (*agree.gather(numbers), own, options) for k, v in each.items()}

    @property
    def may_differ(self) -> bool:
        """Whether ranks may keep other values of one tensor: a class of the script's own may divide its work over them itself."""
        return not (self._is_divided or self._apart is not None or type(self._optimizer).__module__.startswith("torch."))

    def whole(self) -> dict[str, torch.Tensor]:
        """The whole tensors of the state, by key."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        held = (state_keys.leaves(f"state.{self._names[p]}", state_of(self._optimizer, p)) for p in parameters)
        values = {key: value for each in held for key, value in each.items() if isinstance(value, torch.Tensor)}
        return {key: value for key, value in values.items() if not is_split(value) and not is_low_bit(value)}

    def _of_all_stages(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Plain values for the parameters of all stages, since only rank 0 writes them. Collective over the pipeline."""
        states = agree.gather([[k, *_packed(v)] for k, v in state.items() if _packed(v)], self._apart)
        return {k: tuple(v) if is_tuple else v for each in states for k, v, is_tuple in each}

    def _owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank owns a parameter of the optimizer's groups."""
        partition = Partition.of(self._optimizer)
        return partition is None or partition.owns(parameter)

    def full_names(self) -> dict[str, str]:
        """Maps a parameter's name here to its name in the checkpoint."""
        return {name: self._values[parameter] for parameter, name in self._names.items() if parameter in self._values}

    def targets(self, me: str, saved: Saved, values: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Tensors to be filled from a checkpoint, and options of parameters that the checkpoint lacks. Changes nothing yet.

        A parameter before its first step has no state, so it gets room for whatever the checkpoint has. No trial step is made to
        find out what its state would be.

        Args:
            me: this state's name in the checkpoint.
            values: the checkpoint's entries of this state that are not tensors.
        """
        by_parameter = state_keys.by_parameter(state_keys.mine(me, saved), self._names.values())
        room: dict[str, torch.Tensor] = {}
        for group in self._optimizer.param_groups:
            for parameter in filter(self._owns, group["params"]):
                name = self._names[parameter]
                living = state_keys.leaves(f"state.{name}", state_of(self._optimizer, parameter))
                weight = saved.get(self._values.get(parameter, ""))
                for key in by_parameter.get(name, ()):
                    dtype, shape = saved[f"{me}.{key}"]
                    _check_fused(group, parameter, f"{me}.{key}", shape)
                    now = living.get(key)
                    if isinstance(now, torch.Tensor) and list(now.shape) == shape and not is_low_bit(now):
                        room[key] = now
                        continue
                    if weight is not None and dtype == weight[0]:
                        dtype = parameter.dtype  # the state had its parameter's dtype, as in torch's optimizers
                    room[key] = _room(parameter, dtype, shape)
        room |= state_keys.tensor_options(me, saved) | self._saved_values(me, saved)
        known = state_keys.known((*values, *room))
        everyones = [self._names[parameter] for group in self._groups for parameter in group]
        return room, [f"param_groups.{name}" for name in everyones if name not in known]

    def untrained(self, values: Mapping[str, Any]) -> list[str]:
        """Parameters that the saved optimizer held and this one does not, although they are not frozen.

        Args:
            values: the checkpoint's entries of this state that are not tensors.
        """
        known, own_parameters = state_keys.known(values), {p for group in self._groups for p in group}
        left = (name for p, name in self._names.items() if name in known and p not in own_parameters and p.requires_grad)
        return [f"param_groups.{name}" for name in left]

    def _saved_values(self, me: str, saved: Saved) -> dict[str, torch.Tensor]:
        """Parameters that no module has and whose values the checkpoint holds."""
        values = {f"values.{name}": p.detach() for p, name in self._loose.items()}
        return {key: value for key, value in values.items() if f"{me}.{key}" in saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the parameters in `state_dict`. A parameter that is there without a state has no state afterwards."""
        known = state_keys.known(state_dict)
        state: dict[int, Mapping[str, Any]] = {}
        parameters: list[torch.Tensor] = []
        groups: list[dict[str, Any]] = []
        by_parameter = state_keys.by_parameter(state_dict, self._names.values())
        for group, everyones in zip(self._optimizer.param_groups, self._groups, strict=True):
            options = state_keys.options(group, [name for p in everyones if (name := self._names[p]) in known], state_dict)
            numbers = range(len(parameters), len(parameters) + len(group["params"]))
            groups.append({**options, "params": list(numbers)})
            for parameter in group["params"]:
                name, number = self._names[parameter], len(parameters)
                parameters.append(parameter)
                if not self._owns(parameter):
                    continue
                living = state_of(self._optimizer, parameter)
                if name not in known and living:
                    state[number] = living
                elif keys := by_parameter.get(name):
                    state[number] = state_keys.nested(f"state.{name}", {k: state_dict[k] for k in keys})
        further = given_back(self._optimizer, state_dict.get(FURTHER))
        outer = {number: own for number, given in state.items() if (own := without_inner(given))}
        link = linked(self._optimizer)
        self._optimizer.load_state_dict({**further["dict"], "state": {**further["state"], **outer}, "param_groups": groups})
        link()
        for number, given in state.items():
            _keep_types(self._optimizer.state[parameters[number]], outer.get(number, {}))
            put_inside(self._optimizer, parameters[number], given)
            quantise_again(self._optimizer, parameters[number])


class ZeroRedundancyState(OptimizerState):
    """The state of torch's ZeroRedundancyOptimizer: that of the optimizer inside it."""

    def __init__(self, modules: Mapping[str, nn.Module], optimizer: Any) -> None:
        super().__init__(modules, optimizer.optim, [list(group["params"]) for group in optimizer.param_groups])
        self._outer = optimizer

    def state_dict(self) -> dict[str, Any]:
        self._give_options(self._outer, self._optimizer)  # a schedule's latest options, which the next step would pass on
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._give_options(self._optimizer, self._outer)

    @staticmethod
    def _give_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
        for given, group in zip(source.param_groups, target.param_groups, strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})


def _has_tensors(value: Any) -> bool:
    """Whether a list or a tuple holds tensors, as Kron's factors are."""
    return isinstance(value, list | tuple) and any(isinstance(each, torch.Tensor) or _has_tensors(each) for each in value)


def _packed(value: Any) -> list[Any]:
    """A plain value, and whether it is a tuple; empty for other values."""
    parts = value if isinstance(value, tuple | list) else [value]
    plain = all(each is None or isinstance(each, bool | int | float | str) for each in parts)
    return [value, isinstance(value, tuple)] if plain else []


def _keep_types(loaded: Any, given: Mapping[str, Any]) -> None:
    """Restore dtypes: torch casts every loaded tensor of a state to its parameter's dtype."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            _keep_types(loaded[key], value)
        elif isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype and key != "step":
            loaded[key] = value.to(loaded[key].device)


def _check_fused(group: Mapping[str, Any], parameter: torch.Tensor, key: str, shape: list[int]) -> None:
    """Refuse a state of another shape: fused CPU kernels do not check it, and read and write beyond its memory (torch 2.13)."""
    wanted = [] if key.endswith(".step") else list(parameter.shape)
    if group.get("fused") and shape != wanted:
        raise CheckpointMismatchError(
            f"{key} has the shape {shape}, but a fused optimizer needs {wanted}. Use fused=False, if it is meant."
        )


def _room(parameter: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """An empty tensor for a state, sharded like its parameter if it has the same shape."""
    if list(parameter.shape) == shape and shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)


# Quantised state, as of torchao's AdamW8bit: checkpoints have it dequantised, in float32.
#
# So it can be loaded under any layout, on any number of ranks, or with another optimizer. A resume quantises it once more than an
# uninterrupted run, so the resumed run is not bit-equal.
#
# torchao 0.18 has no public way to make an empty state: `_new_buffer` decides which parameters are large enough for one.
# tests/parallel/test_low_bit.py fails when that changes.


def is_low_bit(value: Any) -> bool:
    """Whether it is a quantised tensor."""
    if not isinstance(value, torch.Tensor):
        return False
    kind = type(local(value))
    return kind is not torch.Tensor and hasattr(kind, "__tensor_flatten__") and "dequantize" in vars(kind)


def as_float(value: Any) -> Any:
    """A quantised tensor dequantised; any other value as it is."""
    if not is_low_bit(value):
        return value
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return value.dequantize()
    numbers = value.to_local().dequantize()
    return DTensor.from_local(
        numbers, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


@torch.no_grad()
def quantise_again(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Quantise a parameter's state, which was loaded dequantised, as the optimizer keeps it."""
    make: Callable[[torch.Tensor, bool], torch.Tensor] | None = getattr(optimizer, "_new_buffer", None)
    if make is None or not type(optimizer).__module__.startswith("torchao."):
        return
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() and not is_low_bit(value):
            kept = make(parameter, key == "exp_avg")  # signed, unlike squares
            local(kept).copy_(local(value))
            state[key] = kept


# Further state of an optimizer, besides that of its parameters and their options, such as a count of its own steps.
#
# torch's `state_dict()` includes entries of `optimizer.state` whose keys are not parameters; a class or a hook may add keys
# beside "state" and "param_groups". Both must be plain values and whole tensors, equal on all ranks; if values differ, rank 0's
# are saved.

# Its key in a checkpoint, beside those of the parameters.
FURTHER = "further"

# {"state": by key, "dict": by key, "off_cpu": paths of the tensors that were on an accelerator}
Further = dict[str, Any]

_BY_TENSORS = object()  # stands for an entry whose key is a tensor

_REMEDY = (
    "Keep state of a parameter in optimizer.state[parameter], which is saved by the parameter's name under any layout; keep "
    "elsewhere only plain values and whole tensors by name, equal on every rank."
)


def further_state(optimizer: torch.optim.Optimizer, *, is_divided: bool = False) -> Further:
    """The optimizer's current further state; empty if there is none.

    Args:
        is_divided: each rank has only its own parameters' state. Then this is collective.
    Raises:
        CheckpointError: an entry that a checkpoint cannot restore, or entries that differ between ranks.
    """
    further, problem = _taken(optimizer)
    if is_divided:
        agree.raise_on_all(problem, CheckpointError)
        kinds = (f"{path} {tuple(v.shape)}" if isinstance(v, torch.Tensor) else path for path, v in _leaves(further))
        every = agree.kinds(sorted(kinds))
        if len(every) > 1:
            problem = (
                f"{type(optimizer).__name__}.state_dict() must hold the same on every rank, except for the state of parameters "
                f"that the rank owns, but ranks differ at {min(set(every[0]).symmetric_difference(*every[1:]))}. {_REMEDY}"
            )
    if problem is not None:
        raise CheckpointError(problem)
    off_cpu = [path for path, value in _leaves(further) if isinstance(value, torch.Tensor) and value.device.type != "cpu"]
    return further | {"off_cpu": off_cpu} if off_cpu else further


def _taken(optimizer: torch.optim.Optimizer) -> tuple[Further, str | None]:
    """The further state, and a message if it cannot be saved."""
    name, state_dict = type(optimizer).__name__, _told(optimizer)
    if not isinstance(state_dict, Mapping):
        return {}, f"{name}.state_dict() must give a dict, got a {type(state_dict).__name__}. {_REMEDY}"
    numbers = [key for key in optimizer.state if isinstance(key, int)]
    if numbers:
        return {}, f"the keys of {name}.state must be parameters and names, got {numbers[0]}. {_REMEDY}"
    state = state_dict.get("state")
    further = {
        # Integer keys stand for parameters, whose state is saved by name.
        "state": {k: v for k, v in state.items() if not isinstance(k, int)} if isinstance(state, Mapping) else {},
        "dict": {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")},
    }
    for path, value in _leaves(further):
        if value is _BY_TENSORS or is_split(value):
            got = "a dict by tensors" if value is _BY_TENSORS else "a part of a tensor"
            return {}, f"{name}.state_dict() must hold plain values and whole tensors, got {got} at {path}. {_REMEDY}"
    return further if further["state"] or further["dict"] else {}, None


def given_back(optimizer: torch.optim.Optimizer, saved: Any) -> Further:
    """The further state to load: the saved one, completed by the current one for entries that an older version did not save."""
    now = further_state(optimizer)
    if not isinstance(saved, Mapping):
        saved = {}
    off_cpu = set(saved.get("off_cpu", ()))
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    kept = {part: saved.get(part, {}) for part in ("state", "dict")}
    placed = tree_map_with_path(lambda keys, value: value.to(device) if _path(keys) in off_cpu else value, kept)
    return {part: {**now.get(part, {}), **placed[part]} for part in kept}


def _told(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer's `state_dict()`, without state of parameters that are in no group any more, for which torch raises."""
    own_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    dropped = {p: each for p, each in optimizer.state.items() if isinstance(p, torch.Tensor) and id(p) not in own_ids}
    for parameter in dropped:
        del optimizer.state[parameter]
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state.update(dropped)


def _leaves(value: Any) -> list[tuple[str, Any]]:
    """All values that are not containers, with their paths."""
    return [(_path(keys), _BY_TENSORS if _tensor_in(keys) else leaf) for keys, leaf in tree_flatten_with_path(value)[0]]


def _path(keys: Any) -> str:
    """The names and indices that lead to a value, up to one that is a tensor."""
    parts = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in keys]
    named = itertools.takewhile(lambda part: not isinstance(part, torch.Tensor), parts)
    return ".".join(map(str, named)).removeprefix("dict.")


def _tensor_in(keys: Any) -> bool:
    return any(isinstance(getattr(key, "key", None), torch.Tensor) for key in keys)
