"""Base of all layouts: a `Strategy` is a frozen value whose `prepare` turns a module into a `Prepared`."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

from torch import nn

from echelon.common.arguments import flags_of
from echelon.common.errors import LayoutError
from echelon.parallel.meta.materialize import materialize
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe.recipe import Recipe
from echelon.world.init import World

__all__ = ["NOOPStrategy", "Prepared", "Strategy"]


class Strategy(ABC):
    """The value of a layout: how a module is made parallel. Subclasses are frozen dataclasses and final.

    `name` is what users write (`layout="ddp"`) and messages show.
    """

    name: str

    def __post_init__(self) -> None:
        """Refuse invalid options of a dataclass, before any rank waits for another. Overrides call this method."""
        if is_dataclass(self):
            flags_of(self, kind=LayoutError)

    def __repr__(self) -> str:
        """The class and, for a dataclass, the options that differ from their defaults."""
        options: tuple[Any, ...] = fields(self) if is_dataclass(self) else ()
        given = [f"{each.name}={value!r}" for each in options if (value := getattr(self, each.name)) != each.default]
        return f"{type(self).__name__}({', '.join(given)})"

    def but(self, **options: Any) -> Self:
        """A copy with these options changed. They must be valid: nothing checks them."""
        made = copy.copy(self)
        for name, value in options.items():
            object.__setattr__(made, name, value)
        return made

    @abstractmethod
    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        """Make the module parallel over `world`. Collective: every rank calls it with a module of the same shape.

        Args:
            module: as the user built it; may be changed in place.
            world: the ranks, and this rank's device.
            recipe: recompute and compile; `parallelize` says in which order they and the layout are applied.
        """


@dataclass(frozen=True, repr=False)
class NOOPStrategy(Strategy):
    """One process, or ranks that the user keeps in step by hand: the module is moved to the device and left alone."""

    name = "none"

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        materialize(module, world.device, same_on_all=False)
        return Prepared(recipe.applied(module.to(world.device)))
