"""The strategy of a row, in place of the one that the script gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from echelon.contracts.errors import UsageError
from echelon.parallel.composed import Layout
from echelon.parallel.ddp import DDPStrategy
from echelon.parallel.fsdp import FSDPStrategy
from echelon.parallel.layouts import in_words, resolve
from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy
from echelon.parallel.zero import ZeROStrategy
from echelon.prover.matrix import Row
from echelon.prover.values import widen
from echelon.world.init import rank_info
from echelon.world.mesh import AXES

__all__ = ["RowStrategy", "with_options_of"]


class RowStrategy(Strategy):
    """The strategy of a row, which for the row `yours` is the script's. It tells afterwards whether it was used: a module that a
    script wrapped by hand stays as it is.

    Attributes:
        own: the name of the script's.
        is_own: it is the script's, with all its options.
    """

    def __init__(self, row: Row, dtype: torch.dtype) -> None:
        self._row, self._given = row, resolve(row.strategy)
        self._strategy: Strategy = self._given or NOOPStrategy()
        self.name, self.own = self._strategy.name, ""
        self.used, self.is_own, self._dtype = False, True, dtype

    def __call__(self, own: Strategy | None) -> Strategy:
        """In place of the script's own strategy."""
        own = own or NOOPStrategy()
        if self._given is None and isinstance(own, NOOPStrategy) and rank_info().world_size > 1:
            raise UsageError("the script names no strategy: it is for one process.")
        mine = with_options_of(own, own)
        self._strategy = self._given or (mine if self._dtype is torch.float64 else own)
        if isinstance(self._row.strategy, str):
            self._strategy = with_options_of(own, self._strategy)
        self.name, self.own = self._strategy.name, in_words(own)
        self.is_own = self.is_own and self._strategy == mine
        return self

    def prepare(self, module: Any, world: Any, recipe: Any) -> Prepared[Any]:
        self.used = True
        if self._dtype is torch.float64:
            widen(module)  # which may be in half precision
        return self._strategy.prepare(module, world, recipe)


def with_options_of(own: Strategy, given: Strategy) -> Strategy:
    """`given`, a strategy that was only named, with the options of the script's own strategy, if it is one of the same family.

    They tell what the model needs: that parameters stay unused, which modules are blocks. Mixed precision is left out.
    """
    ddp = own.options if isinstance(own, ZeROStrategy) else own
    fsdp = replace(ddp, mixed_precision=None) if isinstance(ddp, FSDPStrategy) else None
    if isinstance(given, DDPStrategy) and isinstance(ddp, DDPStrategy):
        return ddp
    if isinstance(given, ZeROStrategy) and given.stage == 1 and isinstance(ddp, DDPStrategy):
        return replace(given, options=ddp)
    if isinstance(given, ZeROStrategy) and given.stage > 1 and fsdp is not None:
        return replace(given, options=replace(fsdp, sharding_strategy=None, reshard_after_forward=None))
    if isinstance(given, FSDPStrategy) and fsdp is not None:
        return fsdp
    if isinstance(given, Layout) and isinstance(own, Layout):
        return replace(own, **{axis: getattr(given, axis) for axis in (*AXES, "ep")})
    return own if type(own) is type(given) and not isinstance(own, ZeROStrategy) else given
