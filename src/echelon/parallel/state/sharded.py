"""State dicts of shards warn when they are pickled, as by `torch.save`. Sharded modules and optimizers load whole tensors.

A pickled file would hold a part of the weights, or of the optimizer's state, under the names of the whole. torch's distributed
checkpoints, which handle shards, do not pickle state dicts; nor does `load_state_dict`.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.parallel.names import class_name
from echelon.parallel.shards import is_split, local, reshard
from echelon.parallel.state.inner import hooked

__all__ = ["part_like", "take_whole_states", "tell_when_module_is_pickled", "tell_when_optimizer_is_pickled"]

logger = logging.getLogger(__name__)

_OF_MODULE = (
    "%s.state_dict() holds only this rank's shards, and is being pickled, as by torch.save. On all ranks call "
    "get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
    "torch.distributed.checkpoint.state_dict, and save its result on rank 0; or let checkpoints= or a "
    "DistributedCheckpointSaver save the run (echelon ckpt export takes weights from there)"
)
_OF_OPTIMIZER = (
    "%s.state_dict() holds only the state of this rank's part of the parameters, and is being pickled, as by torch.save. Let "
    "checkpoints= or a DistributedCheckpointSaver save the run, with the whole state"
)


def tell_when_module_is_pickled(module: nn.Module) -> None:
    """Have state dicts of a sharded module warn, once, when they are pickled."""
    tell = _once(_OF_MODULE, class_name(module))

    def mark(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        if not prefix and hasattr(state, "_metadata"):
            state._metadata = _Part(state._metadata, tell)  # an attribute of the OrderedDict, pickled with it

    module.register_state_dict_post_hook(mark)


def tell_when_optimizer_is_pickled(optimizer: torch.optim.Optimizer) -> None:
    """Have state dicts of a sharded or partitioned optimizer warn, once, when they are pickled."""
    tell = _once(_OF_OPTIMIZER, type(optimizer).__name__)
    hooked(optimizer)
    optimizer.register_state_dict_post_hook(lambda optimizer, state: _Part(state, tell))


def _once(text: str, name: str) -> Callable[[], None]:
    has_warned = False

    def tell() -> None:
        nonlocal has_warned
        if not has_warned:
            has_warned = True
            logger.warning(text, name)

    return tell


class _Part(dict[str, Any]):
    """A dict that warns when it is pickled. The pickle, and what `copy` makes, is as of the dict that it was made from."""

    def __init__(self, given: dict[str, Any], tell: Callable[[], None]) -> None:
        super().__init__(given)
        self._kind: type = given._kind if isinstance(given, _Part) else type(given)
        self._tell = tell

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._tell()
        return self._kind, (), None, None, iter(self.items())

    def __copy__(self) -> _Part:
        return _Part(self, self._tell)

    def __deepcopy__(self, memo: Any) -> _Part:
        made = _Part(self, self._tell)
        made.update(copy.deepcopy(dict(self), memo))
        return made


# `load_state_dict` of a sharded module also takes whole tensors, such as pretrained weights.


def take_whole_states(root: nn.Module) -> None:
    """Let `load_state_dict` of a sharded module take whole tensors from now on. They must be equal on all ranks.

    Args:
        root: a root of `fully_shard`, whose parameters are split.
    """
    for part in root.modules():
        split = [name for name, p in part.named_parameters(recurse=False) if is_split(p)]
        if split:
            part.register_load_state_dict_pre_hook(partial(_split, weakref.ref(root), split))


def _split(root: weakref.ref[nn.Module], names: list[str], part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    own_parameters = dict(part.named_parameters(recurse=False))
    if not all(
        is_split(own_parameters[name]) for name in names if name in own_parameters
    ):  # an evaluation leaves gathered parameters, which would be freed with the loaded values
        reshard(root() or part)
        own_parameters = dict(part.named_parameters(recurse=False))
    for name in names:
        given, parameter = state.get(prefix + name), own_parameters.get(name)
        if parameter is None or not is_split(parameter) or not isinstance(given, torch.Tensor) or is_split(given):
            continue
        if given.shape == parameter.shape:  # else torch raises
            state[prefix + name] = part_like(given, parameter)


def part_like(given: torch.Tensor, parameter: Any) -> torch.Tensor:
    """This rank's part of a whole tensor, which every rank has, split like a parameter. Not collective."""
    from torch.distributed.tensor import DTensor

    part = local(parameter.detach())
    if part.numel():
        (place,) = parameter.__create_chunk_list__()  # what a rank holds, as torch's checkpoints ask (2.13)
        here = tuple(slice(begin, begin + size) for begin, size in zip(place.offsets, place.sizes, strict=True))
        part = given.detach()[here].to(part.device, copy=True).contiguous()
    else:
        part = part.to(given.dtype)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=given.shape, stride=given.stride())
