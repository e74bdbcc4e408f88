"""Parameters that modules in wrappers of their own share: the wrapper around them all takes them over.

Each wrapper gathers and frees its own parameters, and gradients of one parameter must come together in one place. So when a
second module with such a parameter is wrapped, the first wrapper is built again without it, and one around both shards it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.common.errors import LayoutError
from echelon.compat.fairscale.nn.data_parallel.torch_fsdp import name_plainly, pieces, unignore

__all__ = ["Owners"]

_MARK = "_is_in_shards"


class Owners:
    """Which wrapper shards a parameter, and what wrappers have given away."""

    _all: ClassVar[WeakSet[TorchFSDP]] = WeakSet()
    _given: ClassVar[WeakKeyDictionary[TorchFSDP, dict[nn.Parameter, str]]] = WeakKeyDictionary()

    @staticmethod
    def claim(wrapper: TorchFSDP) -> None:
        """The wrapper has just been built."""
        Owners._all.add(wrapper)
        name_plainly(wrapper)
        for piece in pieces(wrapper):
            setattr(piece.parameter, _MARK, True)

    @staticmethod
    def take_back(module: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[nn.Parameter, str]:
        """Those of a module's own parameters that a wrapper shards become ordinary ones again, by new objects. Collective.

        Returns:
            Those that a wrapper elsewhere has as well, so that neither of them can shard them; with the names of both.
        """
        elsewhere: dict[nn.Parameter, str] = {}
        for name, parameter in parameters.items():
            if not hasattr(parameter, _MARK):
                continue
            held = [(each, piece) for each in Owners._all for piece in pieces(each) if piece.parameter is parameter]
            if not held:  # of a wrapper that is gone
                continue
            owner, piece = held[0]
            names = f"{type(owner.module).__name__}.{piece.name} and {type(module).__name__}.{name}"
            whole = _without(owner, parameter)
            for each, own_name in _places(module, parameter):
                setattr(each, own_name, whole)
            Owners._given.setdefault(owner, {})[whole] = names
            if all(each is not owner for each in module.modules()):
                elsewhere[whole] = names
        return elsewhere

    @staticmethod
    def give_away(wrapper: TorchFSDP, parameters: dict[nn.Parameter, str]) -> None:
        """The wrapper has been built without these."""
        Owners._given[wrapper] = dict(parameters)
        unignore(wrapper, parameters)

    @staticmethod
    def of_several(wrapper: TorchFSDP) -> bool:
        """Whether the wrapper has given something away."""
        return bool(Owners._given.get(wrapper))

    @staticmethod
    def check(wrapper: TorchFSDP) -> None:
        """Before a forward.

        Raises:
            UsageError: no wrapper has taken over what this one shares with another.
        """
        for parameter, names in Owners._given.get(wrapper, {}).items():
            if not hasattr(parameter, _MARK):
                raise LayoutError(
                    f"{names} are one parameter, in two wrappers: neither can shard it. Wrap a module that has both."
                )


def _without(owner: Any, parameter: nn.Parameter) -> nn.Parameter:
    """Build the owner again without a parameter, which is returned whole."""
    module, options, held = owner.module, owner.options, pieces(owner)
    given = Owners._given.get(owner, {})
    with TorchFSDP.summon_full_params(owner, recurse=False, writeback=False):
        whole = {p.parameter: nn.Parameter(p.parameter.detach().clone(), p.parameter.requires_grad) for p in held}
    for old, new in whole.items():
        for each, name in _places(module, old):
            setattr(each, name, new)
    ignored = {whole[parameter]: "", **given}
    vars(owner)["without"] = ignored
    group, training = owner.process_group, owner.training
    owner.__init__(module, group, **options)
    owner.training = training
    unignore(owner, ignored)
    return whole[parameter]


def _places(module: nn.Module, parameter: torch.Tensor) -> Iterator[tuple[nn.Module, str]]:
    for each in list(module.modules()):
        for name, its in list(each.named_parameters(recurse=False, remove_duplicate=False)):
            if its is parameter:
                yield each, name
