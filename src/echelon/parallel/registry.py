"""What is known of modules that are parallel already: a row for each kind, which the file that handles the kind adds.

A wrapper is recognised here and nowhere else: the rest of the library asks `Prepared`, and `Prepared.of` looks it up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from echelon.world.init import World

__all__ = ["Kind", "imported", "kind_of", "register", "unwrapped"]


@dataclass(frozen=True)
class Kind:
    """One way in which a module can have been made parallel.

    Args:
        name: what a checkpoint says of the run: "ddp".
        recognises: whether a module is of this kind. It is asked of every module, so it must be fast and import nothing.
        prepared: makes the Prepared of such a module.
        inner: the attribute with which a wrapper holds the module of the user; None if the module is changed in place.
    """

    name: str
    recognises: Callable[[nn.Module], bool]
    prepared: Callable[[Any, World], Any]
    inner: str | None = None


_kinds: list[Kind] = []


def register(kind: Kind) -> None:
    """Have `Prepared.of` recognise one more kind. Kinds exclude one another, so that their order does not matter."""
    _kinds.append(kind)


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of this very module, whatever is inside; None if it is as its author wrote it."""
    return next((kind for kind in _kinds if kind.recognises(module)), None)


def unwrapped(module: nn.Module) -> nn.Module:
    """What a wrapper holds as `module`, under the names of its author; else the module itself."""
    kind = kind_of(module)
    inner: nn.Module = module.module if kind is not None and kind.inner == "module" else module  # type: ignore[assignment]
    return inner


def imported(module: str, name: str) -> type | tuple[()]:
    """A class for isinstance, without an import: what has an instance has been imported already. Else `()`, that matches none."""
    return getattr(sys.modules.get(module), name, ())
