"""What is known of modules that are parallel already: a row for each kind, which the file that handles the kind adds.

A wrapper is recognised here and nowhere else: the rest of the library asks `Prepared`, and `Prepared.of` looks it up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.world.init import World

__all__ = ["Kind", "imported", "kind_of", "register", "wrapper_of"]


@dataclass(frozen=True)
class Kind:
    """One way in which a module can have been made parallel.

    Args:
        name: what a checkpoint says of the run: "ddp".
        recognises: whether a module is of this kind. It is asked of every module, so it must be fast and import nothing.
        prepared: makes the Prepared of such a module.
        inner: the attribute with which a wrapper holds the module of the user; None if the module is changed in place.
        by_parameters: it is seen in the parameters alone, and asked of what is no other kind; a layout may be applied on top.
        unknown_to_torch: `torch.distributed.checkpoint.state_dict` leaves the wrapper in names.
        module_state: makes the state by name of such a module, where it is not a `ModuleState`.
        optimizer_state: makes the state by name of an optimizer over such modules, where it is not an `OptimizerState`.
    """

    name: str
    recognises: Callable[[nn.Module], bool]
    prepared: Callable[[Any, World], Any]
    inner: str | None = None
    by_parameters: bool = False
    unknown_to_torch: bool = False
    module_state: Callable[[Any], Any] | None = None
    optimizer_state: Callable[[Mapping[str, nn.Module], torch.optim.Optimizer], Any] | None = None


_kinds: list[Kind] = []
_by_parameters: list[Kind] = []


def register(kind: Kind) -> None:
    """Have `Prepared.of` recognise one more kind. Kinds exclude one another, so that their order does not matter."""
    (_by_parameters if kind.by_parameters else _kinds).append(kind)


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of this very module, whatever is inside; None if it is as its author wrote it."""
    found = wrapper_of(module)
    return found if found is not None else next((kind for kind in _by_parameters if kind.recognises(module)), None)


def wrapper_of(module: nn.Module) -> Kind | None:
    """As `kind_of`, without looking at parameters."""
    return next((kind for kind in _kinds if kind.recognises(module)), None)


def imported(module: str, name: str) -> type | tuple[()]:
    """A class for isinstance, without an import: what has an instance has been imported already. Else `()`, that matches none."""
    return getattr(sys.modules.get(module), name, ())
