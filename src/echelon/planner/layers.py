"""Run a script until it would train, and show what its layout, or another, would do with each layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from echelon.common.errors import PlanError
from echelon.common.terminal import columns
from echelon.contracts.overrides import Overrides
from echelon.loop.auto.prepared_unit import PreparedUnit
from echelon.loop.callback import Callback
from echelon.loop.target import Enough, Target
from echelon.parallel.composed import Layout
from echelon.parallel.layouts import resolve, with_options_of
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.strategy import NOOPStrategy, Strategy
from echelon.planner.pretended import pretended_world
from echelon.planner.rows import Layers, layers_of
from echelon.planner.stand_ins import stand_ins
from echelon.world.init import World

__all__ = ["lines", "plan_layers"]

_STYLES = {
    "colwise": "its outputs are split; what follows works on a rank's own part of the features",
    "rowwise": "its inputs are split, and the results summed up; an embedding: its rows",
    "colwise_gather": "its outputs are split, and put together again",
    "rowwise_split": "its inputs are split, of which every rank has all, and the results summed up",
    "summed": "whole, on split features: its gradients are summed up",
}


@dataclass
class _Looks(Strategy):
    """Replaces a script's layout: records the module's layers and does not change them."""

    given: Strategy | None
    ranks: int | None
    found: list[Layers] = field(default_factory=list)

    name = "noop"

    def __post_init__(self) -> None:
        self.own: Strategy | None = None

    def __call__(self, own: Strategy | None) -> Strategy:
        self.own = own
        return self

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        layout = with_options_of(self.own, self.given) if self.given else self.own or NOOPStrategy()
        self.found.append(layers_of(module, layout, self.ranks or _least_ranks(layout)))
        return NOOPStrategy().prepare(module, world, recipe)


def plan_layers(target: Target, layout: str | None = None, ranks: int | None = None) -> list[Layers]:
    """What the layout does with the layers of each module that the script makes parallel. One process; the script does not train.

    Args:
        layout: replaces the script's own: a name, or axes such as "dp_shard=2,tp=4".
        ranks: number of ranks; by default the product of the layout's sizes, at least 2.
    Raises:
        UsageError: training would be refused for the same reason; or the script gives echelon no module.
    """
    looks = _Looks(resolve(layout), ranks)

    def far_enough(unit: Any, dataloader: Iterable[Any], callbacks: list[Callback]) -> list[Callback]:
        if isinstance(unit, PreparedUnit):
            unit.prepared  # noqa: B018  (made on first access)
        raise Enough

    with pretended_world(1) as mode, stand_ins(mode, gpus=1):
        target.run_until_enough(Overrides(looks, compile=False, observes=True), far_enough)
    if not looks.found:
        raise PlanError(
            f"{target.script} gave echelon no module that is not parallel already, so there is nothing to show. It must reach "
            "echelon's train, fit, prepare or prepare_module."
        )
    return looks.found


def _least_ranks(layout: Strategy) -> int:
    if not isinstance(layout, Layout):
        return 2
    sizes = [layout.pp, layout.dp_replicate, layout.dp_shard or 1, layout.cp, layout.tp]
    if layout.dp_shard is None and layout.ep > 1:
        sizes.append(layout.ep)
    return max(2, math.prod(size for size in sizes if size > 0))


def lines(layers: Layers) -> list[str]:
    """The result as lines of text: a table, and the meaning of its words."""
    total = sum(row.parameters for row in layers.rows)
    made = [f"{layers.kind} on {layers.ranks} ranks by {layers.layout}: {total:,} parameters"]
    made += [f"  {note}" for note in layers.notes]
    axes = list(layers.rows[0].told) if layers.rows else []
    sizes = [f"{row.parameters:,}" if row.parameters else "tied" for row in layers.rows]
    width = max(map(len, ("parameters", *sizes)))
    table = [["layer", "class", "parameters", *axes]]
    for row, size in zip(layers.rows, sizes, strict=True):
        table.append([row.name or "(itself)", row.kind, size.rjust(width), *row.told.values()])
    made += ["", *columns(table)]
    if known := [style for style in layers.styles if style in _STYLES]:
        made += ["", *(f"{style}: {_STYLES[style]}" for style in known)]
    return made
