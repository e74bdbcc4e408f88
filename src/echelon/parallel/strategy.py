"""How a module is made parallel: a `Strategy` is a frozen value, and its `prepare` turns a module into a `Prepared`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

from torch import nn

from echelon.contracts.arguments import flags_of
from echelon.contracts.errors import UsageError
from echelon.parallel.materialize import materialize
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe import Recipe
from echelon.world.init import World
from echelon.world.mesh import AXES

__all__ = ["STRATEGIES", "NOOPStrategy", "Prepared", "Strategy", "resolve"]


class Strategy(ABC):
    """How a module is made parallel. Subclasses are frozen dataclasses and final.

    `name` is what users write: `strategy="ddp"`.
    """

    name: str

    def __post_init__(self) -> None:
        """Of a dataclass: refuse what makes no sense, before any rank waits for another. Overrides call this one."""
        if is_dataclass(self):
            flags_of(self)

    @abstractmethod
    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        """Make the module parallel over `world`. Collective: every rank calls it with a module of the same shape.

        Args:
            module: as the user built it; may be changed in place.
            world: the ranks, and this rank's device.
            recipe: recompute and compile; `parallelize` owns the order in which they and the strategy are applied.
        """


@dataclass(frozen=True)
class NOOPStrategy(Strategy):
    """One process, or ranks that the user keeps in step by hand: the module is moved to the device and left alone."""

    name = "noop"

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        materialize(module, world.device, same_on_all=False)
        return Prepared(recipe.compile(recipe.checkpoint_activations(module.to(world.device))))


# By name. `parallel/__init__` fills it, so that this file needs to know none of them.
STRATEGIES: dict[str, Callable[[], Strategy]] = {}


def resolve(strategy: Strategy | str | None) -> Strategy | None:
    """A strategy from its name, from axes such as "dp_shard=2,tp=4" or "cp", or itself; None stays None: a wrapped module has its
    own.

    Raises:
        UsageError: an unknown name, with the known ones.
    """
    if strategy is None or isinstance(strategy, Strategy):
        return strategy
    if strategy in AXES and strategy not in STRATEGIES:  # of all ranks
        strategy = f"{strategy}=-1"
    if isinstance(strategy, str) and "=" in strategy:
        made: Strategy = STRATEGIES["parallel"].parse(strategy)  # type: ignore[attr-defined]
        return made
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise UsageError(
            f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, axes such as 'dp_shard=2,tp=4' or 'pp', or a Strategy "
            f"such as DDPStrategy(...), got {strategy!r}."
        )
    return STRATEGIES[strategy]()
