"""The strategy of a row, in place of the one that the script gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from echelon.parallel.ddp import DDPStrategy
from echelon.parallel.fsdp import FSDPStrategy
from echelon.parallel.strategy import Prepared, Strategy
from echelon.parallel.strategy import resolve as resolve_strategy
from echelon.parallel.zero import ZeROStrategy
from echelon.prover.matrix import Row
from echelon.prover.values import widen

__all__ = ["RowStrategy", "with_options_of"]


class RowStrategy(Strategy):
    """The strategy of a row. It tells afterwards whether it was used: a module that a script wrapped by hand stays as it is."""

    def __init__(self, row: Row, dtype: torch.dtype) -> None:
        given = resolve_strategy(row.strategy)
        assert given is not None
        self.by_name, self._strategy, self.name = isinstance(row.strategy, str), given, given.name
        self.used, self._dtype = False, dtype

    def __call__(self, own: Strategy | None) -> Strategy:
        """In place of the script's own strategy."""
        if self.by_name and own is not None:
            self._strategy = with_options_of(own, self._strategy)
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
    return own if type(own) is type(given) and not isinstance(own, ZeROStrategy) else given
